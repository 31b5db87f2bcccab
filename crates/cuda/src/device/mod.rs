//! The device: shapes are checked here and in the families' files, kernels are launched, nothing is computed on the
//! host.

mod attention;
mod cache;
mod check;
mod gdn;
mod linear;
mod matrix;
mod rows;
mod sample;
mod step;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use qwill_device::{
    Activations, AttentionShape, Batch, CacheSpec, Device, DeviceError, DeviceFacts, GROUP, GdnShape,
    GdnState, GdnWeights, Geometry, KvPage, MatrixData, SampleRow, Sampled, ScoreRow, WeightFormat,
};

use crate::driver::{Driver, Function, Memory, OpTiming};
use crate::unit::{self, UnitBuild};
use crate::{CubinCache, KernelOrigin, KernelStore};
use check::Check;
use linear::Mode;
use step::StepMemory;

pub use cache::CudaCache;
pub use matrix::CudaMatrix;

/// Row indices that always fit.
const LEAST_INDEX_BYTES: u64 = 4096;

/// How to open a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaOptions {
    /// Which GPU, as the driver numbers them.
    pub ordinal: usize,
    /// Bytes that may be taken; `None`: what is free at start.
    pub memory_budget_bytes: Option<u64>,
    /// Activation numerics; only [`Activations::Bf16`] so far.
    pub activations: Activations,
    /// Where compiled kernels are kept; `None` keeps none.
    pub kernel_cache_directory: Option<PathBuf>,
}

impl Default for CudaOptions {
    /// The first GPU, all its free memory, the user's cache.
    fn default() -> Self {
        Self {
            ordinal: 0,
            memory_budget_bytes: None,
            activations: Activations::Bf16,
            kernel_cache_directory: CubinCache::default_directory(),
        }
    }
}

/// Activations `[capacity_rows, cols]` on the device, f32.
#[derive(Debug)]
pub struct CudaBuffer {
    memory: Memory,
    rows: usize,
    cols: usize,
}

/// A short f32 vector on the device.
#[derive(Debug)]
pub struct CudaVector {
    memory: Memory,
    len: usize,
}

/// One GPU.
#[derive(Debug)]
pub struct CudaDevice {
    driver: Arc<Driver>,
    store: KernelStore,
    kernels: FixedKernels,
    /// The step's rows, spans and pages.
    step: StepMemory,
    /// bf16 inputs of the product that runs.
    staged: Scratch,
    /// Row indices of the op that runs.
    indices: Scratch,
    /// Parts of the attention that runs.
    partials: Scratch,
    /// Copies of logits, lists, results of the sampler.
    sampler: sample::SamplerMemory,
}

/// The kernels that need no geometry.
#[derive(Debug)]
struct FixedKernels {
    rows: rows::RowKernels,
    linear: linear::LinearKernels,
    pack: Function,
    sample: Function,
}

/// Memory that grows to the largest size asked for.
#[derive(Debug)]
struct Scratch {
    name: &'static str,
    memory: Option<Memory>,
}

impl Scratch {
    fn new(name: &'static str) -> Self {
        Self { name, memory: None }
    }

    /// At least `bytes`; growing drops the contents.
    fn at_least(&mut self, driver: &Arc<Driver>, bytes: u64) -> Result<&Memory, DeviceError> {
        let memory = match self.memory.take() {
            Some(memory) if memory.bytes() >= bytes => memory,
            small => {
                drop(small);
                driver.allocate(self.name, bytes)?
            }
        };
        Ok(self.memory.insert(memory))
    }
}

