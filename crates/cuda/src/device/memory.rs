//! The GPU's memory: what this process may take of it, and what the driver takes for itself.

use std::sync::Arc;

use qwill_device::{CacheSpec, DeviceError, GROUP, Geometry, Precision, WeightFormat};

use super::{CudaBuffer, CudaDevice, LEAST_INDEX_BYTES, attention, matrix, sample, step};
use crate::driver::{Driver, Extent};
use crate::launch::GatherParams;
use crate::{Nvml, driver_facts};

/// Kept for what the driver takes after a device was opened: kernels of the model's shapes, which are loaded when they
/// are first launched, recorded rounds, and its own growth.
const LATER_BYTES: u64 = 128 << 20;

/// Of that, for small tables that no plan names.
const SMALL_BYTES: u64 = 8 << 20;

/// What a driver takes for its context and kernels, [`LATER_BYTES`] included, for a plan without a GPU: 528 MiB on an
/// H200 with driver 580, less on smaller cards.
pub const TYPICAL_DRIVER_BYTES: u64 = (528 << 20) + LATER_BYTES;

/// Bytes of the work memory for a model.
pub(super) struct WorkBytes {
    pub(super) normed: u64,
    pub(super) indices: u64,
    pub(super) partials: u64,
    /// Ids that the sampler copies.
    pub(super) sampled_vocab: usize,
}

impl WorkBytes {
    pub(super) fn of(geometry: &Geometry, max_rows: usize, max_logit_rows: usize) -> Self {
        let rows = max_rows.max(max_logit_rows) as u64;
        Self {
            normed: rows * geometry.hidden.next_multiple_of(GROUP) as u64 * 2,
            indices: (rows * 4).max(LEAST_INDEX_BYTES),
            partials: attention::partial_bytes(&geometry.attention),
            sampled_vocab: geometry.vocab,
        }
    }

    pub(super) fn sum(&self) -> u64 {
        let step = 2 * step::BLOCK_BYTES;
        self.normed + self.indices + self.partials + step + sample::SamplerMemory::bytes(self.sampled_vocab)
    }
}

/// Bytes of a packed matrix; see [`qwill_device::Device::matrix_bytes`].
pub fn matrix_bytes(format: WeightFormat, rows: usize, cols: usize) -> u64 {
    matrix::matrix_bytes(format, rows, cols)
}

/// Bytes of a buffer; see [`qwill_device::Device::buffer_bytes`].
pub fn buffer_bytes(rows: usize, cols: usize, precision: Precision) -> u64 {
    CudaBuffer::bytes(rows, cols, precision)
}

/// Bytes of the work memory for a model on a card without kernels for prompts; see
/// [`qwill_device::Device::scratch_bytes`].
pub fn scratch_bytes(geometry: &Geometry, max_rows: usize, max_logit_rows: usize) -> u64 {
    WorkBytes::of(geometry, max_rows, max_logit_rows).sum()
}

/// Bytes of the device's part of a host store; see [`qwill_device::Device::host_staging_bytes`].
pub fn host_staging_bytes(spec: &CacheSpec) -> u64 {
    spec.state_bytes()
}

/// Memory of a GPU when it was opened, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaMemory {
    /// All that processes can have.
    pub total_bytes: u64,
    /// Free before this process took anything.
    pub free_bytes: u64,
    /// What this process may take, the driver's part included: the limit, or what was free.
    pub budget_bytes: u64,
    /// The driver's part: its context and kernels as measured, and a reserve for what it takes later.
    pub driver_bytes: u64,
}

impl CudaMemory {
    /// From what is free after opening, when this process has allocated so much itself; `free_before` was free before,
    /// where that could be asked.
    fn divide(
        (free_after, total_bytes): (u64, u64),
        free_before: Option<u64>,
        allocated_bytes: u64,
        limit_bytes: Option<u64>,
    ) -> Self {
        let unused = free_after + allocated_bytes;
        // Without an answer from before, others hold what a usual context does not explain.
        let usual = total_bytes.min(unused + TYPICAL_DRIVER_BYTES - LATER_BYTES);
        let free_bytes = free_before.unwrap_or(usual).clamp(unused, total_bytes);
        let budget_bytes = limit_bytes.map_or(free_bytes, |limit| limit.min(free_bytes));
        Self { total_bytes, free_bytes, budget_bytes, driver_bytes: free_bytes - unused + LATER_BYTES }
    }

    /// Held by other processes when this one began.
    pub fn held_bytes(&self) -> u64 {
        self.total_bytes - self.free_bytes
    }

    /// Left for weights, caches and buffers.
    pub fn own_bytes(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.driver_bytes)
    }
}

