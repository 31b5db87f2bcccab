//! The figures of a row, and how they follow from its samples.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::protocol::{Overrides, Prompts, Protocol, Row};
use crate::request::Dialect;
use crate::reuse::Reuse;
use crate::sample::Sample;
use crate::server::{Abilities, ServerFacts};
use crate::stats::Summary;

/// Version of the JSON form; raised when a field changes its meaning.
const FORMAT: u32 = 1;

/// A whole measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Version of this form.
    pub format: u32,
    /// Under which conditions.
    pub conditions: Conditions,
    /// In the order in which they were run.
    pub rows: Vec<RowReport>,
    /// Whether it was stopped before its last row.
    pub interrupted: bool,
}

/// What one has to know to repeat it.
#[derive(Debug, Clone, Serialize)]
pub struct Conditions {
    /// Who was measured.
    pub server: ServerFacts,
    /// Who measured.
    pub client_version: String,
    /// With which command.
    pub command: Vec<String>,
    /// On which machine the client ran.
    pub client_host: String,
    /// That machine's processors; the client shares them with a server on the same machine.
    pub client_processors: usize,
    /// When it began.
    pub started_utc: String,
    /// Which endpoint.
    pub dialect: Dialect,
    /// Of every request; null: the server's default.
    pub temperature: Option<f64>,
    /// Requests that were not counted.
    pub warm_up_requests: usize,
    /// How many of those failed.
    pub warm_up_failed: usize,
    /// Of the prompts.
    pub seed: u64,
    /// Changes to the protocols' numbers.
    pub overrides: Overrides,
}

/// The figures of one row. Rates are tokens a second. Figures are null where nothing supports them.
#[derive(Debug, Clone, Serialize)]
pub struct RowReport {
    /// What was asked.
    #[serde(flatten)]
    pub row: Row,
    /// Why it was not run.
    pub skipped: Option<String>,
    /// Requests that failed.
    pub failed: usize,
    /// Each different failure and how often it came.
    pub failures: BTreeMap<String, usize>,
    /// What deserves a remark: lengths that are not those asked for, failures.
    pub notes: Vec<String>,
    /// From the first request to the end of the last answer, s.
    pub wall_s: f64,
    /// Prompt tokens of a request by the server's count.
    pub prompt_tokens: Option<Summary>,
    /// Generated tokens of a request by the server's count.
    pub completion_tokens: Option<Summary>,
    /// Time to the first token, ms.
    pub first_token_ms: Option<Summary>,
    /// Time between successive chunks of a stream, all streams together, ms.
    pub gap_ms: Option<Summary>,
    /// Time per token after the first, one value a request, ms.
    pub per_token_ms: Option<Summary>,
    /// Tokens in a chunk: above 1, gaps are those of several tokens.
    pub tokens_per_chunk: Option<f64>,
    /// Decode rate of a stream after its first token, mean over the requests.
    pub stream_tokens_per_s: Option<f64>,
    /// Decode rate of all streams by the reference's formula: concurrency / time per token (cohort: mean; else
    /// median).
    pub decode_tokens_per_s: Option<f64>,
    /// Decode rate of all streams together, over the time in which every stream was between its first and its last
    /// token.
    pub steady_tokens_per_s: Option<f64>,
    /// Tokens that a round of drafting and verifying gave, by the server's counters: 1 without drafts.
    pub tokens_per_round: Option<f64>,
    /// All generated tokens over the wall clock.
    pub output_tokens_per_s: Option<f64>,
    /// All prompt tokens over the wall clock.
    pub prompt_tokens_per_s: Option<f64>,
    /// What came back, in rows of the protocol for it.
    pub reuse: Option<Reuse>,
    /// Every request.
    pub samples: Vec<Sample>,
}

impl Report {
    pub(crate) fn new(conditions: Conditions, rows: Vec<RowReport>, interrupted: bool) -> Self {
        Self { format: FORMAT, conditions, rows, interrupted }
    }

    /// Failed requests and all requests.
    pub fn failures(&self) -> (usize, usize) {
        let sum = |of: fn(&RowReport) -> usize| self.rows.iter().map(of).sum();
        (sum(|row| row.failed), sum(|row| row.samples.len()))
    }
}

