//! What was measured, and what follows from it.

use std::collections::BTreeMap;

use qwill_cuda::OpTiming;
use qwill_model::OpCost;
use serde_json::{Value, json};

use super::cases::{Case, Kind};
use super::floor::Ceilings;

/// Version of the JSON form; raised when a field changes its meaning.
const FORMAT: u32 = 1;

/// What one has to know to repeat it.
#[derive(Debug, Clone)]
pub(super) struct Conditions {
    pub(super) model: String,
    pub(super) device: String,
    pub(super) numerics: String,
    pub(super) context_tokens: usize,
    pub(super) repeats: usize,
    /// Steps that the memory has no room for.
    pub(super) left_out: Vec<String>,
}

/// A whole measurement.
#[derive(Debug, Clone)]
pub(super) struct Report {
    pub(super) conditions: Conditions,
    pub(super) ceilings: Ceilings,
    pub(super) steps: Vec<StepReport>,
}

/// One kind of step.
#[derive(Debug, Clone)]
pub(super) struct StepReport {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) sequences: usize,
    pub(super) rows: usize,
    /// The shortest, from the call to the sampled tokens.
    pub(super) wall_us: f64,
    pub(super) median_us: f64,
    /// By time, or by floor where there are no times, the longest first.
    pub(super) ops: Vec<OpReport>,
}

/// One op over all layers of a step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct OpReport {
    pub(super) op: &'static str,
    pub(super) launches: Option<u64>,
    pub(super) us: Option<f64>,
    /// Zero for what a device does beside the model's ops.
    pub(super) bytes: u64,
    pub(super) operations: u64,
    pub(super) floor_us: Option<f64>,
    /// Achieved bytes a second over what can be read, at most.
    pub(super) read_share: Option<f64>,
    /// Achieved operations a second over what can be done, at most.
    pub(super) arithmetic_share: Option<f64>,
}

impl OpReport {
    /// Every op that has a cost or a time.
    pub(super) fn all(
        costs: &[OpCost],
        timings: Option<&BTreeMap<&'static str, OpTiming>>,
        ceilings: &Ceilings,
    ) -> Vec<Self> {
        let timing = |op: &str| timings.and_then(|timings| timings.get(op));
        let mut ops: Vec<Self> = costs.iter().map(|cost| Self::of(cost, timing(cost.op), ceilings)).collect();
        for (op, timing) in timings.into_iter().flatten() {
            if !costs.iter().any(|cost| cost.op == *op) {
                ops.push(Self::beside(op, timing));
            }
        }
        ops.sort_by(|a, b| b.length_us().total_cmp(&a.length_us()));
        ops
    }

    fn of(cost: &OpCost, timing: Option<&OpTiming>, ceilings: &Ceilings) -> Self {
        let us = timing.map(|timing| timing.microseconds);
        let share = |amount: u64, rate: Option<f64>| Some(amount as f64 / (us? * 1e-6) / rate?);
        Self {
            op: cost.op,
            launches: timing.map(|timing| timing.launches),
            us,
            bytes: cost.bytes,
            operations: cost.operations,
            floor_us: ceilings.floor_us(cost),
            read_share: share(cost.bytes, ceilings.read_bytes_per_s()),
            arithmetic_share: share(cost.operations, ceilings.operations_per_s(cost.arithmetic)),
        }
    }

    fn beside(op: &'static str, timing: &OpTiming) -> Self {
        Self {
            op,
            launches: Some(timing.launches),
            us: Some(timing.microseconds),
            bytes: 0,
            operations: 0,
            floor_us: None,
            read_share: None,
            arithmetic_share: None,
        }
    }

    fn length_us(&self) -> f64 {
        self.us.or(self.floor_us).unwrap_or(0.0)
    }

    /// Floor over time.
    pub(super) fn share(&self) -> Option<f64> {
        Some(self.floor_us? / self.us?)
    }

