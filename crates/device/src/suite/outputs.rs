//! What an op left behind, on the host, and how two of these are compared.

use super::{Failure, Tolerance};
use crate::Activations;

/// The NaN that fills everything an op must write, or must not read.
pub(super) const POISON: f32 = f32::from_bits(0x7fc0_1234);

/// Least scale of errors in rows of fewer than 16 columns; the suite's inputs are of size 1.
const NARROW_SCALE: f32 = 0.1;

/// How closely two devices must agree on a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closeness {
    /// Copies: every bit.
    Bits,
    /// f32 results that no mode rounds.
    Exact,
    /// [`Closeness::Exact`] after a long chain of f32 operations: ten times its tolerance.
    Chained,
    /// Results rounded to the activation type.
    Rounded,
    /// [`Closeness::Rounded`] after a long chain of f32 operations.
    ChainedRounded,
    /// [`Closeness::ChainedRounded`] of sums whose weights may have been rounded to bfloat16 before.
    Weighted,
    /// States in storage, of either type, after a long chain of f32 operations.
    State(crate::StateType),
    /// [`Closeness::ChainedRounded`] computed from states that the device stored itself.
    FromState(crate::StateType),
    /// [`Closeness::State`] and [`Closeness::FromState`] of keys and values that the op itself rounded first.
    StateOfRounded(crate::StateType),
    /// Products of inputs that the op itself rounded first: a rounding may fall the other way.
    Requantised,
    /// Two of these, one gated by the other: 1.05e-2 was seen with bfloat16.
    Gated,
    /// Stored keys and values.
    Stored(crate::KvType),
    /// [`Closeness::Weighted`] computed from keys and values that the device stored itself, as
    /// [`Closeness::Stored`]: where one is a rounding step off, the results are off as well.
    FromStored(crate::KvType),
}

impl Closeness {
    fn tolerance(self, activations: Activations, tolerance: &Tolerance) -> f32 {
        let rounded = if activations == Activations::Bf16 { tolerance.bf16 } else { tolerance.f32 };
        match self {
            Self::Bits => 0.0,
            Self::Exact | Self::Stored(crate::KvType::F32) => tolerance.f32,
            Self::Chained => 10.0 * tolerance.f32,
            Self::State(crate::StateType::F32) => Self::Chained.tolerance(activations, tolerance),
            Self::State(crate::StateType::F16) => tolerance.f16,
            Self::FromState(state_type) => {
                let chained = Self::ChainedRounded.tolerance(activations, tolerance);
                chained.max(Self::State(state_type).tolerance(activations, tolerance))
            }
            Self::ChainedRounded => rounded.max(10.0 * tolerance.f32),
            // Halves of a step of the weights add up to less than two steps of a result: 1.1e-2 was seen.
            Self::Weighted if activations == Activations::Bf16 => 2.0 * tolerance.bf16,
            Self::Weighted => Self::ChainedRounded.tolerance(activations, tolerance),
            Self::StateOfRounded(state_type) => {
                let weighted = Self::Weighted.tolerance(activations, tolerance);
                weighted.max(Self::State(state_type).tolerance(activations, tolerance))
            }
            Self::Requantised | Self::Gated if activations == Activations::Int8 => tolerance.int8,
            Self::Gated => Self::Weighted.tolerance(activations, tolerance),
            Self::Rounded | Self::Requantised => rounded,
            Self::Stored(crate::KvType::Bf16) => tolerance.bf16,
            Self::Stored(crate::KvType::Int8) => tolerance.int8_kv,
            Self::FromStored(kv_type) => {
                let weighted = Self::Weighted.tolerance(activations, tolerance);
                let stored = match kv_type {
                    // One code of one key: its part of a score, after the scaling of scores.
                    crate::KvType::Int8 => 0.25 * tolerance.int8_kv,
                    exact => Self::Stored(exact).tolerance(activations, tolerance),
                };
                weighted.max(stored)
            }
        }
    }
}

/// Rows of values.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub(super) name: &'static str,
    pub(super) width: usize,
    pub(super) values: Vec<f32>,
    pub(super) closeness: Closeness,
}

impl Tensor {
    pub(super) fn new(name: &'static str, width: usize, values: Vec<f32>, closeness: Closeness) -> Self {
        Self { name, width, values, closeness }
    }

    /// The first `keep` of every `width` columns.
    pub(super) fn columns(mut self, first: usize, keep: usize) -> Self {
        let rows = self.values.chunks(self.width);
        self.values = rows.flat_map(|row| row[first..first + keep].iter().copied()).collect();
        self.width = keep;
        self
    }

    fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks(self.width.max(1))
    }

    fn pick(&self, indices: &[usize]) -> Self {
        let values = indices.iter().flat_map(|i| &self.values[i * self.width..(i + 1) * self.width]);
        Self { values: values.copied().collect(), ..*self }
    }

    /// The largest error relative to a row's scale, and where it is.
    ///
    /// The error of an element is `|found − expected| / (|expected| + rms(expected row))`, infinite where one of
    /// the two is not finite and they differ. A few columns say little about a row's scale: there the scale is
    /// at least [`NARROW_SCALE`].
    fn worst(&self, expected: &Self) -> Option<Worst> {
        let mut worst: Option<Worst> = None;
        let floor = if self.width < 16 { NARROW_SCALE } else { 0.0 };
        for (row, (found_row, expected_row)) in self.rows().zip(expected.rows()).enumerate() {
            let squares: f32 = expected_row.iter().filter(|x| x.is_finite()).map(|x| x * x).sum();
            let rms = (squares / expected_row.len() as f32).sqrt().max(floor);
            for (col, (found, expected)) in found_row.iter().zip(expected_row).enumerate() {
                let same = found.to_bits() == expected.to_bits();
                let error = if same {
                    0.0
                } else if self.closeness == Closeness::Bits || !(found - expected).is_finite() {
                    f32::INFINITY
                } else {
                    (found - expected).abs() / (expected.abs() + rms).max(f32::MIN_POSITIVE)
                };
                if worst.as_ref().is_none_or(|worst| error > worst.error) {
                    worst = Some(Worst { error, row, col, found: *found, expected: *expected });
                }
            }
        }
        worst
    }
}

struct Worst {
    error: f32,
    row: usize,
    col: usize,
    found: f32,
    expected: f32,
}

/// All results of one run of an op.
#[derive(Debug, Clone, Default)]
pub(super) struct Outputs {
    /// One row per row of the step.
    pub(super) rows: Vec<Tensor>,
    /// One row per span: states.
    pub(super) spans: Vec<Tensor>,
}

impl Outputs {
    /// Results that have one row per row of the step.
    pub(super) fn of_rows(rows: Vec<Tensor>) -> Self {
        Self { rows, spans: Vec::new() }
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.rows.iter().chain(&self.spans)
    }

    /// The results of some rows and spans, in the order given.
    pub(super) fn part(&self, rows: &[usize], spans: &[usize]) -> Self {
        Self {
            rows: self.rows.iter().map(|tensor| tensor.pick(rows)).collect(),
            spans: self.spans.iter().map(|tensor| tensor.pick(spans)).collect(),
        }
    }

    /// Compares with the reference's results; returns the worst error where some rounding is allowed.
    pub(super) fn close_to(
        &self,
        expected: &Self,
        activations: Activations,
        tolerance: &Tolerance,
    ) -> Result<f32, Failure> {
        let mut largest = 0.0f32;
        for (found, expected) in self.tensors().zip(expected.tensors()) {
            if found.values.len() != expected.values.len() {
                let (found_len, expected_len) = (found.values.len(), expected.values.len());
                return Err(Failure::new(format!(
                    "{}: {found_len} values, expected {expected_len}",
                    found.name
                )));
            }
            let allowed = found.closeness.tolerance(activations, tolerance);
            let Some(worst) = found.worst(expected) else { continue };
            if worst.error > allowed {
                let Worst { error, row, col, found: value, expected } = worst;
                return Err(Failure::new(format!(
                    "{}[{row}][{col}] of [{}, {}] is {value:e}, expected {expected:e}: error {error:.2e}, allowed {allowed:.1e}",
                    found.name,
                    found.values.len() / found.width.max(1),
                    found.width,
                )));
            }
            largest = largest.max(worst.error);
        }
        Ok(largest)
    }

    /// Compares bit by bit with what the same device gave otherwise.
    pub(super) fn same_bits(&self, expected: &Self, circumstance: &str) -> Result<(), Failure> {
        for (found, expected) in self.tensors().zip(expected.tensors()) {
            let pairs = found.values.iter().zip(&expected.values);
            let differing = pairs.enumerate().find(|(_, (a, b))| a.to_bits() != b.to_bits());
            if let Some((at, (value, other))) = differing {
                let (row, col) = (at / found.width.max(1), at % found.width.max(1));
                return Err(Failure::new(format!(
                    "{}[{row}][{col}] is {value:e} in company and {other:e} {circumstance}: bits must not differ",
                    found.name
                )));
            }
            if found.values.len() != expected.values.len() {
                return Err(Failure::new(format!("{}: different lengths {circumstance}", found.name)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(found: &[f32], expected: &[f32], closeness: Closeness) -> Result<f32, Failure> {
        let outputs =
            |values: &[f32]| Outputs::of_rows(vec![Tensor::new("out", 2, values.to_vec(), closeness)]);
        outputs(found).close_to(&outputs(expected), Activations::F32, &Tolerance::default())
    }

    #[test]
    fn poison_left_in_an_output_is_an_error() {
        let message =
            compare(&[1.0, 2.0, 3.0, POISON], &[1.0, 2.0, 3.0, 4.0], Closeness::Rounded).unwrap_err();
        assert!(message.to_string().contains("out[1][1]"), "{message}");
    }

    #[test]
    fn poison_kept_on_both_sides_is_right_and_lost_poison_is_wrong() {
        assert_eq!(compare(&[1.0, POISON], &[1.0, POISON], Closeness::Bits).unwrap(), 0.0);
        assert!(compare(&[1.0, 0.0], &[1.0, POISON], Closeness::Bits).is_err());
    }

    #[test]
    fn small_errors_pass_and_are_reported() {
        let error = compare(&[1.0, 2.000_001], &[1.0, 2.0], Closeness::Exact).unwrap();
        assert!(error > 0.0 && error < 1e-6);
        assert!(compare(&[1.0, 2.01], &[1.0, 2.0], Closeness::Exact).is_err());
        assert!(compare(&[1.0, 2.000_001], &[1.0, 2.0], Closeness::Bits).is_err());
    }
}
