//! What speculation did, through the `metrics` facade. The names are listed in the crate's documentation.

use super::{MAX_DRAFTS, Source};

/// Places of a draft in its chain, as labels.
const POSITIONS: [&str; MAX_DRAFTS] =
    ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14"];

/// A sequence's round: the first `accepted` of `drafted` drafts were right, and `tokens` came of it.
pub fn round(source: Source, drafted: usize, accepted: usize, tokens: usize) {
    let name = source.name();
    metrics::histogram!("qwill_speculation_depth").record(drafted as f64);
    metrics::histogram!("qwill_speculation_round_tokens").record(tokens as f64);
    if drafted == 0 {
        return;
    }
    metrics::counter!("qwill_speculation_rounds_total", "source" => name).increment(1);
    metrics::counter!("qwill_speculation_drafted_tokens_total", "source" => name).increment(drafted as u64);
    for position in POSITIONS.into_iter().take(accepted) {
        metrics::counter!("qwill_speculation_accepted_tokens_total", "source" => name, "position" => position)
            .increment(1);
    }
}