    /// Achieved, per second.
    pub(super) fn bytes_per_s(&self) -> Option<f64> {
        Some(self.bytes as f64 / (self.us.filter(|us| *us > 0.0)? * 1e-6))
    }

    /// Achieved, per second.
    pub(super) fn operations_per_s(&self) -> Option<f64> {
        Some(self.operations as f64 / (self.us.filter(|us| *us > 0.0)? * 1e-6))
    }

    fn as_json(&self) -> Value {
        json!({
            "op": self.op,
            "launches": self.launches,
            "us": self.us,
            "bytes": self.bytes,
            "operations": self.operations,
            "bytes_per_s": self.bytes_per_s(),
            "operations_per_s": self.operations_per_s(),
            "share_of_read_ceiling": self.read_share,
            "share_of_arithmetic_ceiling": self.arithmetic_share,
            "floor_us": self.floor_us,
            "share_of_floor": self.share(),
        })
    }
}

impl StepReport {
    /// `walls_us` ascending, at least one.
    pub(super) fn new(case: &Case, walls_us: &[f64], ops: Vec<OpReport>) -> Self {
        Self {
            name: case.name(),
            kind: case.kind,
            sequences: case.batch.spans.len(),
            rows: case.batch.rows(),
            wall_us: walls_us.first().copied().unwrap_or(f64::NAN),
            median_us: walls_us.get(walls_us.len() / 2).copied().unwrap_or(f64::NAN),
            ops,
        }
    }

    /// Sum over the ops.
    pub(super) fn floor_us(&self) -> Option<f64> {
        let floors: Vec<f64> = self.ops.iter().filter_map(|op| op.floor_us).collect();
        (!floors.is_empty()).then(|| floors.iter().sum())
    }

    /// Time of all kernels, one after another.
    pub(super) fn kernels_us(&self) -> Option<f64> {
        self.measured().then(|| self.ops.iter().filter_map(|op| op.us).sum())
    }

    /// Kernels launched.
    pub(super) fn launches(&self) -> Option<u64> {
        self.measured().then(|| self.ops.iter().filter_map(|op| op.launches).sum())
    }

    /// What is left of the step beside its kernels, or below zero what they overlap.
    pub(super) fn gap_us(&self) -> Option<f64> {
        Some(self.wall_us - self.kernels_us()?)
    }

    /// Floor over wall.
    pub(super) fn share(&self) -> Option<f64> {
        Some(self.floor_us()? / self.wall_us)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.ops.iter().map(|op| op.bytes).sum()
    }

    pub(super) fn operations(&self) -> u64 {
        self.ops.iter().map(|op| op.operations).sum()
    }

    /// Prompt tokens of a prefill; of a round one token a sequence, as if every draft were refused.
    pub(super) fn tokens_per_s(&self) -> f64 {
        let tokens = if self.kind == Kind::Prefill { self.rows } else { self.sequences };
        tokens as f64 / (self.wall_us * 1e-6)
    }

    fn measured(&self) -> bool {
        self.ops.iter().any(|op| op.us.is_some())
    }

    fn as_json(&self) -> Value {
        let ops: Vec<Value> = self.ops.iter().map(OpReport::as_json).collect();
        json!({
            "name": self.name,
            "kind": self.kind.name(),
            "sequences": self.sequences,
            "rows": self.rows,
            "wall_us": self.wall_us,
            "median_us": self.median_us,
            "tokens_per_s": self.tokens_per_s(),
            "bytes": self.bytes(),
            "operations": self.operations(),
            "floor_us": self.floor_us(),
            "share_of_floor": self.share(),
            "kernels_us": self.kernels_us(),
            "launches": self.launches(),
            "gap_us": self.gap_us(),
            "ops": ops,
        })
    }
}

