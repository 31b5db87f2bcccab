//! From flags to a running engine: what to load, on which device, in how much memory.

use std::time::Instant;

use anyhow::{Context, Result};
use qwill_contract::EngineHandle;
use qwill_cpu::CpuDevice;
use qwill_cpu::fast::{CpuOptions, Isa};
use qwill_device::plan::{MemoryPlan, PlanInput, PlanOptions, PlanWeight};
use qwill_device::{Activations, Device, Geometry, KvType, Precision, StateType, WeightFormat};
use qwill_engine::{EngineOptions, EngineThread};
use qwill_model::{Model, ModelError, ModelOptions, PlanGroup};
use qwill_weights::{Checkpoint, Quantize};

use crate::args::{MemoryArgs, ModelArgs, NumericsArgs, RandomArgs};
use crate::failure::Hinted;
use crate::progress::LoadDisplay;
use crate::source::{ModelSource, Source};
use crate::units;

/// The part of the free memory that a plan takes when no budget is given: the rest is for tokenizer, HTTP,
/// page cache and neighbours.
const SHARE_OF_FREE_MEMORY: f64 = 0.8;

/// Most that a plan takes beside the weights when no budget is given. A processor serves a few sequences at once;
/// what it could hold in hundreds of gigabytes is not what somebody meant who named no number.
const BESIDE_THE_WEIGHTS_BYTES: u64 = 4 << 30;

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

/// Bytes of a device's work memory for a geometry, rows of a step and rows of logits.
type ScratchBytes<'a> = dyn Fn(&Geometry, usize, usize) -> u64 + 'a;

/// Sizes that the plan asks of a device.
#[derive(Clone, Copy)]
pub(crate) struct DeviceSizes<'a> {
    /// See [`Device::matrix_bytes`].
    pub(crate) matrix: &'a dyn Fn(WeightFormat, usize, usize) -> u64,
    /// See [`Device::buffer_bytes`].
    pub(crate) buffer: &'a dyn Fn(usize, usize, Precision) -> u64,
    /// See [`Device::scratch_bytes`]; `None` without a device to ask.
    pub(crate) scratch: Option<&'a ScratchBytes<'a>>,
}

/// Plans a checkpoint within a budget.
pub(crate) fn plan(
    checkpoint: &Checkpoint,
    quantize: Quantize,
    numerics: &NumericsArgs,
    memory: &MemoryArgs,
    budget_bytes: u64,
    sizes: DeviceSizes<'_>,
) -> Result<Planned> {
    let geometry = &checkpoint.config().geometry;
    let groups = qwill_model::plan_weights(checkpoint, quantize, sizes.matrix);
    let weights: Vec<PlanWeight> = groups
        .iter()
        .map(|group| PlanWeight {
            group: group.label.to_owned(),
            detail: format!("{}, {}", units::parameters(group.parameters), group.formats),
            bytes: group.bytes,
        })
        .collect();
    let workspace = |rows: usize, logit_rows: usize| {
        let mut buffers = qwill_model::workspace_bytes(geometry, rows, logit_rows, sizes.buffer).to_vec();
        buffers.extend(sizes.scratch.map(|scratch| ("scratch", scratch(geometry, rows, logit_rows))));
        buffers
    };
    let options = PlanOptions {
        max_sequences: memory.max_sequences,
        max_context_tokens: memory.max_context,
        kv_tokens: memory.kv_tokens,
        kv_type: KvType::from(numerics.kv_type),
        state_type: StateType::from(numerics.state_type),
        prefill_rows: memory.prefill_slice,
    };
    let input = PlanInput { geometry, weights: &weights, workspace: &workspace, budget_bytes, options };
    let memory = qwill_device::plan::plan(&input).context("the model does not fit as asked")?;
    Ok(Planned { memory, weights: groups })
}

/// Plans for the processor of this machine, within `--memory` or what is free now.
pub(crate) fn plan_for_this_machine(
    checkpoint: &Checkpoint,
    quantize: Quantize,
    numerics: &NumericsArgs,
    memory: &MemoryArgs,
) -> Result<Planned> {
    let device = CpuDevice::new(device_options(checkpoint, quantize, numerics))?;
    let matrix_bytes = |format, rows, cols| device.matrix_bytes(format, rows, cols);
    let scratch_bytes =
        |geometry: &Geometry, rows, logit_rows| device.scratch_bytes(geometry, rows, logit_rows);
    let buffer_bytes = |rows, cols, precision| device.buffer_bytes(rows, cols, precision);
    let sizes = DeviceSizes { matrix: &matrix_bytes, buffer: &buffer_bytes, scratch: Some(&scratch_bytes) };
    let budget_bytes = memory.memory.map_or_else(
        || {
            let free = device.facts().memory_bytes as f64 * SHARE_OF_FREE_MEMORY;
            let weights = qwill_model::plan_weights(checkpoint, quantize, &matrix_bytes);
            (free as u64).min(weights.iter().map(|group| group.bytes).sum::<u64>() + BESIDE_THE_WEIGHTS_BYTES)
        },
        |budget| budget.0,
    );
    plan(checkpoint, quantize, numerics, memory, budget_bytes, sizes)
}

/// Everything decided, nothing loaded.
pub(crate) struct Launch {
    /// What is served.
    pub(crate) source: Source,
    /// Memory and weights.
    pub(crate) planned: Planned,
    /// The device to make.
    pub(crate) device: CpuOptions,
    /// What to do with 16-bit weights.
    pub(crate) quantize: Quantize,
    /// When preparing began.
    pub(crate) started: Instant,
}

