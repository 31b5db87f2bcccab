//! From flags to a running engine: what to load, on which device, in how much memory.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use qwill_contract::EngineHandle;
use qwill_cpu::fast::Isa;
use qwill_cuda::{CudaDevice, CudaGauge};
use qwill_device::{Device, DeviceError, WeightFormat};
use qwill_engine::speculation::{SpecMode, SpeculationOptions};
use qwill_engine::{DiskCacheOptions, EngineOptions, EngineThread};
use qwill_model::{Model, ModelError, ModelOptions};
use qwill_weights::{Checkpoint, Quantize};
use sha2::{Digest, Sha256};

use crate::args::{
    DeviceArgs, DiskCacheArgs, MemoryArgs, ModelArgs, NumericsArgs, RandomArgs, SpeculationArgs, Switch,
};
use crate::device::{Chosen, OpenDevice};
use crate::failure::Hinted;
use crate::fault::{Fault, Faulty};
use crate::planning::{self, Planned};
use crate::progress::LoadDisplay;
use crate::source::{ModelSource, Source};

/// Everything decided, nothing loaded.
pub(crate) struct Launch {
    /// What is served.
    pub(crate) source: Source,
    /// Memory and weights.
    pub(crate) planned: Planned,
    /// The device, open.
    pub(crate) chosen: Chosen,
    /// What to do with 16-bit weights.
    pub(crate) quantize: Quantize,
    /// Drafts.
    pub(crate) speculation: SpeculationOptions,
    prefix_cache: bool,
    snapshot_interval_tokens: usize,
    /// Where snapshots outlive the process.
    pub(crate) disk: Option<DiskCacheOptions>,
    /// When preparing began.
    pub(crate) started: Instant,
}

impl Launch {
    /// Opens the model and the device and plans the memory.
    pub(crate) fn prepare(
        model: &ModelArgs,
        random: Option<&RandomArgs>,
        device: &DeviceArgs,
        numerics: &NumericsArgs,
        memory: &MemoryArgs,
        speculation: &SpeculationArgs,
    ) -> Result<Self> {
        let started = Instant::now();
        let quantize = model.quantize.into();
        let origin = ModelSource::of(model, random)?;
        let source = Source::open(origin, quantize, model.chat_template.as_deref())?;
        let source = source.with_cache(&model.weight_cache);
        let speculation = speculation_options(speculation, random, &source)?;
        let chosen = Chosen::open(&source.checkpoint, quantize, device, numerics)?;
        let planned = chosen.plan(&source.checkpoint, quantize, memory)?;
        let prefix_cache = memory.prefix_cache == Switch::On;
        let snapshot_interval_tokens = memory.snapshot_tokens;
        Ok(Self {
            source,
            planned,
            chosen,
            quantize,
            speculation,
            prefix_cache,
            snapshot_interval_tokens,
            disk: None,
            started,
        })
    }

    /// Format of the body's matrices, which is most of the model.
    pub(crate) fn body_format(&self) -> WeightFormat {
        planning::body_format(&self.source.checkpoint, self.quantize)
    }

    /// Everything that decides the bits of an answer: `w4a8 kv=bf16 state=f32 cpu`. Made-up acceptance decides them too.
    pub(crate) fn numerics(&self) -> String {
        let numerics = self.chosen.numerics(self.body_format());
        match &self.speculation.synthetic {
            Some(table) => format!("{numerics} synthetic-acceptance={table}"),
            None => numerics,
        }
    }

    /// Keeps snapshots on disk as the flags say.
    pub(crate) fn with_disk_cache(mut self, arguments: &DiskCacheArgs) -> Result<Self> {
        let Some(directory) = &arguments.disk_cache else { return Ok(self) };
        if self.planned.memory.host.is_none() || !self.prefix_cache {
            let hint = "give --host-cache room for some snapshots, or leave --disk-cache out";
            return Err(Hinted::error("--disk-cache needs a host cache, and there is none", hint));
        }
        let (directory, limit_bytes) = (directory.clone(), arguments.disk_cache_size.0);
        self.disk = Some(DiskCacheOptions { directory, limit_bytes, identity: self.identity()? });
        Ok(self)
    }

    /// A digest of everything that decides the bits of a stored page or state beside its tokens.
    fn identity(&self) -> Result<[u8; 32]> {
        let model = match &self.source.origin {
            ModelSource::Embedded => b"embedded".to_vec(),
            ModelSource::Random { geometry, seed } => format!("{geometry:?} {seed}").into_bytes(),
            ModelSource::Directory(directory) => {
                let identity = self.source.checkpoint.identity();
                identity.with_context(|| format!("looking at the files of {}", directory.display()))?
            }
        };
        let isa = match &self.chosen.device {
            OpenDevice::Cpu(..) => Isa::best().to_string(),
            OpenDevice::Cuda(_) => String::new(),
        };
        let numerics = self.chosen.numerics(self.body_format());
        let (quantize, boundary) = (self.quantize, self.source.turn_start);
        let how = format!("{} {numerics} {isa} {quantize:?} {boundary:?}\n", crate::VERSION);
        Ok(Sha256::new().chain_update(how).chain_update(model).finalize().into())
    }

