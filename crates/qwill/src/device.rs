//! The device that serves: chosen by a flag or by what is there, and open, because only an open one is known to work.

use anyhow::Result;
use qwill_cpu::fast::{CpuOptions, Isa};
use qwill_cpu::{CpuDevice, available_memory_bytes};
use qwill_cuda::{CudaDevice, CudaGauge, driver_facts};
use qwill_device::{Activations, Device, KvType, StateType, WeightFormat};
use qwill_weights::{Checkpoint, Quantize};

use crate::args::{DeviceArgs, DeviceChoice, MemoryArgs, NumericsArgs};
use crate::gpu::{self, Wanted};
use crate::planning::{self, HostCache, Planned, Sizes};
use crate::units;

/// The part of the processor's free memory that a plan takes when no budget is given: the rest is for tokenizer, HTTP,
/// page cache and neighbours.
const SHARE_OF_FREE_MEMORY: f64 = 0.8;

/// Most that a plan on the processor takes beside the weights and the host cache when no budget is given. A processor serves a few
/// sequences at once; what it could hold in hundreds of gigabytes is not what somebody meant who named no number.
const BESIDE_THE_WEIGHTS_BYTES: u64 = 4 << 30;

/// Memory that others hold and that is worth a word; a driver alone accounts for some.
const NOTABLE_BYTES: u64 = 64 << 20;

/// One of the kinds of device, open.
pub(crate) enum OpenDevice {
    /// The processor, with the threads that compute.
    Cpu(Box<CpuDevice>, usize),
    /// A GPU.
    Cuda(Box<CudaDevice>),
}

/// The device, and how it came to be this one.
pub(crate) struct Chosen {
    /// The device.
    pub(crate) device: OpenDevice,
    /// Storage of keys and values: the flag's, or the device's usual one.
    pub(crate) kv_type: KvType,
    /// Storage of recurrent states.
    pub(crate) state_type: StateType,
    /// Why GPUs that are there do not serve.
    pub(crate) notes: Vec<String>,
}

impl Chosen {
    /// Opens the device that the flags name, or for `auto` the first usable GPU, else the processor.
    pub(crate) fn open(
        checkpoint: &Checkpoint,
        quantize: Quantize,
        arguments: &DeviceArgs,
        numerics: &NumericsArgs,
    ) -> Result<Self> {
        let state_type = StateType::from(numerics.state_type);
        let on_gpu = |device: CudaDevice, kv_type, notes| Self {
            device: OpenDevice::Cuda(Box::new(device)),
            kv_type,
            state_type,
            notes,
        };
        let wanted = Wanted {
            geometry: &checkpoint.config().geometry,
            kv_type: numerics.kv_type.map_or(KvType::Bf16, KvType::from),
            state_type,
            activations: numerics.activations.map(Activations::from),
        };
        let notes = match arguments.device {
            DeviceChoice::Cpu => Vec::new(),
            DeviceChoice::Cuda(ordinal) => {
                let device = gpu::open(driver_facts().as_ref(), ordinal, arguments, &wanted)?;
                return Ok(on_gpu(device, wanted.kv_type, Vec::new()));
            }
            DeviceChoice::Auto => {
                let (device, reasons) = gpu::first_usable(driver_facts().as_ref(), arguments, &wanted);
                let notes = reasons.into_iter().map(|reason| one_line(&reason.into())).collect();
                match device {
                    Some(device) => return Ok(on_gpu(device, wanted.kv_type, notes)),
                    None => notes,
                }
            }
        };
        let options = cpu_options(checkpoint, quantize, numerics);
        Ok(Self {
            device: OpenDevice::Cpu(Box::new(CpuDevice::new(options)?), options.threads),
            kv_type: numerics.kv_type.map_or(KvType::F32, KvType::from),
            state_type,
            notes,
        })
    }

    /// For people: `cpu, avx2, 2 threads`; `NVIDIA H200 (sm_90), 150.12 GB`.
    pub(crate) fn name(&self) -> String {
        match &self.device {
            OpenDevice::Cpu(_, threads) => {
                format!("cpu, {}, {threads} thread{}", Isa::best(), if *threads == 1 { "" } else { "s" })
            }
            OpenDevice::Cuda(device) => {
                let memory = device.memory();
                let name = format!("{}, {}", device.facts().name, units::bytes(memory.total_bytes));
                match memory.held_bytes() {
                    0..NOTABLE_BYTES => name,
                    held_bytes => format!("{name}, others hold {}", units::bytes(held_bytes)),
                }
            }
        }
    }