impl CudaDevice {
    /// Opens a GPU and gets the kernels that every model needs.
    pub fn new(options: &CudaOptions) -> Result<Self, DeviceError> {
        if options.activations != Activations::Bf16 {
            let reason = format!("{} activations; this device has bf16", options.activations.name());
            return Err(DeviceError::shape("open", reason));
        }
        let driver = Driver::new(options.ordinal, options.memory_budget_bytes)?;
        let store = KernelStore::new(options.kernel_cache_directory.clone());
        let module = |unit| load(&driver, &store, &UnitBuild::plain(unit));
        let kernels = FixedKernels {
            rows: rows::RowKernels::new(&module(unit::ROWS)?)?,
            linear: linear::LinearKernels::new(&module(unit::LINEAR)?)?,
            pack: module(unit::PACK)?.function("pack", 0)?,
            sample: module(unit::SAMPLE)?.function("sample", 0)?,
        };
        Ok(Self {
            step: StepMemory::new(&driver)?,
            driver,
            store,
            kernels,
            staged: Scratch::new("staged activations"),
            indices: Scratch::new("row indices"),
            partials: Scratch::new("parts of attention"),
            sampler: sample::SamplerMemory::default(),
        })
    }

    /// Starts to measure the time of every op's kernels; each then waits for its end, so that steps are slower.
    pub fn start_measuring(&mut self) {
        self.driver.measure(true);
    }

    /// Stops measuring and returns what each op took.
    pub fn stop_measuring(&mut self) -> BTreeMap<&'static str, OpTiming> {
        self.driver.measure(false)
    }

    /// Uploads row indices for the op that is about to run.
    fn upload_indices(&mut self, op: &'static str, rows: &[usize]) -> Result<u64, DeviceError> {
        let indices: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
        let memory =
            self.indices.at_least(&self.driver, (indices.len() as u64 * 4).max(LEAST_INDEX_BYTES))?;
        memory.write(op, 0, &indices)?;
        Ok(memory.address())
    }
}

/// Bytes of the work memory for a model.
struct WorkBytes {
    staged: u64,
    indices: u64,
    partials: u64,
    /// Ids that the sampler copies.
    sampled_vocab: usize,
}

impl WorkBytes {
    fn of(geometry: &Geometry, max_rows: usize, max_logit_rows: usize) -> Self {
        let rows = max_rows.max(max_logit_rows) as u64;
        let inputs = [
            geometry.hidden,
            2 * geometry.hidden * geometry.mtp_layers,
            geometry.intermediate,
            geometry.attention.query_columns(),
            geometry.gdn.value_columns(),
        ];
        let widest = inputs.into_iter().max().unwrap_or(0).next_multiple_of(GROUP) as u64;
        Self {
            staged: rows * widest * 2,
            indices: (rows * 4).max(LEAST_INDEX_BYTES),
            partials: attention::partial_bytes(&geometry.attention),
            sampled_vocab: geometry.vocab,
        }
    }

    fn sum(&self) -> u64 {
        self.staged + self.indices + self.partials + sample::SamplerMemory::bytes(self.sampled_vocab)
    }
}

/// The module of a unit, from wherever the store has it.
fn load(
    driver: &Arc<Driver>,
    store: &KernelStore,
    build: &UnitBuild,
) -> Result<Arc<crate::driver::Module>, DeviceError> {
    let (code, origin) = store.get(build, driver.sm()).map_err(|error| driver.failed("kernels", error))?;
    driver.load(&code).map_err(|error| match origin {
        KernelOrigin::Compiler => error,
        KernelOrigin::Pack | KernelOrigin::Cache => {
            driver.failed("kernels", format!("{}: {error}", build.describe()))
        }
    })
}

impl Device for CudaDevice {
    type Buffer = CudaBuffer;
    type Matrix = CudaMatrix;
    type Vector = CudaVector;
    type Cache = CudaCache;

    fn facts(&self) -> DeviceFacts {
        DeviceFacts {
            name: format!("{} (sm_{})", self.driver.name(), self.driver.sm()),
            memory_bytes: self.driver.budget_bytes(),
            activations: Activations::Bf16,
        }
    }

    fn matrix(&mut self, data: &MatrixData<'_>) -> Result<CudaMatrix, DeviceError> {
        CudaMatrix::new(&self.driver, &self.kernels.pack, data)
    }

    fn matrix_bytes(&self, format: WeightFormat, rows: usize, cols: usize) -> u64 {
        matrix::matrix_bytes(format, rows, cols)
    }

    fn vector(&mut self, values: &[f32]) -> Result<CudaVector, DeviceError> {
        let memory = self.driver.allocate("a vector of weights", values.len() as u64 * 4)?;
        memory.write("vector", 0, values)?;
        Ok(CudaVector { memory, len: values.len() })
    }

