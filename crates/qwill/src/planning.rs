//! The memory plan of a checkpoint, for a device that is open or for a card that is not here.

use anyhow::{Context, Error, Result};
use qwill_cuda::{CudaMemory, TYPICAL_DRIVER_BYTES};
use qwill_device::plan::{
    HostMemory, MemoryPlan, PlanError, PlanInput, PlanOptions, PlanWeight, cache_spec, least_host_bytes, plan,
};
use qwill_device::{CacheSpec, Device, Geometry, KvType, Precision, StateType, WeightFormat};
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
    /// See [`Device::host_staging_bytes`].
    host_staging: Box<dyn Fn(&CacheSpec) -> u64 + 'a>,
    /// The device's memory is the host's.
    is_host: bool,
    /// What a driver takes for itself and for kernels.
    pub(crate) driver_bytes: u64,
}

impl<'a> Sizes<'a> {
    /// Of the processor.
    pub(crate) fn of_the_processor(device: &'a impl Device) -> Self {
        Self::of(device, true, 0)
    }

    /// Of a GPU that is open.
    pub(crate) fn of_an_open_gpu(device: &'a impl Device, driver_bytes: u64) -> Self {
        Self::of(device, false, driver_bytes)
    }

    fn of(device: &'a impl Device, is_host: bool, driver_bytes: u64) -> Self {
        Self {
            host_staging: Box::new(|spec| device.host_staging_bytes(spec)),
            is_host,
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
            host_staging: Box::new(qwill_cuda::host_staging_bytes),
            is_host: false,
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
        host_cache_bytes: 0,
    }
}

/// The host cache where nobody asks for another one. Conversations of a few people fit, and a machine with a GPU has it.
const USUAL_HOST_CACHE_BYTES: u64 = 8 << 30;

/// Memory of the host for pages and states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostCache {
    /// As much as a flag says.
    Asked(u64),
    /// Nobody said.
    Usual(u64),
}

impl HostCache {
    /// What it takes at most.
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::Asked(bytes) | Self::Usual(bytes) => bytes,
        }
    }

    /// For a GPU in a machine with enough memory.
    pub(crate) fn elsewhere(memory: &MemoryArgs) -> Self {
        memory.host_cache_bytes().map_or(Self::Usual(USUAL_HOST_CACHE_BYTES), Self::Asked)
    }

    /// For a GPU in a machine with so much free memory. Page-locked memory is taken for good, so that some has to be left
    /// for everybody else.
    pub(crate) fn beside_a_gpu(memory: &MemoryArgs, free_bytes: u64) -> Result<Self> {
        match memory.host_cache_bytes() {
            Some(bytes) if bytes > free_bytes / 5 * 4 => {
                let (asked, free) = (units::bytes(bytes), units::bytes(free_bytes));
                Err(Hinted::error(
                    format!("a host cache of {asked} is more than four fifths of the {free} that are free"),
                    "give a smaller --host-cache, or 0 for none",
                ))
            }
            Some(bytes) => Ok(Self::Asked(bytes)),
            None => Ok(Self::Usual(USUAL_HOST_CACHE_BYTES.min(free_bytes / 2))),
        }
    }

    /// For the processor, whose caches are in the same memory.
    pub(crate) fn on_the_processor(memory: &MemoryArgs, free_bytes: u64) -> Self {
        let within = memory.memory.map_or(free_bytes, |budget| budget.0);
        let usual = Self::Usual(USUAL_HOST_CACHE_BYTES.min(within / 8));
        memory.host_cache_bytes().map_or(usual, Self::Asked)
    }
}

/// Plans a checkpoint within a budget of bytes. A host cache that nobody asked for is left out where it does not fit.
pub(crate) fn plan_checkpoint(
    checkpoint: &Checkpoint,
    quantize: Quantize,
    options: PlanOptions,
    host_cache: HostCache,
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
    let spec = cache_spec(geometry, (options.kv_type, options.state_type), 1, 1);
    let host = HostMemory { is_shared: sizes.is_host, staging_bytes: (sizes.host_staging)(&spec) };
    let with = |host_cache_bytes| {
        let options = PlanOptions { host_cache_bytes, ..options };
        plan(&PlanInput { geometry, weights: &weights, workspace: &workspace, budget_bytes, host, options })
    };
    let planned = match host_cache {
        HostCache::Usual(bytes) if bytes >= least_host_bytes(&spec) => with(bytes).or_else(|_| with(0)),
        HostCache::Usual(_) => with(0),
        HostCache::Asked(bytes) => with(bytes),
    };
    let memory = planned.context("the model does not fit as asked")?;
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
    use crate::args::{ByteCount, Switch};

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
            host_bytes: 0,
            hint: "2 sequences would fit with 4096 KV tokens".to_owned(),
        };
        Err::<(), _>(plan).context("the model does not fit as asked").unwrap_err()
    }

    #[test]
    fn the_host_cache_is_a_part_of_what_is_free() {
        let memory = |host_cache: Option<u64>, memory: Option<u64>| MemoryArgs {
            memory: memory.map(ByteCount),
            max_sequences: None,
            max_context: None,
            kv_tokens: None,
            prefill_slice: 256,
            host_cache: host_cache.map(ByteCount),
            prefix_cache: Switch::On,
            snapshot_tokens: 4096,
        };
        let gib = |count: u64| count << 30;
        let (open, off) = (memory(None, None), memory(Some(0), None));
        let no_cache = MemoryArgs { prefix_cache: Switch::Off, ..memory(Some(gib(3)), None) };
        assert_eq!(HostCache::elsewhere(&no_cache), HostCache::Asked(0));
        assert_eq!(HostCache::elsewhere(&open), HostCache::Usual(gib(8)));
        assert_eq!(HostCache::elsewhere(&off), HostCache::Asked(0));
        assert_eq!(HostCache::beside_a_gpu(&open, gib(100)).unwrap(), HostCache::Usual(gib(8)));
        assert_eq!(HostCache::beside_a_gpu(&open, gib(10)).unwrap(), HostCache::Usual(gib(5)));
        let asked = memory(Some(gib(20)), None);
        assert_eq!(HostCache::beside_a_gpu(&asked, gib(25)).unwrap(), HostCache::Asked(gib(20)));
        let refusal = HostCache::beside_a_gpu(&asked, gib(24)).unwrap_err().to_string();
        assert!(refusal.contains("four fifths"), "{refusal}");
        assert_eq!(HostCache::on_the_processor(&open, gib(16)), HostCache::Usual(gib(2)));
        assert_eq!(
            HostCache::on_the_processor(&memory(None, Some(gib(4))), gib(16)),
            HostCache::Usual(gib(4) / 8)
        );
        assert_eq!(HostCache::on_the_processor(&asked, gib(16)), HostCache::Asked(gib(20)));
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
