//! What a GPU reaches with nothing else to do: the rates that measured ops are divided by. They are measured in the
//! same run as the ops, because clocks, power limits and neighbours change from run to run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use qwill_device::DeviceError;

use crate::KernelStore;
use crate::driver::{Driver, Extent, Function, Memory, Module};
use crate::launch::CeilingParams;
use crate::unit::{self, UnitBuild};

/// Sizes of one read, largest first; a GPU without that much free memory is measured up to what it has.
const READ_BYTES: [u64; 4] = [1024 << 20, 256 << 20, 64 << 20, 16 << 20];

/// As in the source.
const BLOCK: usize = 512;
const MMA_BLOCK: usize = 256;
const CHAINS: f64 = 8.0;
const FMA_CHAINS: f64 = 16.0;

/// Blocks per multiprocessor that are tried for reads, and taken for products.
const BLOCKS: [usize; 3] = [2, 4, 8];

/// Passes of which the best counts.
const PASSES: usize = 6;

/// Products of a chain in one pass: about a millisecond.
const ROUNDS: u32 = 2048;

/// Launches that are timed together.
const LAUNCHES: usize = 1000;

/// Clocks rise while something runs.
const WARM_UP: Duration = Duration::from_millis(60);

/// Rate of reads of one size, launched one after another, each of other memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReadRate {
    /// Bytes of one read.
    pub bytes: u64,
    /// Bytes per second.
    pub bytes_per_s: f64,
}

/// Measured rates of a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Ceilings {
    /// Reads by size, largest first.
    pub reads: Vec<ReadRate>,
    /// A copy on the device; bytes read and written together.
    pub copy_bytes_per_s: f64,
    /// Operations of mma.m16n8k16 on bf16 with f32 sums; a multiply-add is two.
    pub bf16_flops_per_s: f64,
    /// Operations of mma.m16n8k32 on int8 with int32 sums.
    pub int8_flops_per_s: f64,
    /// Operations of fused multiply-adds in f32.
    pub f32_flops_per_s: f64,
    /// Time of a launch that does nothing among others of its kind, microseconds.
    pub launch_us: f64,
}

impl Ceilings {
    /// The best rate of any size.
    pub fn read_bytes_per_s(&self) -> f64 {
        self.reads.iter().map(|rate| rate.bytes_per_s).fold(0.0, f64::max)
    }
}

/// Measures everything in less than a second. Takes up to 1 GiB while it runs.
pub(crate) fn measure(driver: &Arc<Driver>, store: &KernelStore) -> Result<Ceilings, DeviceError> {
    let build = UnitBuild::plain(unit::CEILINGS);
    let loaded = store.load(&build, driver.sm(), |code| driver.load(code));
    let (module, _) = loaded.map_err(|error| driver.failed("ceilings", error))?;
    Bench::new(driver, &module)?.ceilings()
}

struct Bench {
    driver: Arc<Driver>,
    processors: usize,
    memory: Memory,
    fill: Function,
    read: Function,
    copy: Function,
    mma_bf16: Function,
    mma_int8: Function,
    fma_f32: Function,
    nothing: Function,
}

impl Bench {
    fn new(driver: &Arc<Driver>, module: &Arc<Module>) -> Result<Self, DeviceError> {
        let kernel = |name| module.function(name, 0);
        Ok(Self {
            driver: Arc::clone(driver),
            processors: driver.multiprocessors()?,
            memory: largest_memory(driver)?,
            fill: kernel("fill")?,
            read: kernel("read")?,
            copy: kernel("copy")?,
            mma_bf16: kernel("mma_bf16")?,
            mma_int8: kernel("mma_int8")?,
            fma_f32: kernel("fma_f32")?,
            nothing: kernel("nothing")?,
        })
    }

