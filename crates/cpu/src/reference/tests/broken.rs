//! A device with one deliberate mistake, to prove that the suite sees it.

use qwill_device::{
    Activations, AttentionShape, Batch, CacheSpec, Device, DeviceError, DeviceFacts, GdnShape, GdnState,
    GdnWeights, Geometry, KvPage, MatrixData, Phase, Precision, RING_TOKENS, SampleRow, Sampled, ScoreRow,
    WeightFormat,
};

use crate::reference::Matrix;
use crate::{Buffer, Cache, HostStore, ReferenceDevice};

/// One mistake each, of the kinds that real kernels make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The last column of a product is left out.
    LastColumn,
    /// One row too many is written.
    ExtraRow,
    /// The bits of a sum depend on how many rows there are.
    CompanyInProduct,
    /// A residual is overwritten instead of added to.
    NoResidual,
    /// Parts after the first start one column late.
    ShiftedPart,
    /// A token of the second row is taken for all.
    StuckToken,
    /// `RoPE` positions count from the span's start.
    RelativePosition,
    /// Keys go to the wrong page when the page table is not the identity.
    IgnoredPageTable,
    /// The last position is not attended to.
    ExclusiveMask,
    /// The convolution sees what is left of another sequence before position 0.
    DirtyConvolution,
    /// A chunk's own decay is left out of the carried state.
    UnscaledCarry,
    /// A full ring is not folded but dropped.
    DroppedFold,
    /// Rounds append after the rejected rows of the last one.
    AppendedAfterRejected,
    /// The state is rounded at the end of each prompt slice.
    RoundedSlices,
    /// Ties go to the largest id.
    LastOfEqual,
    /// Reported log-probabilities include the padding ids.
    PaddedDistribution,
    /// A copy of a slot forgets the ring.
    HalfCopiedSlot,
    /// A loaded state's convolution inputs are one position late.
    LateInputs,
    /// Gathered rows come in batch order.
    SortedGather,
    /// The z gate is not applied.
    NoGate,
    /// Silu on the wrong half.
    SwappedHalves,
    /// Hidden and embedding change places.
    SwappedCombine,
    /// No mistake: keys are about an ulp off before they are stored, as another order of a sum makes them.
    KeysAnUlpOff,
}

impl Fault {
    /// Every fault with a case that must fail.
    pub(super) const ALL: [(Self, &'static str); 22] = [
        (Self::LastColumn, "linear"),
        (Self::ExtraRow, "rms_norm"),
        (Self::CompanyInProduct, "linear"),
        (Self::NoResidual, "linear_add"),
        (Self::ShiftedPart, "norm_linears"),
        (Self::StuckToken, "embed"),
        (Self::RelativePosition, "attention_prepare"),
        (Self::IgnoredPageTable, "attention_prepare"),
        (Self::ExclusiveMask, "attention"),
        (Self::DirtyConvolution, "gdn_prepare"),
        (Self::UnscaledCarry, "gdn_scan_prefill"),
        (Self::DroppedFold, "gdn_scan_rows"),
        (Self::AppendedAfterRejected, "rejected_rows"),
        (Self::RoundedSlices, "prefill_slices"),
        (Self::LastOfEqual, "sample"),
        (Self::PaddedDistribution, "score"),
        (Self::HalfCopiedSlot, "caches"),
        (Self::LateInputs, "host_store"),
        (Self::SortedGather, "gather"),
        (Self::NoGate, "gated_norm"),
        (Self::SwappedHalves, "swiglu"),
        (Self::SwappedCombine, "mtp_combine"),
    ];
}

/// The reference device with a [`Fault`].
pub(super) struct BrokenDevice {
    inner: ReferenceDevice,
    fault: Fault,
    /// Entries in the ring after the last round, rejected ones included.
    appended: usize,
}

impl BrokenDevice {
    pub(super) fn new(activations: Activations, fault: Fault) -> Self {
        Self { inner: ReferenceDevice::new(activations), fault, appended: 0 }
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == fault
    }
}

type Outcome = Result<(), DeviceError>;

impl Device for BrokenDevice {
    type Buffer = Buffer;
    type Matrix = Matrix;
    type Vector = Vec<f32>;
    type Cache = Cache;
    type HostStore = HostStore;