    fn conv_taps(&mut self, values: &[f32], _taps: usize) -> Result<CudaVector, DeviceError> {
        self.vector(values)
    }

    fn scratch_bytes(&self, geometry: &Geometry, max_rows: usize, max_logit_rows: usize) -> u64 {
        WorkBytes::of(geometry, max_rows, max_logit_rows).sum()
    }

    fn reserve(
        &mut self,
        geometry: &Geometry,
        max_rows: usize,
        max_logit_rows: usize,
    ) -> Result<(), DeviceError> {
        let bytes = WorkBytes::of(geometry, max_rows, max_logit_rows);
        self.staged.at_least(&self.driver, bytes.staged)?;
        self.indices.at_least(&self.driver, bytes.indices)?;
        self.partials.at_least(&self.driver, bytes.partials)?;
        self.sampler.reserve(&self.driver, bytes.sampled_vocab)
    }

    fn buffer(&mut self, rows: usize, cols: usize) -> Result<CudaBuffer, DeviceError> {
        let memory = self.driver.allocate("an activation buffer", rows as u64 * cols as u64 * 4)?;
        Ok(CudaBuffer { memory, rows, cols })
    }

    fn cache(&mut self, spec: &CacheSpec) -> Result<CudaCache, DeviceError> {
        CudaCache::new(&self.driver, &self.store, spec)
    }

    fn begin_step(&mut self, batch: &Batch) -> Result<(), DeviceError> {
        batch.check().map_err(|reason| DeviceError::shape("begin_step", reason))?;
        self.step.upload(&self.driver, batch)
    }

    fn embed(&mut self, table: &CudaMatrix, batch: &Batch, out: &mut CudaBuffer) -> Result<(), DeviceError> {
        self.run_embed(table, batch, out)
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        self.run_rms_norm(rows, x, weight, eps, out)
    }

    fn norm_linears(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        norm: &CudaVector,
        eps: f32,
        parts: &[&CudaMatrix],
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("norm_linears");
        check.buffer("out", out, rows, parts.iter().map(|part| part.rows()).sum())?;
        for part in parts {
            check.that(part.cols() == norm.len, || {
                format!("a part of {} inputs after a norm of {}", part.cols(), norm.len)
            })?;
        }
        let x = self.stage(check, rows, None, x, Some((norm, eps)), norm.len)?;
        let mut first_column = 0;
        for part in parts {
            self.multiply(check, rows, x, part, out, first_column, Mode::Round)?;
            first_column += part.rows();
        }
        Ok(())
    }

    fn linear(
        &mut self,
        rows: usize,
        input: &CudaBuffer,
        matrix: &CudaMatrix,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("linear");
        let x = self.stage(check, rows, None, input, None, matrix.cols())?;
        self.multiply(check, rows, x, matrix, out, 0, Mode::Round)
    }

    fn linear_add(
        &mut self,
        rows: usize,
        input: &CudaBuffer,
        matrix: &CudaMatrix,
        x: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("linear_add");
        let staged = self.stage(check, rows, None, input, None, matrix.cols())?;
        self.multiply(check, rows, staged, matrix, x, 0, Mode::Add)
    }

    fn swiglu(
        &mut self,
        rows: usize,
        width: usize,
        gate_up: &CudaBuffer,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        self.run_swiglu(rows, width, gate_up, out)
    }

    fn attention_prepare(
        &mut self,
        batch: &Batch,
        kv_layer: usize,
        shape: &AttentionShape,
        projected: &CudaBuffer,
        q_norm: &CudaVector,
        k_norm: &CudaVector,
        cache: &mut CudaCache,
        query: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        self.run_attention_prepare(batch, kv_layer, shape, projected, (q_norm, k_norm), cache, query)
    }

    fn attention(
        &mut self,
        batch: &Batch,
        kv_layer: usize,
        shape: &AttentionShape,
        query: &CudaBuffer,
        projected: &CudaBuffer,
        cache: &CudaCache,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        self.run_attention(batch, kv_layer, shape, query, projected, cache, out)
    }