    /// How activations are rounded.
    pub(crate) fn activations(&self) -> Activations {
        match &self.device {
            OpenDevice::Cpu(device, _) => device.facts().activations,
            OpenDevice::Cuda(device) => device.facts().activations,
        }
    }

    /// Everything that decides the bits of an answer: `w4a8 kv=bf16 state=f32 cpu`.
    pub(crate) fn numerics(&self, weights: WeightFormat) -> String {
        let weight_bits = match weights {
            WeightFormat::F32 => 32,
            WeightFormat::F16 | WeightFormat::Bf16 => 16,
            WeightFormat::Int8 => 8,
            WeightFormat::Int4 => 4,
        };
        let activation_bits = match self.activations() {
            Activations::F32 => 32,
            Activations::Bf16 => 16,
            Activations::Int8 => 8,
        };
        let kind = match &self.device {
            OpenDevice::Cpu(..) => "cpu".to_owned(),
            // Other architectures multiply in other instructions: their sums may differ.
            OpenDevice::Cuda(device) => format!("cuda sm_{}", device.sm()),
        };
        let (kv, state) = (self.kv_type.name(), self.state_type.name());
        format!("w{weight_bits}a{activation_bits} kv={kv} state={state} {kind}")
    }

    /// A look at the GPU's memory while the model runs.
    pub(crate) fn gauge(&self) -> Option<CudaGauge> {
        match &self.device {
            OpenDevice::Cpu(..) => None,
            OpenDevice::Cuda(device) => Some(device.gauge()),
        }
    }

    /// What a driver takes of the memory.
    pub(crate) fn driver_bytes(&self) -> u64 {
        match &self.device {
            OpenDevice::Cpu(..) => 0,
            OpenDevice::Cuda(device) => device.memory().driver_bytes,
        }
    }

    /// Plans within the flag's budget or what is free now.
    pub(crate) fn plan(
        &self,
        checkpoint: &Checkpoint,
        quantize: Quantize,
        memory: &MemoryArgs,
    ) -> Result<Planned> {
        let options = planning::options(memory, self.kv_type, self.state_type);
        match &self.device {
            OpenDevice::Cpu(device, _) => {
                let sizes = Sizes::of_the_processor(&**device);
                let free_bytes = device.facts().memory_bytes;
                let host_cache = HostCache::on_the_processor(memory, free_bytes);
                let budget_bytes = memory.memory.map_or_else(
                    || {
                        let free = free_bytes as f64 * SHARE_OF_FREE_MEMORY;
                        let weights = sizes.weight_bytes(checkpoint, quantize);
                        (free as u64).min(weights + BESIDE_THE_WEIGHTS_BYTES + host_cache.bytes())
                    },
                    |budget| budget.0,
                );
                planning::plan_checkpoint(checkpoint, quantize, options, host_cache, budget_bytes, &sizes)
            }
            OpenDevice::Cuda(device) => {
                let card = device.memory();
                let sizes = Sizes::of_an_open_gpu(&**device, card.driver_bytes);
                let host_cache = HostCache::beside_a_gpu(memory, available_memory_bytes())?;
                planning::plan_checkpoint(
                    checkpoint,
                    quantize,
                    options,
                    host_cache,
                    card.budget_bytes,
                    &sizes,
                )
                .map_err(|error| planning::explain(error, &card))
            }
        }
    }
}

/// The processor as a checkpoint asks for it where the flags leave it open.
fn cpu_options(checkpoint: &Checkpoint, quantize: Quantize, numerics: &NumericsArgs) -> CpuOptions {
    let quantised =
        matches!(planning::body_format(checkpoint, quantize), WeightFormat::Int4 | WeightFormat::Int8);
    let activations = match numerics.activations {
        Some(choice) => choice.into(),
        None if quantised => Activations::Int8,
        None => Activations::F32,
    };
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    CpuOptions::new(numerics.threads.unwrap_or_else(cores), activations)
}

/// An error with its causes in one line.
fn one_line(error: &anyhow::Error) -> String {
    format!("{error:#}")
}
