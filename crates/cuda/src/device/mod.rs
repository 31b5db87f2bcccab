//! The device: shapes are checked here and in the families' files, kernels are launched, nothing is computed on the
//! host.

mod attention;
mod buffer;
mod cache;
mod check;
mod gdn;
mod host;
mod linear;
mod linear_prompt;
mod linear_rounds;
mod matrix;
mod memory;
mod options;
mod rows;
mod sample;
mod step;

use std::collections::BTreeMap;
use std::sync::Arc;

use qwill_device::{
    Activations, AttentionShape, Batch, CacheSpec, Device, DeviceError, DeviceFacts, GdnShape, GdnState,
    GdnWeights, Geometry, KvPage, MatrixData, Phase, Precision, SampleRow, Sampled, ScoreRow, WeightFormat,
};

use crate::driver::{Driver, OpTiming};
use crate::graph::Graph;
use crate::unit::{self, UnitBuild};
use crate::{Ceilings, CompileTarget, KernelStore, ceilings};
use buffer::Scratch;
use check::Check;
use host::Transfers;
use linear::{Input, Mode};
use memory::WorkBytes;
use step::StepMemory;

pub use buffer::{CudaBuffer, CudaVector};
pub use cache::CudaCache;
pub use host::CudaHostStore;
pub use matrix::CudaMatrix;
pub use memory::{
    CudaGauge, CudaMemory, TYPICAL_DRIVER_BYTES, buffer_bytes, host_staging_bytes, matrix_bytes,
    scratch_bytes,
};
pub use options::CudaOptions;

/// Row indices that always fit.
const LEAST_INDEX_BYTES: u64 = 4096;

/// One GPU.
#[derive(Debug)]
pub struct CudaDevice {
    driver: Arc<Driver>,
    memory: CudaMemory,
    store: KernelStore,
    kernels: FixedKernels,
    packer: matrix::Packer,
    /// The step's rows, spans and pages.
    step: StepMemory,
    /// Of the step.
    phase: Phase,
    /// Rounds that are replayed: by the rows they have room for, and whether spans may have several rows.
    recordings: BTreeMap<(usize, bool), Graph>,
    /// Copies to and from host memory.
    transfers: Transfers,
    /// What the recording that was begun will be kept as.
    begun: Option<(usize, bool)>,
    /// Normed inputs of the product that runs.
    normed: Scratch,
    /// Its inputs as the kernels for prompts want them.
    arranged: Scratch,
    split_sums: linear_rounds::SplitSums,
    /// Row indices of the op that runs.
    indices: Scratch,
    /// Parts of the attention that runs.
    partials: Scratch,
    /// Copies of logits, lists, results of the sampler.
    sampler: sample::SamplerMemory,
}

/// Calls of the driver that cost time, counted. Once a model is loaded only the last two grow: rounds are replayed, and
/// prompts are launched op by op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Activity {
    /// Memory taken, on the device or page-locked.
    pub allocations: u64,
    /// Modules loaded, compiled before where necessary.
    pub loads: u64,
    /// Reads into ordinary memory, each with a wait for everything before it.
    pub blocking_reads: u64,
    /// Kernels launched one by one or into a recording.
    pub launches: u64,
    /// Recordings replayed.
    pub replays: u64,
}

/// The kernels that need no geometry.
#[derive(Debug)]
struct FixedKernels {
    rows: rows::RowKernels,
    linear: linear::LinearKernels,
    sample: sample::SampleKernels,
}