    fn gdn_prepare(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        weights: &GdnWeights<Self>,
        projected: &CudaBuffer,
        cache: &mut CudaCache,
        mixed: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        self.run_gdn_prepare(batch, gdn_layer, shape, weights, projected, cache, mixed)
    }

    fn gdn_scan(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        mixed: &CudaBuffer,
        cache: &mut CudaCache,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        self.run_gdn_scan(batch, gdn_layer, shape, mixed, cache, out)
    }

    fn gated_norm(
        &mut self,
        rows: usize,
        shape: &GdnShape,
        scanned: &CudaBuffer,
        projected: &CudaBuffer,
        norm: &CudaVector,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        self.run_gated_norm(rows, shape, scanned, projected, norm, out)
    }

    fn mtp_combine(
        &mut self,
        batch: &Batch,
        table: &CudaMatrix,
        hidden: &CudaBuffer,
        embed_norm: &CudaVector,
        hidden_norm: &CudaVector,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        self.run_mtp_combine(batch, table, hidden, (embed_norm, hidden_norm), eps, out)
    }

    fn head(
        &mut self,
        rows: &[usize],
        hidden: &CudaBuffer,
        matrix: &CudaMatrix,
        logits: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("head");
        let x = self.stage(check, rows.len(), Some(rows), hidden, None, matrix.cols())?;
        self.multiply(check, rows.len(), x, matrix, logits, 0, Mode::Raw)
    }

    fn sample(&mut self, logits: &CudaBuffer, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, DeviceError> {
        self.run_sample(logits, rows)
    }

    fn score(&mut self, logits: &CudaBuffer, rows: &[ScoreRow]) -> Result<Vec<Sampled>, DeviceError> {
        self.run_score(logits, rows)
    }

    fn clear_slot(&mut self, cache: &mut CudaCache, slot: usize) -> Result<(), DeviceError> {
        cache.clear_slot(slot)
    }

    fn copy_slot(&mut self, cache: &mut CudaCache, from: usize, to: usize) -> Result<(), DeviceError> {
        cache.copy_slot(from, to)
    }

    fn copy_page(&mut self, cache: &mut CudaCache, from: usize, to: usize) -> Result<(), DeviceError> {
        cache.copy_page(from, to)
    }

    fn read_state(
        &mut self,
        cache: &CudaCache,
        gdn_layer: usize,
        slot: usize,
    ) -> Result<GdnState, DeviceError> {
        cache.read_state(gdn_layer, slot)
    }

    fn write_state(
        &mut self,
        cache: &mut CudaCache,
        gdn_layer: usize,
        slot: usize,
        state: &GdnState,
    ) -> Result<(), DeviceError> {
        cache.write_state(gdn_layer, slot, state)
    }

    fn read_page(&mut self, cache: &CudaCache, kv_layer: usize, page: usize) -> Result<KvPage, DeviceError> {
        cache.read_page(kv_layer, page)
    }

    fn write_page(
        &mut self,
        cache: &mut CudaCache,
        kv_layer: usize,
        page: usize,
        content: &KvPage,
    ) -> Result<(), DeviceError> {
        cache.write_page(kv_layer, page, content)
    }

    fn read(&mut self, buffer: &CudaBuffer, rows: usize) -> Result<Vec<f32>, DeviceError> {
        Check("read").buffer("buffer", buffer, rows, 0)?;
        buffer.memory.read("read", 0, rows * buffer.cols)
    }

    fn write(&mut self, buffer: &mut CudaBuffer, values: &[f32]) -> Result<(), DeviceError> {
        let check = Check("write");
        check.that(buffer.cols > 0 && values.len().is_multiple_of(buffer.cols), || {
            format!("{} values for rows of {}", values.len(), buffer.cols)
        })?;
        check.buffer("buffer", buffer, values.len() / buffer.cols, 0)?;
        buffer.memory.write("write", 0, values)
    }

    fn gather(&mut self, rows: &[usize], from: &CudaBuffer, to: &mut CudaBuffer) -> Result<(), DeviceError> {
        self.run_gather(rows, from, to)
    }
}
