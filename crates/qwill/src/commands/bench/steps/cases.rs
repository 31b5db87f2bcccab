//! Which steps are measured.

use qwill_device::batch::{prompt_batch, round_batch};
use qwill_device::{Batch, Phase};

/// Ring entries of every sequence in a round: a ring is between empty and full, on average half.
const RING_LEN: usize = 15;

/// A kind of step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// One row of each of several sequences.
    Decode,
    /// Several rows of one sequence.
    Verify,
    /// A prompt.
    Prefill,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Verify => "verify",
            Self::Prefill => "prefill",
        }
    }
}

/// A step to measure.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) kind: Kind,
    pub(super) batch: Batch,
}

impl Case {
    /// Rows whose logits the step computes: all of a round, the last of a prompt.
    pub(super) fn logit_rows(&self) -> Vec<usize> {
        match self.batch.phase {
            Phase::Prefill => vec![self.batch.rows().saturating_sub(1)],
            Phase::Rows => (0..self.batch.rows()).collect(),
        }
    }

    /// For people: `decode 8 x 1`, `verify 1 x 8`, `prefill 2048`.
    pub(super) fn name(&self) -> String {
        let (sequences, rows) = (self.batch.spans.len(), self.batch.rows());
        match self.kind {
            Kind::Prefill => format!("prefill {rows}"),
            Kind::Decode | Kind::Verify => {
                format!("{} {sequences} x {}", self.kind.name(), rows / sequences.max(1))
            }
        }
    }
}

/// Decode rounds of so many sequences, verify rounds of one sequence with so many rows (one row is the first decode
/// round already), prompts of so many tokens.
pub(super) fn cases(
    sequences: &[usize],
    rows: &[usize],
    context_tokens: usize,
    prompts: &[usize],
) -> Vec<Case> {
    let round =
        |kind, sequences, rows| Case { kind, batch: round_batch(sequences, rows, context_tokens, RING_LEN) };
    let decode = sequences.iter().map(|count| round(Kind::Decode, *count, 1));
    let verify = rows.iter().filter(|rows| **rows > 1).map(|rows| round(Kind::Verify, 1, *rows));
    let prefill = prompts.iter().map(|tokens| Case { kind: Kind::Prefill, batch: prompt_batch(*tokens) });
    decode.chain(verify).chain(prefill).collect()
}

/// Takes out the round of the most sequences, where one has several: each brings a state and pages of its own.
pub(super) fn take_largest(cases: &mut Vec<Case>) -> Option<Case> {
    let sequences = |case: &Case| case.batch.spans.len();
    let most = cases.iter().map(sequences).max().filter(|most| *most > 1)?;
    let at = cases.iter().position(|case| sequences(case) == most)?;
    Some(cases.remove(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_a_valid_step_with_a_name() {
        let cases = cases(&[1, 8], &[1, 16], 512, &[100]);
        let names: Vec<String> = cases.iter().map(Case::name).collect();
        assert_eq!(names, ["decode 1 x 1", "decode 8 x 1", "verify 1 x 16", "prefill 100"]);
        assert!(cases.iter().all(|case| case.batch.check().is_ok()));
        assert_eq!(cases[1].logit_rows().len(), 8);
        assert_eq!(cases[3].logit_rows(), [99]);
    }

    #[test]
    fn the_most_sequences_are_taken_out_first_and_one_never() {
        let mut cases = cases(&[1, 8, 4], &[16], 512, &[100]);
        let mut take = || take_largest(&mut cases).map(|case| case.name());
        assert_eq!(take().as_deref(), Some("decode 8 x 1"));
        assert_eq!(take().as_deref(), Some("decode 4 x 1"));
        assert_eq!(take(), None);
        assert_eq!(cases.len(), 3);
    }
}