    fn facts(&self) -> DeviceFacts {
        self.inner.facts()
    }
    fn empty_matrix(
        &mut self,
        format: WeightFormat,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix, DeviceError> {
        self.inner.empty_matrix(format, rows, cols)
    }
    fn fill_rows(&mut self, matrix: &mut Matrix, first_row: usize, block: &MatrixData<'_>) -> Outcome {
        self.inner.fill_rows(matrix, first_row, block)
    }
    fn matrix_bytes(&self, format: WeightFormat, rows: usize, cols: usize) -> u64 {
        self.inner.matrix_bytes(format, rows, cols)
    }
    fn vector(&mut self, values: &[f32]) -> Result<Vec<f32>, DeviceError> {
        self.inner.vector(values)
    }
    fn conv_taps(&mut self, values: &[f32], taps: usize) -> Result<Vec<f32>, DeviceError> {
        self.inner.conv_taps(values, taps)
    }
    fn scratch_bytes(&self, geometry: &Geometry, max_rows: usize, max_logit_rows: usize) -> u64 {
        self.inner.scratch_bytes(geometry, max_rows, max_logit_rows)
    }
    fn reserve(&mut self, geometry: &Geometry, max_rows: usize, max_logit_rows: usize) -> Outcome {
        self.inner.reserve(geometry, max_rows, max_logit_rows)
    }
    fn buffer(&mut self, rows: usize, cols: usize, precision: Precision) -> Result<Buffer, DeviceError> {
        self.inner.buffer(rows, cols, precision)
    }
    fn buffer_bytes(&self, rows: usize, cols: usize, precision: Precision) -> u64 {
        self.inner.buffer_bytes(rows, cols, precision)
    }
    fn cache(&mut self, spec: &CacheSpec) -> Result<Cache, DeviceError> {
        self.inner.cache(spec)
    }
    fn begin_step(&mut self, batch: &Batch) -> Outcome {
        self.inner.begin_step(batch)
    }

    fn embed(&mut self, table: &Matrix, batch: &Batch, out: &mut Buffer) -> Outcome {
        let mut batch = batch.clone();
        if self.has(Fault::StuckToken) && batch.rows() > 1 {
            let token = batch.tokens[1];
            batch.tokens.fill(token);
        }
        self.inner.embed(table, &batch, out)
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &Buffer,
        weight: &Vec<f32>,
        eps: f32,
        out: &mut Buffer,
    ) -> Outcome {
        self.inner.rms_norm(rows, x, weight, eps, out)?;
        if self.has(Fault::ExtraRow) {
            out.row_mut(rows).fill(0.0);
        }
        Ok(())
    }

    fn norm_linears(
        &mut self,
        rows: usize,
        x: &Buffer,
        norm: &Vec<f32>,
        eps: f32,
        parts: &[&Matrix],
        out: &mut Buffer,
    ) -> Outcome {
        self.inner.norm_linears(rows, x, norm, eps, parts, out)?;
        if self.has(Fault::ShiftedPart) && parts.len() > 1 {
            for row in 0..rows {
                let first = parts[0].rows;
                out.row_mut(row)[first..].rotate_right(1);
            }
        }
        Ok(())
    }

    fn linear(&mut self, rows: usize, input: &Buffer, matrix: &Matrix, out: &mut Buffer) -> Outcome {
        let last = matrix.rows - 1;
        let poison = out.row(0)[last];
        self.inner.linear(rows, input, matrix, out)?;
        for row in 0..rows {
            let value = &mut out.row_mut(row)[last];
            if self.has(Fault::LastColumn) {
                *value = poison;
            }
            if self.has(Fault::CompanyInProduct) && rows > 16 {
                *value = f32::from_bits(value.to_bits() + 1);
            }
        }
        Ok(())
    }

    fn linear_add(&mut self, rows: usize, input: &Buffer, matrix: &Matrix, x: &mut Buffer) -> Outcome {
        if self.has(Fault::NoResidual) {
            return self.inner.linear(rows, input, matrix, x);
        }
        self.inner.linear_add(rows, input, matrix, x)
    }

    fn swiglu(&mut self, rows: usize, width: usize, gate_up: &Buffer, out: &mut Buffer) -> Outcome {
        let mut gate_up = gate_up.clone();
        if self.has(Fault::SwappedHalves) {
            for row in 0..rows {
                gate_up.row_mut(row).rotate_left(width);
            }
        }
        self.inner.swiglu(rows, width, &gate_up, out)
    }

    fn attention_prepare(
        &mut self,
        batch: &Batch,
        kv_layer: usize,
        shape: &AttentionShape,
        projected: &Buffer,
        q_norm: &Vec<f32>,
        k_norm: &Vec<f32>,
        cache: &mut Cache,
        query: &mut Buffer,
    ) -> Outcome {
        let mut batch = batch.clone();
        if self.has(Fault::IgnoredPageTable) {
            batch.page_table.sort_unstable();
        }
        if self.has(Fault::RelativePosition) {
            for span in &mut batch.spans {
                span.first_page += span.position / 64;
                span.position %= 64;
            }
        }
        let mut k_norm = k_norm.clone();
        if self.has(Fault::KeysAnUlpOff) {
            for weight in &mut k_norm {
                *weight *= 1.0 + f32::EPSILON;
            }
        }
        self.inner.attention_prepare(&batch, kv_layer, shape, projected, q_norm, &k_norm, cache, query)
    }

    fn attention(
        &mut self,
        batch: &Batch,
        kv_layer: usize,
        shape: &AttentionShape,
        query: &Buffer,
        projected: &Buffer,
        cache: &Cache,
        out: &mut Buffer,
    ) -> Outcome {
        let mut batch = batch.clone();
        if self.has(Fault::ExclusiveMask) {
            for span in batch.spans.iter_mut().filter(|span| span.position > 0) {
                span.position -= 1;
            }
        }
        self.inner.attention(&batch, kv_layer, shape, query, projected, cache, out)
    }

    fn gdn_prepare(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        weights: &GdnWeights<Self>,
        projected: &Buffer,
        cache: &mut Cache,
        mixed: &mut Buffer,
    ) -> Outcome {
        let mut batch = batch.clone();
        if self.has(Fault::DirtyConvolution) {
            for span in batch.spans.iter_mut().filter(|span| span.position == 0) {
                // The same place in the ring, one turn later.
                span.position += 20;
                span.first_page = 0;
            }
            batch.page_table.resize(4096, 0);
        }
        let weights = GdnWeights::<ReferenceDevice> {
            conv: weights.conv.clone(),
            decay_rate: weights.decay_rate.clone(),
            dt_bias: weights.dt_bias.clone(),
            norm: weights.norm.clone(),
        };
        self.inner.gdn_prepare(&batch, gdn_layer, shape, &weights, projected, cache, mixed)
    }

    fn gdn_scan(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        mixed: &Buffer,
        cache: &mut Cache,
        out: &mut Buffer,
    ) -> Outcome {
        let mut batch = batch.clone();
        let mut before = Vec::new();
        for span in &mut batch.spans {
            before.push(cache.read_state(gdn_layer, span.slot)?.base);
            if self.has(Fault::DroppedFold) && span.ring_len == RING_TOKENS {
                span.ring_len = 0;
            }
            let grown = self.appended + span.rows <= RING_TOKENS && span.ring_len > 0;
            if self.has(Fault::AppendedAfterRejected) && grown {
                span.ring_len = self.appended;
            }
            self.appended =
                if batch.phase == Phase::Rows { span.ring_len % RING_TOKENS + span.rows } else { 0 };
        }
        self.inner.gdn_scan(&batch, gdn_layer, shape, mixed, cache, out)?;
        for (span, before) in batch.spans.iter().zip(before) {
            let mut state = cache.read_state(gdn_layer, span.slot)?;
            let prompt = batch.phase == Phase::Prefill;
            if self.has(Fault::UnscaledCarry) && prompt {
                for (after, before) in state.base.iter_mut().zip(before) {
                    *after += 1e-3 * before;
                }
            }
            if self.has(Fault::RoundedSlices) && prompt {
                for value in &mut state.base {
                    *value = Activations::Bf16.round(*value);
                }
            }
            cache.write_state(gdn_layer, span.slot, &state)?;
        }
        Ok(())
    }

    fn gated_norm(
        &mut self,
        rows: usize,
        shape: &GdnShape,
        scanned: &Buffer,
        projected: &Buffer,
        norm: &Vec<f32>,
        out: &mut Buffer,
    ) -> Outcome {
        let mut projected = projected.clone();
        if self.has(Fault::NoGate) {
            for row in 0..rows {
                projected.row_mut(row)[shape.z_column()..][..shape.value_columns()].fill(1.278_465);
            }
        }
        self.inner.gated_norm(rows, shape, scanned, &projected, norm, out)
    }

    fn mtp_combine(
        &mut self,
        batch: &Batch,
        table: &Matrix,
        hidden: &Buffer,
        embed_norm: &Vec<f32>,
        hidden_norm: &Vec<f32>,
        eps: f32,
        out: &mut Buffer,
    ) -> Outcome {
        self.inner.mtp_combine(batch, table, hidden, embed_norm, hidden_norm, eps, out)?;
        if self.has(Fault::SwappedCombine) {
            for row in 0..batch.rows() {
                out.row_mut(row).rotate_left(embed_norm.len());
            }
        }
        Ok(())
    }

    fn head(&mut self, rows: &[usize], hidden: &Buffer, matrix: &Matrix, logits: &mut Buffer) -> Outcome {
        self.inner.head(rows, hidden, matrix, logits)
    }

    fn sample(&mut self, logits: &Buffer, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, DeviceError> {
        let mut results = self.inner.sample(logits, rows)?;
        if self.has(Fault::LastOfEqual) {
            for (result, row) in results.iter_mut().zip(rows).filter(|(result, _)| result.is_sound()) {
                let values = &logits.row(row.logits_row)[..row.vocab_limit];
                let drawn = values[result.token as usize];
                let last = values.iter().rposition(|value| *value == drawn);
                result.token = last.map_or(result.token, |at| at as u32);
            }
        }
        Ok(results)
    }

    fn score(&mut self, logits: &Buffer, rows: &[ScoreRow]) -> Result<Vec<Sampled>, DeviceError> {
        let mut rows = rows.to_vec();
        if self.has(Fault::PaddedDistribution) {
            for row in &mut rows {
                row.vocab_limit = usize::MAX;
            }
        }
        self.inner.score(logits, &rows)
    }

    fn clear_slot(&mut self, cache: &mut Cache, slot: usize) -> Outcome {
        self.inner.clear_slot(cache, slot)
    }

    fn copy_slot(&mut self, cache: &mut Cache, from: usize, to: usize) -> Outcome {
        let before = self.inner.read_state(cache, 0, to)?;
        self.inner.copy_slot(cache, from, to)?;
        if self.has(Fault::HalfCopiedSlot) {
            let after = self.inner.read_state(cache, 0, to)?;
            self.inner.write_state(cache, 0, to, &GdnState { ring: before.ring, ..after })?;
        }
        Ok(())
    }

    fn copy_page(&mut self, cache: &mut Cache, from: usize, to: usize) -> Outcome {
        self.inner.copy_page(cache, from, to)
    }
    fn read_state(&mut self, cache: &Cache, gdn_layer: usize, slot: usize) -> Result<GdnState, DeviceError> {
        self.inner.read_state(cache, gdn_layer, slot)
    }
    fn write_state(&mut self, cache: &mut Cache, gdn_layer: usize, slot: usize, state: &GdnState) -> Outcome {
        self.inner.write_state(cache, gdn_layer, slot, state)
    }
    fn read_page(&mut self, cache: &Cache, kv_layer: usize, page: usize) -> Result<KvPage, DeviceError> {
        self.inner.read_page(cache, kv_layer, page)
    }
    fn write_page(&mut self, cache: &mut Cache, kv_layer: usize, page: usize, content: &KvPage) -> Outcome {
        self.inner.write_page(cache, kv_layer, page, content)
    }
    fn host_store(&mut self, spec: &CacheSpec, granules: usize) -> Result<HostStore, DeviceError> {
        self.inner.host_store(spec, granules)
    }
    fn host_staging_bytes(&self, spec: &CacheSpec) -> u64 {
        self.inner.host_staging_bytes(spec)
    }
    fn store_page(&mut self, cache: &Cache, page: usize, store: &mut HostStore, granule: u32) -> Outcome {
        self.inner.store_page(cache, page, store, granule)
    }
    fn load_page(&mut self, cache: &mut Cache, page: usize, store: &HostStore, granule: u32) -> Outcome {
        self.inner.load_page(cache, page, store, granule)
    }
    fn store_state(
        &mut self,
        cache: &Cache,
        slot: usize,
        position: usize,
        store: &mut HostStore,
        granules: &[u32],
    ) -> Outcome {
        self.inner.store_state(cache, slot, position, store, granules)
    }
    fn load_state(
        &mut self,
        cache: &mut Cache,
        slot: usize,
        position: usize,
        store: &HostStore,
        granules: &[u32],
    ) -> Outcome {
        let position = position + usize::from(self.has(Fault::LateInputs));
        self.inner.load_state(cache, slot, position, store, granules)
    }
    fn stored(&mut self, store: &HostStore) -> Result<bool, DeviceError> {
        self.inner.stored(store)
    }
    fn read_granule<'a>(&mut self, store: &'a HostStore, granule: u32) -> Result<&'a [u8], DeviceError> {
        self.inner.read_granule(store, granule)
    }
    fn write_granule(&mut self, store: &mut HostStore, granule: u32, bytes: &[u8]) -> Outcome {
        self.inner.write_granule(store, granule, bytes)
    }
    fn read(&mut self, buffer: &Buffer, rows: usize) -> Result<Vec<f32>, DeviceError> {
        self.inner.read(buffer, rows)
    }
    fn write(&mut self, buffer: &mut Buffer, values: &[f32]) -> Outcome {
        self.inner.write(buffer, values)
    }
    fn gather(&mut self, rows: &[usize], from: &Buffer, to: &mut Buffer) -> Outcome {
        let mut rows = rows.to_vec();
        if self.has(Fault::SortedGather) {
            rows.sort_unstable();
        }
        self.inner.gather(&rows, from, to)
    }
}
