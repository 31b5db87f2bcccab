//! NVML, NVIDIA's management library: what the driver knows about each GPU. Only read, and only where it is installed:
//! nothing that computes depends on it.
//!
//! Functions and structs are those of nvml.h since driver 525. What a GPU does not have (a `GeForce` card has no error
//! correction, a container may hide processes) is `None`.
#![expect(unsafe_code, reason = "calls into a C library loaded at run time")]

mod library;
mod peak;

use std::sync::Arc;

use thiserror::Error;

use library::{Functions, Handle};

pub use peak::PeakMemory;

/// Why NVML did not answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NvmlError {
    /// The library is not there: no driver, or a container without its management part.
    #[error("NVIDIA's management library (libnvidia-ml.so.1) cannot be loaded: {reason}")]
    NotInstalled {
        /// The system's words.
        reason: String,
    },
    /// An older library lacks a function.
    #[error("the management library has no {function}")]
    Missing {
        /// The function.
        function: String,
    },
    /// A function failed.
    #[error("{function}: {reason}")]
    Failed {
        /// The function.
        function: String,
        /// The library's words.
        reason: String,
    },
    /// No GPU has the identifier.
    #[error("no GPU {uuid}")]
    NoSuchGpu {
        /// The identifier.
        uuid: String,
    },
}

/// Memory of a GPU, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// All of it.
    pub total_bytes: u64,
    /// Kept by the driver for itself.
    pub reserved_bytes: u64,
    /// Held by processes.
    pub used_bytes: u64,
    /// What is left.
    pub free_bytes: u64,
}

/// A process that holds memory of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryHolder {
    /// Its id, in the numbering of the machine, which a container may not share.
    pub pid: u32,
    /// What it holds; `None` where the driver does not say.
    pub bytes: Option<u64>,
}

/// Error correction of a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EccStatus {
    /// Whether it is on.
    pub enabled: bool,
    /// Whether it will be after the next restart.
    pub pending: bool,
    /// Errors since the driver was loaded that were corrected.
    pub corrected_errors: Option<u64>,
    /// Errors since the driver was loaded that were not.
    pub uncorrected_errors: Option<u64>,
}

/// Power of a GPU, watts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PowerStatus {
    /// What it may draw.
    pub limit_w: f64,
    /// What it may draw unless somebody changed that.
    pub default_limit_w: Option<f64>,
    /// What it draws now.
    pub draw_w: Option<f64>,
}

/// The link between a GPU and the host: generation and lanes. The generation drops while the link is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PcieLink {
    /// Generation now.
    pub generation: u32,
    /// Lanes now.
    pub lanes: u32,
    /// Highest generation of GPU and slot.
    pub most_generation: u32,
    /// Most lanes of GPU and slot.
    pub most_lanes: u32,
}

/// Why clocks are below their highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Throttle {
    /// Nothing to do.
    Idle,
    /// Somebody fixed the clocks.
    FixedClocks,
    /// The power limit.
    PowerLimit,
    /// The board's protection: heat or power, at least half the speed is gone.
    HardwareSlowdown,
    /// It waits for the clocks of other GPUs.
    SyncBoost,
    /// Heat, by the driver.
    Heat,
    /// Heat, by the board.
    HardwareHeat,
    /// The power supply asked for less.
    PowerBrake,
    /// The display.
    Display,
}

impl Throttle {
    /// Each with its bit in `nvmlClocksEventReasons`.
    const BITS: [(u64, Self); 9] = [
        (0x1, Self::Idle),
        (0x2, Self::FixedClocks),
        (0x4, Self::PowerLimit),
        (0x8, Self::HardwareSlowdown),
        (0x10, Self::SyncBoost),
        (0x20, Self::Heat),
        (0x40, Self::HardwareHeat),
        (0x80, Self::PowerBrake),
        (0x100, Self::Display),
    ];

    fn of(bits: u64) -> Vec<Self> {
        Self::BITS.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, reason)| *reason).collect()
    }

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::FixedClocks => "fixed clocks",
            Self::PowerLimit => "power limit",
            Self::HardwareSlowdown => "hardware slowdown",
            Self::SyncBoost => "clocks of other GPUs",
            Self::Heat => "heat",
            Self::HardwareHeat => "heat, by the board",
            Self::PowerBrake => "power supply",
            Self::Display => "display",
        }
    }
}

/// A GPU at a moment.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuStatus {
    /// Identifier that CUDA knows as well: `GPU-` and 32 hexadecimal digits in groups.
    pub uuid: String,
    /// The product.
    pub name: String,
    /// Memory.
    pub memory: Option<MemoryUse>,
    /// Who holds it, the largest first; `None` where the driver does not say.
    pub holders: Option<Vec<MemoryHolder>>,
    /// Error correction.
    pub ecc: Option<EccStatus>,
    /// Power.
    pub power: Option<PowerStatus>,
    /// Clock of the multiprocessors now, MHz.
    pub clock_mhz: Option<u32>,
    /// Their highest clock, MHz.
    pub most_clock_mhz: Option<u32>,
    /// Why the clock is not its highest.
    pub throttles: Option<Vec<Throttle>>,
    /// Temperature of the chip, degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Whether the driver stays loaded while nobody uses the GPU.
    pub persistence: Option<bool>,
    /// The link to the host.
    pub link: Option<PcieLink>,
    /// Whether the GPU is divided into instances.
    pub divided: Option<bool>,
}

