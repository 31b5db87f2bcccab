//! From a request's sampling parameters to what the device's sampler needs, and back to events.

use std::borrow::Cow;
use std::collections::BTreeMap;

use qwill_contract::{SamplingParams, TokenLogprobs, TokenOut};
use qwill_device::{SampleRow, Sampled};

use crate::live::Live;
use crate::schedule::{RequestKey, SequenceKey};

/// A draw of a sequence's token after the pending one and its first `drafts` drafts, as if those were accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Draw {
    pub(crate) key: SequenceKey,
    pub(crate) drafts: usize,
    pub(crate) logits_row: usize,
}

/// What penalties look at in each of the draws.
pub(crate) fn seen_tokens<'a>(
    live: &'a BTreeMap<RequestKey, Live>,
    draws: &[Draw],
) -> Vec<Cow<'a, [(u32, u32)]>> {
    let seen = |draw: &Draw| live[&draw.key.request].sequence(draw.key.choice).seen_after(draw.drafts);
    draws.iter().map(seen).collect()
}

/// The draws as the device's sampler needs them, with what [`seen_tokens`] gives.
pub(crate) fn sample_rows<'a>(
    live: &'a BTreeMap<RequestKey, Live>,
    draws: &[Draw],
    seen: &'a [Cow<'a, [(u32, u32)]>],
    vocab_limit: usize,
) -> Vec<SampleRow<'a>> {
    let rows = draws.iter().zip(seen);
    rows.map(|(draw, seen)| sample_row(&live[&draw.key.request], *draw, seen, vocab_limit)).collect()
}

fn sample_row<'a>(live: &'a Live, draw: Draw, seen: &'a [(u32, u32)], vocab_limit: usize) -> SampleRow<'a> {
    let sequence = live.sequence(draw.key.choice);
    let SamplingParams { temperature, top_p, top_k, min_p, logprobs, .. } = live.request.sampling;
    let may_not_stop = sequence.generated() + draw.drafts < live.rule.min_tokens;
    SampleRow {
        logits_row: draw.logits_row,
        mask: sequence.guided.as_ref().and_then(|guided| guided.mask(draw.drafts)),
        temperature,
        top_k,
        top_p,
        min_p,
        presence_penalty: live.request.sampling.presence_penalty,
        frequency_penalty: live.request.sampling.frequency_penalty,
        repetition_penalty: live.request.sampling.repetition_penalty,
        seen,
        bias: &live.request.sampling.logit_bias,
        banned: if may_not_stop { &live.rule.stop_ids } else { &[] },
        vocab_limit,
        seed: sequence.seed,
        position: sequence.draw_position(draw.drafts),
        top_logprobs: logprobs,
    }
}

/// A drawn token as the client sees it.
pub(crate) fn token_out(sampled: Sampled, sampling: &SamplingParams) -> TokenOut {
    let logprobs = sampling.logprobs.map(|_| TokenLogprobs { logprob: sampled.logprob, top: sampled.top });
    TokenOut { id: sampled.token, logprobs }
}