/// Free memory of a GPU, asked without opening it; `None` where the management library does not say.
pub(super) fn free_bytes(ordinal: usize) -> Option<u64> {
    let driver = driver_facts().ok()?;
    let uuid = &driver.gpus.get(ordinal)?.uuid;
    let gpus = Nvml::open().ok()?.gpus().ok()?;
    let gpu = gpus.into_iter().find(|gpu| gpu.uuid == *uuid)?;
    // Of a divided GPU the process sees a part, and this is the whole.
    gpu.memory.filter(|_| gpu.divided != Some(true)).map(|memory| memory.free_bytes)
}

/// Measures an opened device and limits what it may allocate.
pub(super) fn settle(
    driver: &Driver,
    free_before: Option<u64>,
    limit_bytes: Option<u64>,
) -> Result<CudaMemory, DeviceError> {
    let memory = CudaMemory::divide(driver.memory()?, free_before, driver.used_bytes(), limit_bytes);
    driver.limit(memory.own_bytes() + SMALL_BYTES);
    Ok(memory)
}

/// A look at a device's memory, from any thread, while a model runs on it.
#[derive(Debug, Clone)]
pub struct CudaGauge {
    driver: Arc<Driver>,
    memory: CudaMemory,
}

impl CudaGauge {
    /// Bytes of weights, caches and buffers.
    pub fn allocated_bytes(&self) -> u64 {
        self.driver.used_bytes()
    }

    /// What the GPU has less of than before this process, the driver's part included. Other processes that came or
    /// went meanwhile count.
    pub fn taken_bytes(&self) -> Result<u64, DeviceError> {
        let (free_bytes, _) = self.driver.memory()?;
        Ok(self.memory.free_bytes.saturating_sub(free_bytes))
    }
}

impl CudaDevice {
    /// Compute capability, times ten.
    pub fn sm(&self) -> u32 {
        self.driver.sm()
    }

    /// The GPU's memory when it was opened.
    pub fn memory(&self) -> CudaMemory {
        self.memory
    }

    /// To look at the memory later, from another thread.
    pub fn gauge(&self) -> CudaGauge {
        CudaGauge { driver: Arc::clone(&self.driver), memory: self.memory }
    }

    /// For tests of faults: launches a kernel that reads from address 0. The driver then refuses everything in this
    /// process, as after any kernel that went wrong.
    pub fn lose_context(&mut self) -> Result<(), DeviceError> {
        let params = GatherParams { from: 0, indices: 0, to: 0, cols: 1, from_cols: 1, to_cols: 1 };
        self.driver.launch("lose_context", &self.kernels.rows.gather, Extent::new((1, 1, 1), 32), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    #[test]
    fn the_drivers_part_is_what_opening_took_and_a_reserve() {
        // 24 GiB, 20 free before; opening took 500 MiB and allocated 2 MiB.
        let after = (20 * GIB - 502 * MIB, 24 * GIB);
        let memory = CudaMemory::divide(after, Some(20 * GIB), 2 * MIB, None);
        assert_eq!(memory.driver_bytes, 500 * MIB + LATER_BYTES);
        assert_eq!((memory.held_bytes(), memory.budget_bytes), (4 * GIB, 20 * GIB));
        assert_eq!(memory.own_bytes() + memory.driver_bytes, 20 * GIB);
        let limited = CudaMemory::divide(after, Some(20 * GIB), 2 * MIB, Some(8 * GIB));
        assert_eq!(limited, CudaMemory { budget_bytes: 8 * GIB, ..memory });
        // A limit beyond what is free gives what is free.
        assert_eq!(CudaMemory::divide(after, Some(20 * GIB), 2 * MIB, Some(30 * GIB)), memory);
    }

    #[test]
    fn without_an_answer_from_before_a_usual_context_is_assumed() {
        let alone = CudaMemory::divide((24 * GIB - 400 * MIB, 24 * GIB), None, 0, None);
        assert_eq!((alone.held_bytes(), alone.driver_bytes), (0, 400 * MIB + LATER_BYTES));
        let crowded = CudaMemory::divide((10 * GIB, 24 * GIB), None, 0, None);
        assert_eq!(crowded.driver_bytes, TYPICAL_DRIVER_BYTES);
        assert_eq!(crowded.free_bytes, 10 * GIB + TYPICAL_DRIVER_BYTES - LATER_BYTES);
    }

    #[test]
    fn nothing_wraps_where_others_take_or_give_back_meanwhile() {
        // More free after than before, and more than there is.
        let memory = CudaMemory::divide((20 * GIB, 24 * GIB), Some(19 * GIB), 0, Some(MIB));
        assert_eq!((memory.driver_bytes, memory.own_bytes()), (LATER_BYTES, 0));
        assert_eq!(CudaMemory::divide((20 * GIB, 24 * GIB), Some(25 * GIB), 0, None).held_bytes(), 0);
    }
}