    /// A look at the GPU's memory while the model runs.
    pub(crate) fn gauge(&self) -> Option<CudaGauge> {
        self.chosen.gauge()
    }

    /// Loads the weights and starts the engine; returns when it has generated its first token. The checkpoint
    /// is closed by then.
    pub(crate) fn start(self, serving: Serving) -> Result<(EngineHandle, EngineThread)> {
        let Serving { model_names, queue_capacity, max_stall, fault } = serving;
        let memory = &self.planned.memory;
        let mut engine = EngineOptions {
            model_names,
            queue_capacity,
            max_stall,
            numerics: self.numerics(),
            eos_token_ids: self.source.eos_token_ids.clone(),
            vocab_limit: self.source.text.tokenizer.vocab_size(),
            chunk_boundary_token: self.source.turn_start,
            speculation: self.speculation.clone(),
            prefix_cache: self.prefix_cache,
            snapshot_interval_tokens: self.snapshot_interval_tokens,
            disk_cache: self.disk.clone(),
            ..EngineOptions::sized_by(memory)
        };
        if fault.is_some() {
            engine.speculation.mode = SpecMode::Off;
        }
        let model = ModelOptions {
            quantize: self.quantize,
            kv_type: memory.kv_type,
            state_type: memory.state_type,
            pages: memory.pages,
            slots: memory.slots,
            host_granules: memory.host.map_or(0, |host| host.granules),
            max_rows: memory.max_rows,
            max_logit_rows: memory.max_logit_rows,
        };
        let verb = match (&self.source.origin, self.quantize) {
            (ModelSource::Random { .. }, _) => "making weights",
            (_, Quantize::None) => "loading",
            (_, Quantize::Int8) => "quantising to int8",
            (_, Quantize::Int4) => "quantising to int4",
        };
        let display = LoadDisplay::new(verb);
        let checkpoint = self.source.checkpoint;
        let start = Start { engine, model, checkpoint, display, fault };
        match self.chosen.device {
            OpenDevice::Cpu(device, _) => start.on(*device, |_| Ok(())),
            OpenDevice::Cuda(device) => start.on(*device, CudaDevice::lose_context),
        }
    }
}

/// How a model is to be served.
pub(crate) struct Serving {
    /// Names it answers to; the first is its own.
    pub(crate) model_names: Vec<String>,
    /// Requests that may wait.
    pub(crate) queue_capacity: usize,
    /// How long a slice of somebody's prompt may keep running answers waiting.
    pub(crate) max_stall: Duration,
    /// Makes the device fail on purpose.
    pub(crate) fault: Option<Fault>,
}

/// What the flags say about drafts, where the model can do it.
fn speculation_options(
    arguments: &SpeculationArgs,
    random: Option<&RandomArgs>,
    source: &Source,
) -> Result<SpeculationOptions> {
    let mode = SpecMode::from(arguments.spec);
    let has_mtp = source.checkpoint.config().geometry.mtp_layers > 0;
    if mode == SpecMode::Mtp && !has_mtp {
        return Err(Hinted::error(
            "--spec mtp: the model has no MTP module",
            "take --spec lookup, or auto, which uses what is there",
        ));
    }
    let synthetic = random.and_then(|random| random.synthetic_acceptance.clone());
    Ok(SpeculationOptions { mode, max_draft_len: arguments.draft_len, adaptive: true, synthetic })
}

/// All that a start needs but the device.
struct Start {
    engine: EngineOptions,
    model: ModelOptions,
    checkpoint: Checkpoint,
    display: LoadDisplay,
    fault: Option<Fault>,
}

impl Start {
    /// `break_device` is how the device is broken by a fault that asks for it.
    fn on<D: Device>(
        self,
        device: D,
        break_device: fn(&mut D) -> Result<(), DeviceError>,
    ) -> Result<(EngineHandle, EngineThread)> {
        let Self { engine, model, checkpoint, mut display, fault } = self;
        let load = move || -> Result<Model<D>, ModelError> {
            Model::load(device, &checkpoint, &model, &mut |progress| display.show(progress))
        };
        let (handle, thread) = match fault {
            None => qwill_engine::start(engine, load)?,
            Some(fault) => {
                tracing::warn!("--fault {fault}: the device fails on purpose");
                qwill_engine::start(engine, move || {
                    Ok::<_, ModelError>(Faulty::new(load()?, fault, break_device))
                })?
            }
        };
        thread.wait_ready()?;
        Ok((handle, thread))
    }
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