impl RowReport {
    /// Of a row's samples. `wall_us` is from the first request to the end of the last answer.
    pub fn new(row: &Row, wall_us: u64, samples: Vec<Sample>, abilities: Abilities) -> Self {
        let good: Vec<&Sample> = samples.iter().filter(|sample| sample.is_ok()).collect();
        let summary =
            |of: fn(&Sample) -> Option<f64>| Summary::of(good.iter().filter_map(|sample| of(sample)));
        let per_token_ms = summary(Sample::per_token_ms);
        let wall_s = wall_us as f64 / 1e6;
        let rate = |of: fn(&Sample) -> u64| {
            let tokens: u64 = good.iter().map(|sample| of(sample)).sum();
            (tokens > 0 && wall_us > 0).then(|| tokens as f64 / wall_s)
        };
        let mut report = Self {
            row: row.clone(),
            skipped: None,
            failed: samples.len() - good.len(),
            failures: failures(&samples),
            notes: Vec::new(),
            wall_s,
            prompt_tokens: summary(|sample| Some(sample.prompt_tokens as f64)),
            completion_tokens: summary(|sample| Some(sample.completion_tokens as f64)),
            first_token_ms: summary(|sample| sample.first_us().map(|us| us as f64 / 1e3)),
            gap_ms: Summary::of(good.iter().flat_map(|sample| sample.gaps_ms())),
            per_token_ms,
            tokens_per_chunk: tokens_per_chunk(&good),
            stream_tokens_per_s: summary(Sample::decode_tokens_per_s).map(|rates| rates.mean),
            decode_tokens_per_s: per_token_ms.and_then(|times| decode_rate(row, &times)),
            steady_tokens_per_s: steady_rate(&good, row.concurrency),
            tokens_per_round: None,
            output_tokens_per_s: rate(|sample| sample.completion_tokens),
            prompt_tokens_per_s: rate(|sample| sample.prompt_tokens),
            reuse: Reuse::new(row, &samples),
            samples: Vec::new(),
        };
        report.notes = notes(&report, abilities);
        report.samples = samples;
        report
    }

    /// Of a row that cannot be run.
    pub fn skipped(row: &Row, reason: String) -> Self {
        Self { skipped: Some(reason), ..Self::new(row, 0, Vec::new(), Abilities::default()) }
    }
}

/// The reference's decode rate: as if every one of the streams ran at the typical time per token all the time.
fn decode_rate(row: &Row, per_token_ms: &Summary) -> Option<f64> {
    let typical_ms = match row.protocol {
        Protocol::Cohort => per_token_ms.mean,
        Protocol::Batch | Protocol::Prefill | Protocol::Long | Protocol::Reuse => per_token_ms.p50,
    };
    (typical_ms > 0.0).then(|| row.concurrency as f64 * 1e3 / typical_ms)
}

fn tokens_per_chunk(samples: &[&Sample]) -> Option<f64> {
    let chunks: usize = samples.iter().map(|sample| sample.chunk_us.len()).sum();
    let tokens: u64 = samples.iter().map(|sample| sample.completion_tokens).sum();
    (chunks > 0).then(|| tokens as f64 / chunks as f64)
}

/// Tokens over time, counted only while `concurrency` streams were between first and last token. A stream's tokens
/// after the first are taken as spread evenly over the time between them: chunks do not say how many they hold.
/// `None` when there was no such time.
fn steady_rate(samples: &[&Sample], concurrency: usize) -> Option<f64> {
    // (when, streams more or fewer, their rate in tokens per µs)
    let mut changes: Vec<(u64, i64, f64)> = Vec::new();
    for sample in samples {
        let (Some(first), Some(last)) = (sample.first_us(), sample.last_us()) else { continue };
        if last <= first || sample.completion_tokens < 2 {
            continue;
        }
        let rate = (sample.completion_tokens - 1) as f64 / (last - first) as f64;
        changes.push((sample.start_us + first, 1, rate));
        changes.push((sample.start_us + last, -1, -rate));
    }
    changes.sort_by_key(|&(when, _, _)| when);
    let (mut streams, mut rate) = (0_i64, 0.0);
    let (mut tokens, mut time_us, mut since) = (0.0, 0_u64, 0_u64);
    for (when, more, faster) in changes {
        if streams == concurrency as i64 {
            tokens += rate * (when - since) as f64;
            time_us += when - since;
        }
        since = when;
        streams += more;
        rate += faster;
    }
    (time_us > 0).then(|| tokens / time_us as f64 * 1e6)
}

