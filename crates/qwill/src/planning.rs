//! The memory plan of a checkpoint, for a device that is open or for a card that is not here.

use anyhow::{Context, Error, Result};
use qwill_cuda::{CudaMemory, TYPICAL_DRIVER_BYTES};
use qwill_device::plan::{MemoryPlan, PlanError, PlanInput, PlanOptions, PlanWeight};
use qwill_device::{Device, Geometry, KvType, Precision, StateType, WeightFormat};
use qwill_model::PlanGroup;
use qwill_weights::{Checkpoint, Quantize};

use crate::args::MemoryArgs;
use crate::failure::Hinted;
use crate::units;

/// Memory and weights of a model on a device.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    /// Where every byte goes.
    pub(crate) memory: MemoryPlan,
    /// Weights by kind, with formats and parameters.
    pub(crate) weights: Vec<PlanGroup>,
}

impl Planned {
    /// Parameters of the model.
    pub(crate) fn parameters(&self) -> u64 {
        self.weights.iter().map(|group| group.parameters).sum()
    }
}

type MatrixBytes<'a> = dyn Fn(WeightFormat, usize, usize) -> u64 + 'a;
type BufferBytes<'a> = dyn Fn(usize, usize, Precision) -> u64 + 'a;
type ScratchBytes<'a> = dyn Fn(&Geometry, usize, usize) -> u64 + 'a;

/// Sizes that the plan asks of a device.
pub(crate) struct Sizes<'a> {
    /// See [`Device::matrix_bytes`].
    matrix: Box<MatrixBytes<'a>>,
    /// See [`Device::buffer_bytes`].
    buffer: Box<BufferBytes<'a>>,
    /// See [`Device::scratch_bytes`].
    scratch: Box<ScratchBytes<'a>>,
    /// What a driver takes for itself and for kernels.
    pub(crate) driver_bytes: u64,
}

impl<'a> Sizes<'a> {
    /// Of a device that is open.
    pub(crate) fn of(device: &'a impl Device, driver_bytes: u64) -> Self {
        Self {
            matrix: Box::new(|format, rows, cols| device.matrix_bytes(format, rows, cols)),
            buffer: Box::new(|rows, cols, precision| device.buffer_bytes(rows, cols, precision)),
            scratch: Box::new(|geometry, rows, logit_rows| device.scratch_bytes(geometry, rows, logit_rows)),
            driver_bytes,
        }
    }

    /// Of a GPU that is not here.
    pub(crate) fn of_a_gpu() -> Sizes<'static> {
        Sizes {
            matrix: Box::new(qwill_cuda::matrix_bytes),
            buffer: Box::new(qwill_cuda::buffer_bytes),
            scratch: Box::new(qwill_cuda::scratch_bytes),
            driver_bytes: TYPICAL_DRIVER_BYTES,
        }
    }

    /// Bytes of all weights.
    pub(crate) fn weight_bytes(&self, checkpoint: &Checkpoint, quantize: Quantize) -> u64 {
        let groups = qwill_model::plan_weights(checkpoint, quantize, &self.matrix);
        groups.iter().map(|group| group.bytes).sum()
    }
}

/// What the flags fix.
pub(crate) fn options(memory: &MemoryArgs, kv_type: KvType, state_type: StateType) -> PlanOptions {
    PlanOptions {
        max_sequences: memory.max_sequences,
        max_context_tokens: memory.max_context,
        kv_tokens: memory.kv_tokens,
        kv_type,
        state_type,
        prefill_rows: memory.prefill_slice,
    }
}

/// Plans a checkpoint within a budget.
pub(crate) fn plan(
    checkpoint: &Checkpoint,
    quantize: Quantize,
    options: PlanOptions,
    budget_bytes: u64,
    sizes: &Sizes<'_>,
) -> Result<Planned> {
    let geometry = &checkpoint.config().geometry;
    let groups = qwill_model::plan_weights(checkpoint, quantize, &sizes.matrix);
    let weights: Vec<PlanWeight> = groups
        .iter()
        .map(|group| PlanWeight {
            group: group.label.to_owned(),
            detail: format!("{}, {}", units::parameters(group.parameters), group.formats),
            bytes: group.bytes,
        })
        .collect();
    let workspace = |rows: usize, logit_rows: usize| {
        let mut buffers = qwill_model::workspace_bytes(geometry, rows, logit_rows, &sizes.buffer).to_vec();
        buffers.push(("scratch", (sizes.scratch)(geometry, rows, logit_rows)));
        if sizes.driver_bytes > 0 {
            buffers.push(("driver, kernels", sizes.driver_bytes));
        }
        buffers
    };
    let input = PlanInput { geometry, weights: &weights, workspace: &workspace, budget_bytes, options };
    let memory = qwill_device::plan::plan(&input).context("the model does not fit as asked")?;
    Ok(Planned { memory, weights: groups })
}

/// Adds who is to blame where a plan would fit into a GPU that nobody else uses.
pub(crate) fn explain(error: Error, card: &CudaMemory) -> Error {
    let Some(PlanError::DoesNotFit { needed_bytes, .. }) = error.downcast_ref() else { return error };
    if *needed_bytes > card.total_bytes || card.budget_bytes < card.free_bytes {
        return error;
    }
    let (held, total) = (units::bytes(card.held_bytes()), units::bytes(card.total_bytes));
    let hint =
        "end them (`nvidia-smi` lists them), or ask for less: --max-sequences, --max-context, --kv-tokens";
    Hinted::around(error, format!("other processes hold {held} of the GPU's {total}"), hint)
}

/// Format of the body's matrices, which is most of the model.
pub(crate) fn body_format(checkpoint: &Checkpoint, quantize: Quantize) -> WeightFormat {
    let name = "layers.0.mlp.gate_proj";
    checkpoint.planned_format(name, quantize).unwrap_or(WeightFormat::Bf16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(needed_bytes: u64, budget_bytes: u64) -> Error {
        let plan = PlanError::DoesNotFit {
            needed_bytes,
            budget_bytes,
            weight_bytes: 15 << 30,
            workspace_bytes: 1 << 30,
            slots: 4,
            state_bytes: 1 << 30,
            kv_tokens: 32_768,
            kv_bytes: 2 << 30,
            hint: "2 sequences would fit with 4096 KV tokens".to_owned(),
        };
        Err::<(), _>(plan).context("the model does not fit as asked").unwrap_err()
    }

    fn card(free_bytes: u64, budget_bytes: u64) -> CudaMemory {
        CudaMemory { total_bytes: 24 << 30, free_bytes, budget_bytes, driver_bytes: 600 << 20 }
    }

    #[test]
    fn other_processes_are_named_where_a_plan_fails_because_of_them() {
        let crowded = explain(refusal(19 << 30, 12 << 30), &card(12 << 30, 12 << 30));
        insta::assert_snapshot!(crate::failure::render(&crowded));
    }

    #[test]
    fn other_processes_are_not_blamed_for_a_large_plan_or_a_small_budget() {
        for (needed, card) in [(25 << 30, card(12 << 30, 12 << 30)), (19 << 30, card(20 << 30, 10 << 30))] {
            let text = format!("{:#}", explain(refusal(needed, card.budget_bytes), &card));
            assert!(!text.contains("other processes"), "{text}");
        }
    }
}
