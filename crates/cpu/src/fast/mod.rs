//! The fast CPU device: packed weights, SIMD kernels, a small thread pool.
//!
//! One file per family of ops. Each cuts its work into pieces for the [`pool`] and hands a piece to a kernel: a
//! generic function over [`simd`] vectors, compiled for every instruction set and chosen at run time. Pieces and
//! register blocks never change the order of a sum, so threads and batch mates never change a bit.

#![expect(clippy::inline_always, reason = "a kernel must end up inside a function of its instruction set")]

mod attention;
mod blocks;
mod check;
mod device;
mod elementwise;
mod gdn_prepare;
mod gdn_scan;
mod isa;
mod linear;
mod pack;
mod pool;
mod quantize;
mod sample;
mod scratch;
mod simd;

use qwill_device::{Activations, DeviceError};

pub use isa::Isa;
pub use pack::Matrix;

use pool::Pool;
use scratch::Scratch;
use simd::Level;

/// How to build a [`CpuDevice`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads that compute, the caller's included; at least 1.
    pub threads: usize,
    /// How activations are rounded between ops.
    pub activations: Activations,
    /// Instruction set; `None` takes the fastest that the processor has.
    pub isa: Option<Isa>,
}

impl CpuOptions {
    /// The fastest instruction set on `threads` threads.
    pub fn new(threads: usize, activations: Activations) -> Self {
        Self { threads, activations, isa: None }
    }
}

/// The fast CPU device.
#[derive(Debug)]
pub struct CpuDevice {
    options: CpuOptions,
    isa: Isa,
    level: Level,
    pool: Pool,
    scratch: Scratch,
    memory_bytes: u64,
}

impl CpuDevice {
    /// Builds the device and starts its threads.
    pub fn new(options: CpuOptions) -> Result<Self, DeviceError> {
        let isa = options.isa.unwrap_or_else(Isa::best);
        let level = Level::new(isa).ok_or_else(|| {
            DeviceError::shape("CpuDevice", format!("this processor has no {isa} instructions"))
        })?;
        if options.threads == 0 {
            return Err(DeviceError::shape("CpuDevice", "0 threads, needs at least 1"));
        }
        let pool = Pool::new(options.threads).map_err(|error| DeviceError::Failed {
            op: "CpuDevice",
            device: format!("cpu ({isa}, {} threads)", options.threads),
            reason: error.to_string(),
        })?;
        Ok(Self {
            options,
            isa,
            level,
            pool,
            scratch: Scratch::new(options.threads),
            memory_bytes: crate::available_memory_bytes(),
        })
    }

    /// The options it was built with.
    pub fn options(&self) -> CpuOptions {
        self.options
    }
}

/// A short vector of weights.
#[derive(Debug, Clone)]
pub struct Vector {
    values: Vec<f32>,
    /// For taps, which are stored `[taps, channels]`: how many there are of each channel. Otherwise 1.
    taps: usize,
}

impl Vector {
    fn new(values: &[f32]) -> Self {
        Self { values: values.to_vec(), taps: 1 }
    }

    /// Transposes `[channels, taps]`.
    fn of_taps(values: &[f32], taps: usize) -> Self {
        let mut transposed = Vec::with_capacity(values.len());
        transposed.extend((0..taps).flat_map(|tap| values.iter().skip(tap).step_by(taps)));
        Self { values: transposed, taps }
    }
}

/// Rows that one piece of a row-by-row op takes: all when handing work over would cost more than it saves.
fn rows_per_piece(rows: usize, elements_per_row: usize, threads: usize) -> usize {
    /// About ten microseconds of elementwise work.
    const SMALL: usize = 32 << 10;
    if threads == 1 || rows * elements_per_row <= SMALL {
        return rows.max(1);
    }
    rows.div_ceil(4 * threads).max(1)
}