    fn ceilings(&self) -> Result<Ceilings, DeviceError> {
        let all = self.params(0, self.memory.bytes());
        self.launch(&self.fill, 8, BLOCK, &all)?;
        let begun = Instant::now();
        while begun.elapsed() < WARM_UP {
            self.launch(&self.read, 4, BLOCK, &all)?;
            self.driver.synchronize("ceilings")?;
        }
        let sizes = READ_BYTES.into_iter().filter(|bytes| *bytes <= self.memory.bytes());
        let reads = sizes.map(|bytes| self.read_rate(bytes)).collect::<Result<_, _>>()?;
        Ok(Ceilings {
            reads,
            copy_bytes_per_s: self.copy_rate()?,
            bf16_flops_per_s: self.product_rate(&self.mma_bf16, 4096.0 * CHAINS / 32.0)?,
            int8_flops_per_s: self.product_rate(&self.mma_int8, 8192.0 * CHAINS / 32.0)?,
            f32_flops_per_s: self.product_rate(&self.fma_f32, 2.0 * FMA_CHAINS)?,
            launch_us: self.launch_us()?,
        })
    }

    /// All memory in reads of one size: by the time that a read comes round again, no cache has it.
    fn read_rate(&self, bytes: u64) -> Result<ReadRate, DeviceError> {
        let total = self.memory.bytes();
        let best_us = self.best_us(&BLOCKS, |blocks| {
            (0..total / bytes).try_for_each(|slice| {
                self.launch(&self.read, blocks, BLOCK, &self.params(slice * bytes, bytes))
            })
        })?;
        Ok(ReadRate { bytes, bytes_per_s: total as f64 / best_us * 1e6 })
    }

    /// One half to the other, by a kernel or by the driver.
    fn copy_rate(&self) -> Result<f64, DeviceError> {
        let half = self.memory.bytes() / 2;
        let params = CeilingParams { to: self.memory.address() + half, ..self.params(0, half) };
        let kernel_us = self.best_us(&BLOCKS, |blocks| self.launch(&self.copy, blocks, BLOCK, &params))?;
        let driver_us = self.best_us(&[1], |_| self.memory.copy_within("ceilings", 0, half, half))?;
        Ok(2.0 * half as f64 / kernel_us.min(driver_us) * 1e6)
    }

    /// Operations per second of a kernel that does so many per thread and round.
    fn product_rate(&self, kernel: &Function, per_thread: f64) -> Result<f64, DeviceError> {
        let mut best = 0.0f64;
        for blocks in BLOCKS {
            let us =
                self.best_us(&[blocks], |blocks| self.launch(kernel, blocks, MMA_BLOCK, &self.params(0, 0)))?;
            let threads = (self.processors * blocks * MMA_BLOCK) as f64;
            best = best.max(threads * f64::from(ROUNDS) * per_thread / us * 1e6);
        }
        Ok(best)
    }

    fn launch_us(&self) -> Result<f64, DeviceError> {
        let params = CeilingParams { rounds: 0, ..self.params(0, 0) };
        let best_us = self.best_us(&[1], |_| {
            (0..LAUNCHES).try_for_each(|_| {
                self.driver.launch("ceilings", &self.nothing, Extent::new((1, 1, 1), 32), &params)
            })
        })?;
        Ok(best_us / LAUNCHES as f64)
    }

    /// The shortest of [`PASSES`] passes with each number of blocks, microseconds.
    fn best_us(
        &self,
        blocks: &[usize],
        pass: impl Fn(usize) -> Result<(), DeviceError>,
    ) -> Result<f64, DeviceError> {
        let mut best = f64::INFINITY;
        for blocks in blocks {
            for _ in 0..PASSES {
                best = best.min(self.driver.elapsed_us("ceilings", || pass(*blocks))?);
            }
        }
        Ok(best)
    }

    fn params(&self, offset: u64, bytes: u64) -> CeilingParams {
        CeilingParams {
            from: self.memory.address() + offset,
            to: self.memory.address(),
            pieces: bytes / 16,
            rounds: ROUNDS,
            seed: 1,
        }
    }

    fn launch(
        &self,
        kernel: &Function,
        blocks: usize,
        threads: usize,
        params: &CeilingParams,
    ) -> Result<(), DeviceError> {
        let extent = Extent::new((self.processors * blocks, 1, 1), threads);
        self.driver.launch("ceilings", kernel, extent, params)
    }
}

/// As much as the largest read, or the largest of the smaller ones that is to be had.
fn largest_memory(driver: &Arc<Driver>) -> Result<Memory, DeviceError> {
    let mut refused = None;
    for bytes in READ_BYTES {
        match driver.allocate("memory to measure with", bytes) {
            Ok(memory) => return Ok(memory),
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.unwrap_or_else(|| driver.failed("ceilings", "nothing to measure".to_owned())))
}