fn failures(samples: &[Sample]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for error in samples.iter().filter_map(|sample| sample.error.clone()) {
        *counts.entry(error).or_default() += 1;
    }
    counts
}

fn notes(report: &RowReport, abilities: Abilities) -> Vec<String> {
    let mut notes = Vec::new();
    let range = |of: &Summary| {
        if of.min == of.max { of.min.to_string() } else { format!("{} to {}", of.min, of.max) }
    };
    if let (Prompts::RandomTokens(wanted), Some(tokens)) = (report.row.prompts, &report.prompt_tokens)
        && (tokens.min, tokens.max) != (wanted as f64, wanted as f64)
    {
        notes.push(format!("prompts had {} tokens, not {wanted}", range(tokens)));
    }
    let wanted = report.row.output_tokens;
    if let Some(tokens) = report.completion_tokens.as_ref().filter(|_| report.row.exact_output)
        && (tokens.min, tokens.max) != (wanted as f64, wanted as f64)
    {
        let why = if abilities.ignore_eos { "" } else { ": the server does not take `ignore_eos`" };
        notes.push(format!("answers had {} tokens, not {wanted}{why}", range(tokens)));
    }
    for (failure, count) in &report.failures {
        notes.push(format!("{count} failed: {failure}"));
    }
    notes
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    const TAKES_ALL: Abilities = Abilities { tokenizer: true, ignore_eos: true, min_tokens: true };

    fn row(protocol: Protocol, concurrency: usize) -> Row {
        Row {
            protocol,
            prompts: Prompts::RandomTokens(10),
            concurrency,
            requests: 8,
            output_tokens: 11,
            exact_output: true,
        }
    }

    /// Ten prompt tokens and eleven generated ones, the first after `first_us`, the others every `step_us`.
    fn sample(start_us: u64, first_us: u64, step_us: u64) -> Sample {
        let chunk_us: Vec<u64> = (0..11).map(|at| first_us + at * step_us).collect();
        Sample {
            start_us,
            finish_us: chunk_us.last().copied(),
            end_us: first_us + 10 * step_us,
            chunk_us,
            prompt_tokens: 10,
            completion_tokens: 11,
            ..Sample::default()
        }
    }

    /// A report of these rows, under made-up conditions.
    pub(crate) fn report_of(rows: Vec<RowReport>) -> Report {
        let server = ServerFacts {
            url: "http://h:1/v1".into(),
            model: "tiny".into(),
            max_context_tokens: Some(64),
            server_header: None,
            version: Some(json!({"name": "qwill", "version": "0.1.0"})),
            numerics: Some("w4a8 kv=f32".into()),
            abilities: TAKES_ALL,
        };
        let conditions = Conditions {
            server,
            client_version: "test".into(),
            command: vec!["qwill".into()],
            client_host: "here".into(),
            client_processors: 1,
            started_utc: "2026-11-30T14:05:39Z".into(),
            dialect: Dialect::Chat,
            temperature: None,
            warm_up_requests: 0,
            warm_up_failed: 0,
            seed: 1000,
            overrides: Overrides::default(),
        };
        Report::new(conditions, rows, false)
    }

    #[test]
    fn the_figures_of_two_equal_streams() {
        let samples = vec![sample(0, 100_000, 10_000), sample(0, 100_000, 10_000)];
        let report = RowReport::new(&row(Protocol::Cohort, 2), 200_000, samples, TAKES_ALL);
        assert_eq!(report.first_token_ms.unwrap().p50, 100.0);
        assert_eq!(report.per_token_ms.unwrap().mean, 10.0);
        assert_eq!((report.gap_ms.unwrap().p99, report.gap_ms.unwrap().count), (10.0, 20));
        assert_eq!(report.stream_tokens_per_s, Some(100.0));
        assert_eq!(report.decode_tokens_per_s, Some(200.0));
        assert!((report.steady_tokens_per_s.unwrap() - 200.0).abs() < 1e-9);
        assert_eq!(report.output_tokens_per_s, Some(110.0));
        assert_eq!(report.prompt_tokens_per_s, Some(100.0));
        assert_eq!(report.tokens_per_chunk, Some(1.0));
        assert_eq!(report.notes, Vec::<String>::new());
    }

    #[test]
    fn a_cohort_goes_by_the_mean_and_a_batch_by_the_median() {
        let samples = || vec![sample(0, 1, 10_000), sample(0, 1, 10_000), sample(0, 1, 40_000)];
        let rate = |protocol| {
            RowReport::new(&row(protocol, 1), 1, samples(), TAKES_ALL).decode_tokens_per_s.unwrap()
        };
        assert!((rate(Protocol::Cohort) - 50.0).abs() < 1e-9);
        assert!((rate(Protocol::Batch) - 100.0).abs() < 1e-9);
    }

    #[test]
    fn the_steady_rate_needs_all_streams_at_once() {
        // The second begins its answer when the first has ended.
        let apart = [&sample(0, 100_000, 10_000), &sample(0, 200_000, 10_000)];
        assert_eq!(steady_rate(&apart, 2), None);
        assert!((steady_rate(&apart, 1).unwrap() - 100.0).abs() < 1e-9);
        // Half of each overlaps with half of the other.
        let overlapping = [&sample(0, 100_000, 10_000), &sample(50_000, 100_000, 5_000)];
        assert!((steady_rate(&overlapping, 2).unwrap() - 300.0).abs() < 1e-9);
    }

    #[test]
    fn failures_are_counted_and_take_part_in_nothing_else() {
        let failed = |error: &str| Sample {
            chunk_us: vec![1],
            completion_tokens: 3,
            error: Some(error.into()),
            ..Sample::default()
        };
        let samples = vec![sample(0, 100_000, 10_000), failed("cut"), failed("busy"), failed("cut")];
        let report = RowReport::new(&row(Protocol::Batch, 1), 200_000, samples, TAKES_ALL);
        assert_eq!((report.failed, report.failures["cut"], report.failures["busy"]), (3, 2, 1));
        assert_eq!(report.first_token_ms.unwrap().count, 1);
        assert_eq!(report.output_tokens_per_s, Some(55.0));
        assert_eq!(report.notes, ["1 failed: busy", "2 failed: cut"]);
    }

    #[test]
    fn other_lengths_than_asked_for_are_told() {
        let short = Sample { prompt_tokens: 9, completion_tokens: 5, ..sample(0, 1, 1) };
        let no_extension = Abilities { ignore_eos: false, ..TAKES_ALL };
        let report = RowReport::new(&row(Protocol::Batch, 1), 1, vec![sample(0, 1, 1), short], no_extension);
        assert_eq!(
            report.notes,
            [
                "prompts had 9 to 10 tokens, not 10",
                "answers had 5 to 11 tokens, not 11: the server does not take `ignore_eos`"
            ]
        );
    }

    #[test]
    fn a_row_without_answers_has_no_figures() {
        let report = RowReport::skipped(&row(Protocol::Prefill, 1), "too long".into());
        assert_eq!(report.skipped.as_deref(), Some("too long"));
        assert!(report.first_token_ms.is_none() && report.output_tokens_per_s.is_none());
    }

    proptest! {
        #[test]
        fn the_steady_rate_lies_between_the_streams_rates(
            streams in prop::collection::vec((0..50_000u64, 1..100_000u64, 100..20_000u64), 1..8),
        ) {
            let samples: Vec<Sample> =
                streams.iter().map(|&(start, first, step)| sample(start, first, step)).collect();
            let samples: Vec<&Sample> = samples.iter().collect();
            let rates: Vec<f64> = samples.iter().filter_map(|sample| sample.decode_tokens_per_s()).collect();
            if let Some(rate) = steady_rate(&samples, samples.len()) {
                // All streams at once: the sum of their rates, whatever the times.
                prop_assert!((rate / rates.iter().sum::<f64>() - 1.0).abs() < 1e-6);
            }
            if let Some(rate) = steady_rate(&samples, 1) {
                let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
                let fastest = rates.iter().copied().fold(0.0, f64::max);
                prop_assert!(rate >= slowest * (1.0 - 1e-6) && rate <= fastest * (1.0 + 1e-6));
            }
        }
    }
}
