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
mod simd;

use std::sync::OnceLock;

use qwill_device::{Activations, DeviceError};

pub use isa::Isa;
pub use pack::Matrix;

use crate::Buffer;
use linear::Scratch;
use pool::Pool;
use quantize::QuantisedRows;
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
    /// Inputs of products after their norm.
    normed: Buffer,
    /// Inputs of products as int8 codes.
    quantised: QuantisedRows,
    /// Roped keys on their way into the pages.
    keys: Vec<f32>,
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
            memory_bytes: available_memory_bytes(),
            normed: Buffer::default(),
            quantised: QuantisedRows::default(),
            keys: Vec::new(),
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
    /// The values as a matrix of rows of a few, transposed; made on first use.
    transposed: OnceLock<Vec<f32>>,
}

impl Vector {
    fn new(values: &[f32]) -> Self {
        Self { values: values.to_vec(), transposed: OnceLock::new() }
    }

    /// `[width, n]` of values that are `[n, width]`. A vector is used with one width only.
    fn transposed(&self, width: usize) -> &[f32] {
        self.transposed.get_or_init(|| {
            (0..width).flat_map(|column| self.values.iter().skip(column).step_by(width)).copied().collect()
        })
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

/// Memory that the operating system says is available; without an answer, no limit.
fn available_memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok()).map_or(u64::MAX, |kib| kib * 1024)
}
