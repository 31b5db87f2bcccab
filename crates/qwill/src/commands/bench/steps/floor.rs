//! The least time that work takes on a device.

use qwill_model::{Arithmetic, OpCost};
use serde_json::{Value, json};

/// Rate of reads of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ReadRate {
    pub(super) bytes: u64,
    pub(super) bytes_per_s: f64,
}

/// What a device does at most, measured in this run. What it does not tell is `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Ceilings {
    /// Reads by size, largest first.
    pub(super) reads: Vec<ReadRate>,
    /// Read and written bytes of a copy.
    pub(super) copy_bytes_per_s: Option<f64>,
    /// Operations of products of matrices.
    pub(super) matrix_per_s: Option<f64>,
    /// Operations of products of 8-bit matrices.
    pub(super) int8_per_s: Option<f64>,
    /// Operations of all else.
    pub(super) vector_per_s: Option<f64>,
    /// An empty launch among others.
    pub(super) launch_us: Option<f64>,
}

impl Ceilings {
    /// The best rate of any size: what a read could reach that had no beginning and no end.
    pub(super) fn read_bytes_per_s(&self) -> Option<f64> {
        self.reads.iter().map(|rate| rate.bytes_per_s).reduce(f64::max)
    }

    pub(super) fn operations_per_s(&self, arithmetic: Arithmetic) -> Option<f64> {
        match arithmetic {
            Arithmetic::Matrix => self.matrix_per_s,
            Arithmetic::Vector => self.vector_per_s,
        }
    }

    /// The longer of moving the bytes and doing the operations; `None` where the rate of reads is not known. Operations
    /// whose rate is not known take no time.
    pub(super) fn floor_us(&self, cost: &OpCost) -> Option<f64> {
        let moving = cost.bytes as f64 / self.read_bytes_per_s()? * 1e6;
        let rate = self.operations_per_s(cost.arithmetic);
        let computing = rate.map_or(0.0, |rate| cost.operations as f64 / rate * 1e6);
        Some(moving.max(computing))
    }

    pub(super) fn as_json(&self) -> Value {
        let reads: Vec<Value> = self
            .reads
            .iter()
            .map(|rate| json!({"bytes": rate.bytes, "bytes_per_s": rate.bytes_per_s}))
            .collect();
        json!({
            "reads": reads,
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "matrix_operations_per_s": self.matrix_per_s,
            "int8_operations_per_s": self.int8_per_s,
            "vector_operations_per_s": self.vector_per_s,
            "launch_us": self.launch_us,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ceilings() -> Ceilings {
        Ceilings {
            reads: vec![
                ReadRate { bytes: 1 << 30, bytes_per_s: 1e12 },
                ReadRate { bytes: 1 << 24, bytes_per_s: 5e11 },
            ],
            matrix_per_s: Some(1e14),
            ..Ceilings::default()
        }
    }

    fn cost(bytes: u64, operations: u64, arithmetic: Arithmetic) -> OpCost {
        OpCost { op: "linear", bytes, operations, arithmetic }
    }

    #[test]
    fn the_floor_is_the_longer_of_moving_and_computing() {
        let floor =
            |bytes, operations| ceilings().floor_us(&cost(bytes, operations, Arithmetic::Matrix)).unwrap();
        assert!((floor(1_000_000, 0) - 1.0).abs() < 1e-9);
        assert!((floor(1_000_000, 1_000_000_000) - 10.0).abs() < 1e-9);
    }

    #[test]
    fn what_is_not_known_takes_no_time_but_without_reads_there_is_no_floor() {
        let vector = cost(1_000_000, u64::MAX, Arithmetic::Vector);
        assert!((ceilings().floor_us(&vector).unwrap() - 1.0).abs() < 1e-9);
        assert_eq!(Ceilings::default().floor_us(&vector), None);
    }
}
