//! What a server remembered of earlier requests.

use serde::Serialize;

use crate::protocol::{Prompts, Protocol, Row};
use crate::sample::Sample;
use crate::stats::Summary;

/// A later question finds what went before when so much of the prompt before is cached.
const HIT_SHARE: f64 = 0.9;

/// Figures of a row whose requests come back to what was said.
#[derive(Debug, Clone, Serialize)]
pub struct Reuse {
    /// Time to the first token of first questions, ms.
    pub first_question_ms: Option<Summary>,
    /// Time to the first token of later questions, ms.
    pub later_question_ms: Option<Summary>,
    /// Later questions.
    pub later_questions: usize,
    /// Those of them that found nearly all (9 of 10 tokens) of the prompt before in a cache, where the server counts
    /// that.
    pub hits: Option<usize>,
    /// Cached prompt tokens of all, by the server's count.
    pub cached_share: Option<f64>,
}

impl Reuse {
    /// `None` for rows that have nothing to come back to. `samples` are all of the row's, in their order.
    pub(crate) fn new(row: &Row, samples: &[Sample]) -> Option<Self> {
        if row.protocol != Protocol::Reuse {
            return None;
        }
        let first_token_ms = |later: bool| {
            let these = samples.iter().filter(|sample| sample.is_ok() && (sample.turn > 0) == later);
            Summary::of(these.filter_map(|sample| Some(sample.first_us()? as f64 / 1e3)))
        };
        let talks = match row.prompts {
            Prompts::Talks { talks, .. } => talks,
            Prompts::Chats | Prompts::RandomTokens(_) | Prompts::SharedTokens(_) => samples.len(),
        };
        let later: Vec<(&Sample, &Sample)> = samples
            .iter()
            .zip(samples.iter().skip(talks))
            .filter(|(before, sample)| before.is_ok() && sample.is_ok())
            .collect();
        let hits = later.iter().map(|(before, sample)| {
            let cached = sample.cached_tokens?;
            Some(usize::from(cached as f64 >= HIT_SHARE * before.prompt_tokens as f64))
        });
        let good = || samples.iter().filter(|sample| sample.is_ok());
        let cached: Option<u64> = good().map(|sample| sample.cached_tokens).sum();
        let prompts: u64 = good().map(|sample| sample.prompt_tokens).sum();
        Some(Self {
            first_question_ms: first_token_ms(false),
            later_question_ms: first_token_ms(true),
            later_questions: later.len(),
            hits: hits.sum(),
            cached_share: cached.filter(|_| prompts > 0).map(|cached| cached as f64 / prompts as f64),
        })
    }

    /// Median time of later questions against that of first ones.
    pub fn later_share(&self) -> Option<f64> {
        let (first, later) = (self.first_question_ms?.p50, self.later_question_ms?.p50);
        (first > 0.0).then(|| later / first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(turn: usize, first_us: u64, prompt_tokens: u64, cached_tokens: Option<u64>) -> Sample {
        Sample { turn, chunk_us: vec![first_us], prompt_tokens, cached_tokens, ..Sample::default() }
    }

    fn row(prompts: Prompts) -> Row {
        Row {
            protocol: Protocol::Reuse,
            prompts,
            concurrency: 1,
            requests: 4,
            output_tokens: 1,
            exact_output: true,
        }
    }

    #[test]
    fn later_questions_are_compared_with_the_prompt_before_of_their_talk() {
        let samples = [
            sample(0, 1_000_000, 1_000, Some(0)),
            sample(0, 2_000_000, 100, Some(0)),
            sample(1, 30_000, 1_100, Some(950)),
            sample(1, 60_000, 200, Some(89)),
        ];
        let row = row(Prompts::Talks { talks: 2, tokens: 100 });
        let reuse = Reuse::new(&row, &samples).unwrap();
        assert_eq!((reuse.later_questions, reuse.hits), (2, Some(1)));
        assert!((reuse.cached_share.unwrap() - 1_039.0 / 2_400.0).abs() < 1e-9);
        assert!((reuse.later_share().unwrap() - 0.03).abs() < 1e-9);
        let silent: Vec<Sample> =
            samples.iter().map(|sample| Sample { cached_tokens: None, ..sample.clone() }).collect();
        let reuse = Reuse::new(&row, &silent).unwrap();
        assert_eq!((reuse.hits, reuse.cached_share), (None, None));
    }

    #[test]
    fn rows_at_once_have_no_later_questions() {
        let samples = [sample(0, 1_000, 100, Some(0)), sample(0, 1_000, 100, Some(90))];
        let reuse = Reuse::new(&row(Prompts::SharedTokens(90)), &samples).unwrap();
        assert_eq!((reuse.later_questions, reuse.hits, reuse.cached_share), (0, Some(0), Some(0.45)));
        assert!(reuse.later_share().is_none());
        let batch = Row { protocol: Protocol::Batch, ..row(Prompts::RandomTokens(100)) };
        assert!(Reuse::new(&batch, &samples).is_none());
    }
}