impl CudaDevice {
    /// Opens a GPU and gets the kernels that every model needs.
    pub fn new(options: &CudaOptions) -> Result<Self, DeviceError> {
        if options.activations != Activations::Bf16 {
            let reason = format!("{} activations; this device has bf16", options.activations.name());
            return Err(DeviceError::shape("open", reason));
        }
        let free_before = memory::free_bytes(options.ordinal);
        let driver = Driver::new(options.ordinal)?;
        let target = CompileTarget { cuda_version: Driver::cuda_version(), sm: Some(driver.sm()) };
        let store = KernelStore::new(options.kernel_cache_directory.clone()).for_target(target);
        let fixed: Vec<UnitBuild> =
            unit::fixed_units().into_iter().filter(|build| build.is_for(driver.sm())).collect();
        store.prepare(&fixed, driver.sm());
        let module = |unit| load(&driver, &store, &UnitBuild::plain(unit));
        let card = linear::Card { sm: driver.sm(), sm_count: driver.sm_count() };
        let special = |unit| {
            let build = UnitBuild::plain(unit);
            build.is_for(card.sm).then(|| load(&driver, &store, &build)).transpose()
        };
        let products = linear::LinearModules {
            ring: module(unit::LINEAR)?,
            many: module(unit::LINEAR_MANY)?,
            rounds: special(unit::LINEAR_ROUNDS)?,
            prompt: special(unit::LINEAR_PROMPT)?,
        };
        let kernels = FixedKernels {
            rows: rows::RowKernels::new(&module(unit::ROWS)?)?,
            linear: linear::LinearKernels::new(&products, card)?,
            sample: sample::SampleKernels::new(&module(unit::SAMPLE)?)?,
        };
        let transfers = Transfers::new(&driver)?;
        let packer = matrix::Packer::new(&driver, module(unit::PACK)?.function("pack", 0)?);
        let memory = memory::settle(&driver, free_before, options.memory_budget_bytes)?;
        Ok(Self {
            step: StepMemory::new(),
            phase: Phase::Rows,
            memory,
            driver,
            store,
            kernels,
            packer,
            transfers,
            recordings: BTreeMap::new(),
            begun: None,
            arranged: Scratch::new("arranged inputs"),
            split_sums: linear_rounds::SplitSums::default(),
            normed: Scratch::new("normed activations"),
            indices: Scratch::new("row indices"),
            partials: Scratch::new("parts of attention"),
            sampler: sample::SamplerMemory::default(),
        })
    }

    /// What the driver was asked to do since the device was opened.
    pub fn activity(&self) -> Activity {
        let counters = self.driver.counters();
        Activity {
            allocations: counters.allocations.get(),
            loads: counters.loads.get(),
            blocking_reads: counters.blocking_reads.get(),
            launches: counters.launches.get(),
            replays: counters.replays.get(),
        }
    }

    /// Starts to measure the time of every op's kernels; each then waits for its end, so that steps are slower.
    pub fn start_measuring(&mut self) {
        self.driver.measure(true);
    }