impl Launch {
    /// Opens the model and plans its memory.
    pub(crate) fn prepare(
        model: &ModelArgs,
        random: Option<&RandomArgs>,
        numerics: &NumericsArgs,
        memory: &MemoryArgs,
    ) -> Result<Self> {
        let started = Instant::now();
        let quantize = model.quantize.into();
        let origin = ModelSource::of(model, random)?;
        let source = Source::open(origin, quantize, model.chat_template.as_deref())?;
        let source = source.with_cache(&model.weight_cache);
        let planned = plan_for_this_machine(&source.checkpoint, quantize, numerics, memory)?;
        let device = device_options(&source.checkpoint, quantize, numerics);
        Ok(Self { source, planned, device, quantize, started })
    }

    /// Format of the body's matrices, which is most of the model.
    pub(crate) fn body_format(&self) -> WeightFormat {
        body_format(&self.source.checkpoint, self.quantize)
    }

    /// The processor, for people.
    pub(crate) fn device_name(&self) -> String {
        let threads = self.device.threads;
        format!("cpu, {}, {threads} thread{}", Isa::best(), if threads == 1 { "" } else { "s" })
    }

    /// Everything that decides the bits of an answer: `w4a8 kv=bf16 state=f32 cpu`.
    pub(crate) fn numerics(&self) -> String {
        let weight_bits = match self.body_format() {
            WeightFormat::F32 => 32,
            WeightFormat::F16 | WeightFormat::Bf16 => 16,
            WeightFormat::Int8 => 8,
            WeightFormat::Int4 => 4,
        };
        let activation_bits = match self.device.activations {
            Activations::F32 => 32,
            Activations::Bf16 => 16,
            Activations::Int8 => 8,
        };
        let (kv, state) = (self.planned.memory.kv_type.name(), self.planned.memory.state_type.name());
        format!("w{weight_bits}a{activation_bits} kv={kv} state={state} cpu")
    }

    /// Loads the weights and starts the engine; returns when it has generated its first token. The checkpoint
    /// is closed by then.
    pub(crate) fn start(
        self,
        model_names: Vec<String>,
        queue_capacity: usize,
    ) -> Result<(EngineHandle, EngineThread)> {
        let memory = &self.planned.memory;
        let options = EngineOptions {
            model_names,
            queue_capacity,
            numerics: self.numerics(),
            eos_token_ids: self.source.eos_token_ids.clone(),
            vocab_limit: self.source.text.tokenizer.vocab_size(),
            chunk_boundary_token: self.source.turn_start,
            ..EngineOptions::sized_by(memory)
        };
        let model_options = ModelOptions {
            quantize: self.quantize,
            kv_type: memory.kv_type,
            state_type: memory.state_type,
            pages: memory.pages,
            slots: memory.slots,
            max_rows: memory.max_rows,
            max_logit_rows: memory.max_logit_rows,
        };
        let verb = match (&self.source.origin, self.quantize) {
            (ModelSource::Random { .. }, _) => "making weights",
            (_, Quantize::None) => "loading",
            (_, Quantize::Int8) => "quantising to int8",
            (_, Quantize::Int4) => "quantising to int4",
        };
        let (checkpoint, device) = (self.source.checkpoint, self.device);
        let mut display = LoadDisplay::new(verb);
        let build = move || -> Result<Model<CpuDevice>, ModelError> {
            let device = CpuDevice::new(device)?;
            Model::load(device, &checkpoint, &model_options, &mut |progress| display.show(progress))
        };
        let (handle, engine) = qwill_engine::start(options, build)?;
        engine.wait_ready()?;
        Ok((handle, engine))
    }
}

/// The device that a checkpoint asks for where the flags leave it open.
fn device_options(checkpoint: &Checkpoint, quantize: Quantize, numerics: &NumericsArgs) -> CpuOptions {
    let activations = match numerics.activations {
        Some(choice) => choice.into(),
        None if is_quantised(checkpoint, quantize) => Activations::Int8,
        None => Activations::F32,
    };
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    CpuOptions::new(numerics.threads.unwrap_or_else(cores), activations)
}

fn body_format(checkpoint: &Checkpoint, quantize: Quantize) -> WeightFormat {
    let name = "layers.0.mlp.gate_proj";
    checkpoint.planned_format(name, quantize).unwrap_or(WeightFormat::Bf16)
}

fn is_quantised(checkpoint: &Checkpoint, quantize: Quantize) -> bool {
    matches!(body_format(checkpoint, quantize), WeightFormat::Int4 | WeightFormat::Int8)
}

/// A one-sentence reason why an address cannot be listened on.
pub(crate) fn check_address(address: std::net::SocketAddr) -> Result<()> {
    let Err(error) = std::net::TcpListener::bind(address) else { return Ok(()) };
    let hint = match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            "another program listens there: choose another --port, or 0 for a free one"
        }
        std::io::ErrorKind::PermissionDenied => "ports below 1024 need privileges: choose a higher --port",
        std::io::ErrorKind::AddrNotAvailable => "this machine does not have that address: see --host",
        _ => "see --host and --port",
    };
    Err(Hinted::error(format!("cannot listen on {address}: {error}"), hint))
}
