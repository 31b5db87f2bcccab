//! Runs steps and takes their times.

use std::collections::BTreeMap;
use std::time::Instant;

use qwill_cpu::CpuDevice;
use qwill_cuda::{CudaDevice, OpTiming};
use qwill_device::{Device, DeviceError, SampleRow};
use qwill_model::{Model, ModelError, StoredAs, step_costs};

use super::cases::Case;
use super::floor::{Ceilings, ReadRate};
use super::report::{OpReport, StepReport};

/// Steps before the first that counts: caches, clocks and whatever a device prepares.
const WARM_UPS: usize = 2;

/// Steps whose ops are timed; the shortest counts.
const OP_STEPS: usize = 3;

/// Bytes that the processor reads to measure its memory: past every cache.
const PROCESSOR_READ_BYTES: usize = 512 << 20;

/// A device that measurements know how to look into.
pub(super) trait Measured: Device {
    /// What it does at most.
    fn ceilings(&self) -> Result<Ceilings, DeviceError>;
    /// Starts to measure ops one by one.
    fn start_ops(&mut self);
    /// What each op took since then; `None` where the device cannot tell.
    fn stop_ops(&mut self) -> Option<BTreeMap<&'static str, OpTiming>>;
}

impl Measured for CudaDevice {
    fn ceilings(&self) -> Result<Ceilings, DeviceError> {
        let found = self.measure_ceilings()?;
        let read =
            |rate: &qwill_cuda::ReadRate| ReadRate { bytes: rate.bytes, bytes_per_s: rate.bytes_per_s };
        Ok(Ceilings {
            reads: found.reads.iter().map(read).collect(),
            copy_bytes_per_s: Some(found.copy_bytes_per_s),
            matrix_per_s: Some(found.bf16_flops_per_s),
            int8_per_s: Some(found.int8_flops_per_s),
            vector_per_s: Some(found.f32_flops_per_s),
            launch_us: Some(found.launch_us),
        })
    }

    fn start_ops(&mut self) {
        self.start_measuring();
    }

    fn stop_ops(&mut self) -> Option<BTreeMap<&'static str, OpTiming>> {
        Some(self.stop_measuring())
    }
}

impl Measured for CpuDevice {
    /// Reads by all threads; rates of arithmetic depend on the instructions and are left out.
    fn ceilings(&self) -> Result<Ceilings, DeviceError> {
        let bytes = PROCESSOR_READ_BYTES as u64;
        let bytes_per_s = processor_read_bytes_per_s(self.options().threads);
        Ok(Ceilings { reads: vec![ReadRate { bytes, bytes_per_s }], ..Ceilings::default() })
    }

    fn start_ops(&mut self) {}

    fn stop_ops(&mut self) -> Option<BTreeMap<&'static str, OpTiming>> {
        None
    }
}

/// The best of a few passes of all threads over memory that no cache holds.
fn processor_read_bytes_per_s(threads: usize) -> f64 {
    const PASSES: usize = 3;
    let words: Vec<u64> = (0..PROCESSOR_READ_BYTES as u64 / 8).collect();
    let part = words.len().div_ceil(threads.max(1));
    let pass = || {
        let start = Instant::now();
        let sum: u64 = std::thread::scope(|scope| {
            let parts: Vec<_> = words
                .chunks(part)
                .map(|part| scope.spawn(|| part.iter().fold(0, |sum, word| sum ^ word)))
                .collect();
            parts.into_iter().filter_map(|part| part.join().ok()).fold(0, |sum, part| sum ^ part)
        });
        std::hint::black_box(sum);
        PROCESSOR_READ_BYTES as f64 / start.elapsed().as_secs_f64()
    };
    (0..PASSES).map(|_| pass()).fold(0.0, f64::max)
}

/// Measures a case.
pub(super) fn step<D: Measured>(
    model: &mut Model<D>,
    case: &Case,
    stored: &StoredAs<'_>,
    ceilings: &Ceilings,
    repeats: usize,
) -> Result<StepReport, ModelError> {
    for span in &case.batch.spans {
        model.clear_slot(span.slot)?;
    }
    for _ in 0..WARM_UPS {
        run(model, case)?;
    }
    let mut walls_us = (0..repeats).map(|_| run(model, case)).collect::<Result<Vec<f64>, _>>()?;
    walls_us.sort_by(f64::total_cmp);
    let timings = timings(model, case)?;
    let costs = step_costs(model.geometry(), stored, &case.batch, case.logit_rows().len());
    let ops = OpReport::all(&costs, timings.as_ref(), ceilings);
    Ok(StepReport::new(case, &walls_us, ops))
}

/// One step with the greedy token of every row that a client would see, microseconds.
fn run<D: Measured>(model: &mut Model<D>, case: &Case) -> Result<f64, ModelError> {
    let (logit_rows, vocab) = (case.logit_rows(), model.geometry().vocab);
    let samples: Vec<SampleRow<'_>> =
        (0..logit_rows.len()).map(|row| SampleRow::greedy(row, vocab)).collect();
    let start = Instant::now();
    model.forward(&case.batch, &logit_rows)?;
    model.sample(&samples)?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

/// What each op takes in the quickest of a few steps whose launches wait for each other.
fn timings<D: Measured>(
    model: &mut Model<D>,
    case: &Case,
) -> Result<Option<BTreeMap<&'static str, OpTiming>>, ModelError> {
    let sum = |timings: &BTreeMap<&'static str, OpTiming>| -> f64 {
        timings.values().map(|timing| timing.microseconds).sum()
    };
    let mut best: Option<BTreeMap<&'static str, OpTiming>> = None;
    for _ in 0..OP_STEPS {
        model.device().start_ops();
        run(model, case)?;
        let Some(timings) = model.device().stop_ops() else { return Ok(None) };
        if best.as_ref().is_none_or(|best| sum(&timings) < sum(best)) {
            best = Some(timings);
        }
    }
    Ok(best)
}