    /// Stops measuring and returns what each op took.
    pub fn stop_measuring(&mut self) -> BTreeMap<&'static str, OpTiming> {
        self.driver.measure(false)
    }

    /// Measures what this GPU reaches with nothing else to do; best before a model takes its memory.
    pub fn measure_ceilings(&self) -> Result<Ceilings, DeviceError> {
        ceilings::measure(&self.driver, &self.store)
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

/// Whether a sequence has more than one row.
fn has_long_spans(batch: &Batch) -> bool {
    batch.spans.len() < batch.rows()
}

/// The module of a unit, from wherever the store has it.
fn load(
    driver: &Arc<Driver>,
    store: &KernelStore,
    build: &UnitBuild,
) -> Result<Arc<crate::driver::Module>, DeviceError> {
    let loaded = store.load(build, driver.sm(), |code| driver.load(code));
    loaded.map(|(module, _)| module).map_err(|error| driver.failed("kernels", error))
}

impl Device for CudaDevice {
    type Buffer = CudaBuffer;
    type Matrix = CudaMatrix;
    type Vector = CudaVector;
    type Cache = CudaCache;
    type HostStore = CudaHostStore;

    fn facts(&self) -> DeviceFacts {
        DeviceFacts {
            name: format!("{} (sm_{})", self.driver.name(), self.driver.sm()),
            memory_bytes: self.memory.own_bytes(),
            activations: Activations::Bf16,
        }
    }

    fn empty_matrix(
        &mut self,
        format: WeightFormat,
        rows: usize,
        cols: usize,
    ) -> Result<CudaMatrix, DeviceError> {
        CudaMatrix::empty(&self.driver, format, rows, cols)
    }

    fn fill_rows(
        &mut self,
        matrix: &mut CudaMatrix,
        first_row: usize,
        block: &MatrixData<'_>,
    ) -> Result<(), DeviceError> {
        matrix.fill(&mut self.packer, first_row, block)
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
        let split_sums = self.kernels.linear.rounds.as_ref().map_or(0, |_| linear_rounds::SplitSums::BYTES);
        let arranged = self.arranged_bytes(geometry, max_rows.max(max_logit_rows));
        WorkBytes::of(geometry, max_rows, max_logit_rows).sum() + arranged + split_sums
    }

    fn reserve(
        &mut self,
        geometry: &Geometry,
        max_rows: usize,
        max_logit_rows: usize,
    ) -> Result<(), DeviceError> {
        self.packer.finish()?;
        let bytes = WorkBytes::of(geometry, max_rows, max_logit_rows);
        self.normed.at_least(&self.driver, bytes.normed)?;
        if self.kernels.linear.rounds.is_some() {
            self.split_sums.addresses(&self.driver)?;
        }
        let arranged_bytes = self.arranged_bytes(geometry, max_rows.max(max_logit_rows));
        if arranged_bytes > 0 {
            self.arranged.at_least(&self.driver, arranged_bytes)?;
        }
        self.step.reserve(&self.driver, max_rows.min(max_logit_rows))?;
        self.indices.at_least(&self.driver, bytes.indices)?;
        self.partials.at_least(&self.driver, bytes.partials)?;
        self.sampler.reserve(&self.driver, bytes.sampled_vocab)
    }

    fn buffer(&mut self, rows: usize, cols: usize, precision: Precision) -> Result<CudaBuffer, DeviceError> {
        CudaBuffer::new(&self.driver, rows, cols, precision)
    }

    fn buffer_bytes(&self, rows: usize, cols: usize, precision: Precision) -> u64 {
        CudaBuffer::bytes(rows, cols, precision)
    }

    fn cache(&mut self, spec: &CacheSpec) -> Result<CudaCache, DeviceError> {
        let builds = unit::shape_units(&spec.attention, &[spec.kv_type], &spec.gdn, &[spec.state_type]);
        self.store.prepare(&builds.map_err(|reason| DeviceError::shape("cache", reason))?, self.driver.sm());
        CudaCache::new(&self.driver, &self.store, self.transfers.lanes(), spec)
    }

    fn begin_step(&mut self, batch: &Batch) -> Result<(), DeviceError> {
        batch.check().map_err(|reason| DeviceError::shape("begin_step", reason))?;
        self.phase = batch.phase;
        self.transfers.before_step("begin_step", batch)?;
        self.step.upload(&self.driver, batch)
    }

    fn begin_recording(&mut self, batch: &Batch) -> Result<bool, DeviceError> {
        batch.check().map_err(|reason| DeviceError::shape("begin_recording", reason))?;
        if batch.phase != Phase::Rows || !self.step.begin_recording(batch) {
            return Ok(false);
        }
        self.phase = batch.phase;
        self.begun = Some((batch.rows(), has_long_spans(batch)));
        self.driver.begin_capture()?;
        Ok(true)
    }

    fn end_recording(&mut self) -> Result<(), DeviceError> {
        self.step.end_recording();
        if let Some(key) = self.begun.take() {
            let graph = self.driver.end_capture()?;
            self.recordings.insert(key, graph);
        }
        Ok(())
    }

    fn replay(&mut self, batch: &Batch, logit_rows: &[usize]) -> Result<bool, DeviceError> {
        // Kernels of a recording are not timed one by one.
        if batch.phase != Phase::Rows || self.driver.is_measuring() {
            return Ok(false);
        }
        batch.check().map_err(|reason| DeviceError::shape("replay", reason))?;
        let least = batch.rows().max(logit_rows.len());
        let long_spans = has_long_spans(batch);
        let fits = |((rows, long), _): &(&(usize, bool), &Graph)| *rows >= least && *long == long_spans;
        let Some((_, graph)) = self.recordings.iter().find(fits) else { return Ok(false) };
        if !self.step.upload_recorded(batch, logit_rows)? {
            return Ok(false);
        }
        self.transfers.before_step("replay", batch)?;
        graph.launch()?;
        self.driver.counters().replays.add();
        Ok(true)
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
        for part in parts {
            check.that(part.cols() == norm.len, || {
                format!("a part of {} inputs after a norm of {}", part.cols(), norm.len)
            })?;
        }
        let x = self.normed(check, rows, x, norm, eps)?;
        self.multiply(check, rows, x, parts, out, Mode::Round)
    }

    fn linear(
        &mut self,
        rows: usize,
        input: &CudaBuffer,
        matrix: &CudaMatrix,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("linear");
        let x = input.input(check, rows, matrix.cols())?;
        self.multiply(check, rows, x, &[matrix], out, Mode::Round)
    }

    fn linear_add(
        &mut self,
        rows: usize,
        input: &CudaBuffer,
        matrix: &CudaMatrix,
        x: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("linear_add");
        let input = input.input(check, rows, matrix.cols())?;
        self.multiply(check, rows, input, &[matrix], x, Mode::Add)
    }

    fn norm_swiglu(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        norm: &CudaVector,
        eps: f32,
        (parts, width): ([&CudaMatrix; 2], usize),
        gate_up: &mut CudaBuffer,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        if self.run_norm_swiglu(rows, x, (norm, eps), parts, out)? {
            return Ok(());
        }
        self.norm_linears(rows, x, norm, eps, &parts, gate_up)?;
        self.swiglu(rows, width, gate_up, out)
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

    fn gdn_layer(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        weights: &GdnWeights<Self>,
        projected: &CudaBuffer,
        cache: &mut CudaCache,
        (mixed, scanned): (&mut CudaBuffer, &mut CudaBuffer),
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        if batch.phase == Phase::Rows {
            return self.run_gdn_round(batch, gdn_layer, shape, weights, projected, cache, out);
        }
        self.gdn_prepare(batch, gdn_layer, shape, weights, projected, cache, mixed)?;
        self.gdn_scan(batch, gdn_layer, shape, mixed, cache, scanned)?;
        self.gated_norm(batch.rows(), shape, scanned, projected, &weights.norm, out)
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
        check.gathered("hidden", rows, hidden)?;
        // A recording reads the rows that its replay is given; recorded are all rows in their order.
        let indices =
            if self.step.recording() { self.step.logit_rows() } else { self.upload_indices(check.0, rows)? };
        let x = Input { indices, ..hidden.input(check, 0, matrix.cols())? };
        self.multiply(check, rows.len(), x, &[matrix], logits, Mode::Raw)
    }

    fn sample(&mut self, logits: &CudaBuffer, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, DeviceError> {
        self.run_sample(logits, rows)
    }

    fn score(&mut self, logits: &CudaBuffer, rows: &[ScoreRow]) -> Result<Vec<Sampled>, DeviceError> {
        self.run_score(logits, rows)
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.driver.synchronize("wait")
    }

    fn clear_slot(&mut self, cache: &mut CudaCache, slot: usize) -> Result<(), DeviceError> {
        self.transfers.before("clear_slot", &[], &[], &[slot])?;
        cache.clear_slot(slot)
    }

    fn copy_slot(&mut self, cache: &mut CudaCache, from: usize, to: usize) -> Result<(), DeviceError> {
        self.transfers.before("copy_slot", &[], &[], &[from, to])?;
        cache.copy_slot(from, to)
    }

    fn copy_page(&mut self, cache: &mut CudaCache, from: usize, to: usize) -> Result<(), DeviceError> {
        self.transfers.before("copy_page", &[from], &[to], &[])?;
        cache.copy_page(from, to)
    }

    fn read_state(
        &mut self,
        cache: &CudaCache,
        gdn_layer: usize,
        slot: usize,
    ) -> Result<GdnState, DeviceError> {
        self.transfers.before("read_state", &[], &[], &[slot])?;
        cache.read_state(gdn_layer, slot)
    }

    fn write_state(
        &mut self,
        cache: &mut CudaCache,
        gdn_layer: usize,
        slot: usize,
        state: &GdnState,
    ) -> Result<(), DeviceError> {
        self.transfers.before("write_state", &[], &[], &[slot])?;
        cache.write_state(gdn_layer, slot, state)
    }

    fn read_page(&mut self, cache: &CudaCache, kv_layer: usize, page: usize) -> Result<KvPage, DeviceError> {
        self.transfers.before("read_page", &[page], &[], &[])?;
        cache.read_page(kv_layer, page)
    }

    fn write_page(
        &mut self,
        cache: &mut CudaCache,
        kv_layer: usize,
        page: usize,
        content: &KvPage,
    ) -> Result<(), DeviceError> {
        self.transfers.before("write_page", &[], &[page], &[])?;
        cache.write_page(kv_layer, page, content)
    }

    fn host_store(&mut self, spec: &CacheSpec, granules: usize) -> Result<CudaHostStore, DeviceError> {
        self.make_host_store(spec, granules)
    }

    fn host_staging_bytes(&self, spec: &CacheSpec) -> u64 {
        host_staging_bytes(spec)
    }

    fn store_page(
        &mut self,
        cache: &CudaCache,
        page: usize,
        store: &mut CudaHostStore,
        granule: u32,
    ) -> Result<(), DeviceError> {
        self.run_store_page(cache, page, store, granule)
    }

    fn load_page(
        &mut self,
        cache: &mut CudaCache,
        page: usize,
        store: &CudaHostStore,
        granule: u32,
    ) -> Result<(), DeviceError> {
        self.run_load_page(cache, page, store, granule)
    }

    fn store_state(
        &mut self,
        cache: &CudaCache,
        slot: usize,
        position: usize,
        store: &mut CudaHostStore,
        granules: &[u32],
    ) -> Result<(), DeviceError> {
        self.run_store_state(cache, slot, position, store, granules)
    }

    fn load_state(
        &mut self,
        cache: &mut CudaCache,
        slot: usize,
        position: usize,
        store: &CudaHostStore,
        granules: &[u32],
    ) -> Result<(), DeviceError> {
        self.run_load_state(cache, slot, position, store, granules)
    }

    fn stored(&mut self, _store: &CudaHostStore) -> Result<bool, DeviceError> {
        self.is_stored()
    }

    fn read_granule<'a>(&mut self, store: &'a CudaHostStore, granule: u32) -> Result<&'a [u8], DeviceError> {
        self.run_read_granule(store, granule)
    }

    fn write_granule(
        &mut self,
        store: &mut CudaHostStore,
        granule: u32,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        self.run_write_granule(store, granule, bytes)
    }

    fn read(&mut self, buffer: &CudaBuffer, rows: usize) -> Result<Vec<f32>, DeviceError> {
        buffer.read(rows)
    }

    fn write(&mut self, buffer: &mut CudaBuffer, values: &[f32]) -> Result<(), DeviceError> {
        buffer.write(values)
    }

    fn gather(&mut self, rows: &[usize], from: &CudaBuffer, to: &mut CudaBuffer) -> Result<(), DeviceError> {
        self.run_gather(rows, from, to)
    }
}