/// The library, initialised.
#[derive(Debug, Clone)]
pub struct Nvml {
    session: Arc<Session>,
}

/// Initialised functions; shut down when dropped.
#[derive(Debug)]
struct Session {
    functions: Functions,
}

impl Drop for Session {
    fn drop(&mut self) {
        // Nothing can be done about a failure.
        let _ = self.functions.run(c"nvmlShutdown");
    }
}

impl Nvml {
    /// Loads and initialises the library of the driver.
    pub fn open() -> Result<Self, NvmlError> {
        Self::with(Functions::load()?)
    }

    fn with(functions: Functions) -> Result<Self, NvmlError> {
        functions.run(c"nvmlInit_v2")?;
        Ok(Self { session: Arc::new(Session { functions }) })
    }

    /// Version of the driver, such as `570.86.15`.
    pub fn driver_version(&self) -> Result<String, NvmlError> {
        self.functions().system_text(library::DRIVER_VERSION)
    }

    /// Every GPU of the machine, those included that CUDA is not shown.
    pub fn gpus(&self) -> Result<Vec<GpuStatus>, NvmlError> {
        (0..self.functions().count()?).map(|index| self.status(self.functions().handle(index)?)).collect()
    }

    /// Bytes of a GPU that processes hold.
    pub fn used_bytes(&self, uuid: &str) -> Result<u64, NvmlError> {
        Ok(self.functions().memory(self.find(uuid)?)?.used)
    }

    fn functions(&self) -> &Functions {
        &self.session.functions
    }

    fn find(&self, uuid: &str) -> Result<Handle, NvmlError> {
        for index in 0..self.functions().count()? {
            let handle = self.functions().handle(index)?;
            if self.functions().text(handle, library::UUID)? == uuid {
                return Ok(handle);
            }
        }
        Err(NvmlError::NoSuchGpu { uuid: uuid.to_owned() })
    }

    fn status(&self, gpu: Handle) -> Result<GpuStatus, NvmlError> {
        const MULTIPROCESSORS: i32 = 1;
        const CHIP: i32 = 0;
        let functions = self.functions();
        Ok(GpuStatus {
            uuid: functions.text(gpu, library::UUID)?,
            name: functions.text(gpu, library::NAME)?,
            memory: functions.memory(gpu).ok().map(|memory| MemoryUse {
                total_bytes: memory.total,
                reserved_bytes: memory.reserved,
                used_bytes: memory.used,
                free_bytes: memory.free,
            }),
            holders: self.holders(gpu),
            ecc: functions.mode(gpu, library::ECC_MODE).ok().map(|(current, pending)| EccStatus {
                enabled: current == 1,
                pending: pending == 1,
                corrected_errors: functions.ecc_errors(gpu, 0).ok(),
                uncorrected_errors: functions.ecc_errors(gpu, 1).ok(),
            }),
            power: self.power(gpu),
            clock_mhz: functions.get_of(gpu, &library::CLOCK, MULTIPROCESSORS).ok(),
            most_clock_mhz: functions.get_of(gpu, &library::MOST_CLOCK, MULTIPROCESSORS).ok(),
            throttles: functions.get(gpu, &library::THROTTLES).ok().map(Throttle::of),
            temperature_c: functions.get_of(gpu, &library::TEMPERATURE, CHIP).ok(),
            persistence: functions.get(gpu, &library::PERSISTENCE).ok().map(|mode| mode == 1),
            link: self.link(gpu),
            divided: functions.mode(gpu, library::MIG_MODE).ok().map(|(current, _)| current == 1),
        })
    }

    fn power(&self, gpu: Handle) -> Option<PowerStatus> {
        let watts =
            |getter| self.functions().get(gpu, getter).ok().map(|milliwatts| f64::from(milliwatts) / 1e3);
        Some(PowerStatus {
            limit_w: watts(&library::POWER_LIMIT)?,
            default_limit_w: watts(&library::POWER_DEFAULT),
            draw_w: watts(&library::POWER_DRAW),
        })
    }

    fn link(&self, gpu: Handle) -> Option<PcieLink> {
        let number = |getter| self.functions().get(gpu, getter).ok();
        Some(PcieLink {
            generation: number(&library::LINK_GENERATION)?,
            lanes: number(&library::LINK_WIDTH)?,
            most_generation: number(&library::LINK_MOST_GENERATION)?,
            most_lanes: number(&library::LINK_MOST_WIDTH)?,
        })
    }

    /// Processes that compute or draw; one that does both is named once.
    fn holders(&self, gpu: Handle) -> Option<Vec<MemoryHolder>> {
        let mut processes = self.functions().processes(gpu, library::COMPUTE_PROCESSES).ok()?;
        processes.extend(self.functions().processes(gpu, library::GRAPHICS_PROCESSES).unwrap_or_default());
        let mut holders: Vec<MemoryHolder> = Vec::new();
        for process in processes {
            let bytes = (process.used != u64::MAX).then_some(process.used);
            if !holders.iter().any(|holder| holder.pid == process.pid) {
                holders.push(MemoryHolder { pid: process.pid, bytes });
            }
        }
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        Some(holders)
    }
}

#[cfg(test)]
mod tests;