impl Report {
    pub(super) fn as_json(&self) -> Value {
        let Conditions { model, device, numerics, context_tokens, repeats, left_out } = &self.conditions;
        let steps: Vec<Value> = self.steps.iter().map(StepReport::as_json).collect();
        json!({
            "format": FORMAT,
            "version": crate::VERSION,
            "model": model,
            "device": device,
            "numerics": numerics,
            "context_tokens": context_tokens,
            "repeats": repeats,
            "left_out": left_out,
            "ceilings": self.ceilings.as_json(),
            "steps": steps,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use qwill_model::Arithmetic;

    use super::super::cases;
    use super::super::floor::ReadRate;
    use super::*;

    fn cost(op: &'static str, bytes: u64, operations: u64, arithmetic: Arithmetic) -> OpCost {
        OpCost { op, bytes, operations, arithmetic }
    }

    fn timing(launches: u64, microseconds: f64) -> OpTiming {
        OpTiming { launches, microseconds }
    }

    /// A decode step whose ops were timed and a prompt whose ops were not.
    pub(in super::super) fn report() -> Report {
        let ceilings = Ceilings {
            reads: vec![ReadRate { bytes: 1 << 30, bytes_per_s: 1e12 }],
            copy_bytes_per_s: Some(9e11),
            matrix_per_s: Some(1e14),
            int8_per_s: None,
            vector_per_s: Some(1e13),
            launch_us: Some(2.5),
        };
        let costs = [
            cost("embed", 5000, 0, Arithmetic::Vector),
            cost("norm_linears", 500_000_000, 10_000_000_000, Arithmetic::Matrix),
            cost("head", 250_000_000, 50_000_000_000, Arithmetic::Matrix),
        ];
        let timings = BTreeMap::from([
            ("embed", timing(1, 0.5)),
            ("norm_linears", timing(48, 1000.0)),
            ("head", timing(1, 400.0)),
            ("copies", timing(2, 0.0)),
        ]);
        let cases = cases::cases(&[1], &[], 512, &[64]);
        let steps = vec![
            StepReport::new(
                &cases[0],
                &[1500.0, 1600.0, 1700.0],
                OpReport::all(&costs, Some(&timings), &ceilings),
            ),
            StepReport::new(&cases[1], &[4000.0], OpReport::all(&costs, None, &ceilings)),
        ];
        let conditions = Conditions {
            model: "tiny (random weights, seed 0)".into(),
            device: "a device".into(),
            numerics: "w4a16 kv=bf16 state=f32".into(),
            context_tokens: 512,
            repeats: 3,
            left_out: vec!["decode 64 x 1".into()],
        };
        Report { conditions, ceilings, steps }
    }

    #[test]
    fn figures_follow_from_times_and_costs() {
        let report = report();
        let step = &report.steps[0];
        assert_eq!((step.wall_us, step.median_us), (1500.0, 1600.0));
        // 500 us to move the one, 500 us to compute the other, next to nothing to look up.
        assert!((step.floor_us().unwrap() - 1000.005).abs() < 1e-6);
        assert!((step.gap_us().unwrap() - 99.5).abs() < 1e-6);
        assert_eq!(step.launches(), Some(52));
        let op = &step.ops[0];
        assert_eq!((op.op, op.share()), ("norm_linears", Some(0.5)));
        assert!((op.read_share.unwrap() - 0.5).abs() < 1e-9);
        assert!((op.arithmetic_share.unwrap() - 0.1).abs() < 1e-9);
        assert_eq!(step.ops.iter().filter(|op| op.op == "copies").count(), 1);
    }

    #[test]
    fn without_times_there_are_floors_and_nothing_that_needs_times() {
        let report = report();
        let step = &report.steps[1];
        assert_eq!((step.kernels_us(), step.launches(), step.gap_us()), (None, None, None));
        assert!((step.share().unwrap() - 1000.005 / 4000.0).abs() < 1e-6);
        assert!((step.tokens_per_s() - 16_000.0).abs() < 1e-6);
        let json = report.as_json();
        assert_eq!(json["steps"][1]["gap_us"], Value::Null);
        assert_eq!(json["ceilings"]["int8_operations_per_s"], Value::Null);
        assert_eq!(json["steps"][0]["ops"][0]["share_of_floor"], 0.5);
    }
}
