//! The ops of [`CpuDevice`]: check, share out, run a kernel per piece.

use qwill_device::{
    Activations, AttentionShape, Batch, CacheSpec, Device, DeviceError, DeviceFacts, GdnShape, GdnState,
    GdnWeights, Geometry, KvPage, MatrixData, Precision, SampleRow, Sampled, ScoreRow, WeightFormat,
};

use super::attention::HeadNorms;
use super::blocks::{Block, Blocks, steps};
use super::check::Check;
use super::elementwise::round_row;
use super::linear::{Input, Store, multiply};
use super::pack::packed_bytes;
use super::scratch::Sizes;
use super::{CpuDevice, Matrix, Vector, attention, gdn_prepare, gdn_scan, rows_per_piece, sample, simd};
use crate::{Buffer, Cache, HostStore};

impl CpuDevice {
    /// Calls `each(row, block of that one row)` on all threads; `work` is a row's cost in elements.
    fn each_row(
        &mut self,
        rows: usize,
        work: usize,
        out: &mut Buffer,
        each: impl Fn(usize, usize, &mut [f32]) + Sync,
    ) {
        let per_piece = rows_per_piece(rows, work, self.pool.threads());
        let bounds = steps(rows, per_piece);
        let (cols, pieces) = (out.cols, bounds.len() - 1);
        let blocks = Blocks::new(&mut out.data, cols, bounds, vec![0, cols]);
        self.pool.run(pieces, &|worker, piece| {
            let mut block: Block<'_> = blocks.take(piece, 0);
            for row in 0..block.rows() {
                each(worker, piece * per_piece + row, block.row_mut(row));
            }
        });
    }

    /// `parts` times `rows` rows, quantised first where the numerics ask for it.
    fn multiply(
        &mut self,
        (values, stride, rows): (&[f32], usize, usize),
        parts: &[&Matrix],
        store: Store,
        out: &mut Buffer,
    ) {
        let Some(cols) = parts.first().map(|part| part.cols) else { return };
        if rows == 0 {
            return;
        }
        let integer =
            self.options.activations == Activations::Int8 && parts.iter().any(|part| part.is_quantised());
        if integer {
            self.scratch.quantised.quantise((self.level, &mut self.pool), values, stride, cols, rows);
        }
        let quantised = integer.then_some(&self.scratch.quantised);
        let input = Input { values, stride, rows, quantised };
        multiply((self.level, &mut self.pool, &self.scratch.workers), input, parts, store, out);
    }
}

impl Device for CpuDevice {
    type Buffer = Buffer;
    type Matrix = Matrix;
    type Vector = Vector;
    type Cache = Cache;
    type HostStore = HostStore;

    fn facts(&self) -> DeviceFacts {
        let threads = self.pool.threads();
        let plural = if threads == 1 { "" } else { "s" };
        DeviceFacts {
            name: format!("cpu ({}, {threads} thread{plural})", self.isa),
            memory_bytes: self.memory_bytes,
            activations: self.options.activations,
        }
    }

    fn empty_matrix(
        &mut self,
        format: WeightFormat,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix, DeviceError> {
        Ok(Matrix::empty(format, rows, cols))
    }

    fn fill_rows(
        &mut self,
        matrix: &mut Matrix,
        first_row: usize,
        block: &MatrixData<'_>,
    ) -> Result<(), DeviceError> {
        matrix.fill(first_row, block, &mut self.pool)
    }

    fn matrix_bytes(&self, format: WeightFormat, rows: usize, cols: usize) -> u64 {
        packed_bytes(format, rows, cols)
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vector, DeviceError> {
        Ok(Vector::new(values))
    }

    fn conv_taps(&mut self, values: &[f32], taps: usize) -> Result<Vector, DeviceError> {
        Check("conv_taps").that(taps > 0 && values.len().is_multiple_of(taps), || {
            format!("{} values for channels of {taps} taps", values.len())
        })?;
        Ok(Vector::of_taps(values, taps))
    }

    fn buffer(&mut self, rows: usize, cols: usize, _precision: Precision) -> Result<Buffer, DeviceError> {
        Ok(Buffer::new(rows, cols))
    }

    fn buffer_bytes(&self, rows: usize, cols: usize, _precision: Precision) -> u64 {
        (rows * cols * 4) as u64
    }

    fn cache(&mut self, spec: &CacheSpec) -> Result<Cache, DeviceError> {
        Ok(Cache::new(spec))
    }

    fn scratch_bytes(&self, geometry: &Geometry, max_rows: usize, max_logit_rows: usize) -> u64 {
        Sizes::new(self.options, geometry, max_rows, max_logit_rows).bytes()
    }

    fn reserve(
        &mut self,
        geometry: &Geometry,
        max_rows: usize,
        max_logit_rows: usize,
    ) -> Result<(), DeviceError> {
        self.scratch.reserve(&Sizes::new(self.options, geometry, max_rows, max_logit_rows));
        Ok(())
    }

    fn begin_step(&mut self, batch: &Batch) -> Result<(), DeviceError> {
        batch.check().map_err(|reason| DeviceError::shape("begin_step", reason))
    }

    fn embed(&mut self, table: &Matrix, batch: &Batch, out: &mut Buffer) -> Result<(), DeviceError> {
        let check = Check("embed");
        check.tokens(table, batch)?;
        check.buffer("out", out, batch.rows(), table.cols)?;
        let activations = self.options.activations;
        self.each_row(batch.rows(), 4 * table.cols, out, |_, row, out| {
            table.widen_row(batch.tokens[row] as usize, out);
            round_row(activations, &mut out[..table.cols]);
        });
        Ok(())
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &Buffer,
        weight: &Vector,
        eps: f32,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let check = Check("rms_norm");
        check.buffer("x", x, rows, weight.values.len())?;
        check.buffer("out", out, rows, weight.values.len())?;
        let (level, activations) = (self.level, self.options.activations);
        self.each_row(rows, weight.values.len(), out, |_, row, out| {
            simd::rms_norm_row(level, activations, x.row(row), &weight.values, eps, out);
        });
        Ok(())
    }

    fn norm_linears(
        &mut self,
        rows: usize,
        x: &Buffer,
        norm: &Vector,
        eps: f32,
        parts: &[&Matrix],
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let check = Check("norm_linears");
        let width = norm.values.len();
        check.buffer("x", x, rows, width)?;
        check.buffer("out", out, rows, parts.iter().map(|part| part.rows).sum())?;
        for part in parts {
            check.that(part.cols == width, || {
                format!("a part of {} inputs after a norm of {width}", part.cols)
            })?;
        }
        let mut normed = self.scratch.take_inputs(rows, width);
        let done = self.rms_norm(rows, x, norm, eps, &mut normed);
        self.multiply((&normed.data, width, rows), parts, Store::Set(self.options.activations), out);
        self.scratch.inputs = normed;
        done
    }

    fn linear(
        &mut self,
        rows: usize,
        input: &Buffer,
        matrix: &Matrix,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let check = Check("linear");
        check.buffer("input", input, rows, matrix.cols)?;
        check.buffer("out", out, rows, matrix.rows)?;
        let store = Store::Set(self.options.activations);
        self.multiply((&input.data, input.cols, rows), &[matrix], store, out);
        Ok(())
    }

    fn linear_add(
        &mut self,
        rows: usize,
        input: &Buffer,
        matrix: &Matrix,
        x: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let check = Check("linear_add");
        check.buffer("input", input, rows, matrix.cols)?;
        check.buffer("x", x, rows, matrix.rows)?;
        let store = Store::Add(self.options.activations);
        self.multiply((&input.data, input.cols, rows), &[matrix], store, x);
        Ok(())
    }

    fn swiglu(
        &mut self,
        rows: usize,
        width: usize,
        gate_up: &Buffer,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let check = Check("swiglu");
        check.buffer("gate_up", gate_up, rows, 2 * width)?;
        check.buffer("out", out, rows, width)?;
        let (level, activations) = (self.level, self.options.activations);
        self.each_row(rows, 4 * width, out, |_, row, out| {
            let (gate, up) = gate_up.row(row).split_at(width);
            simd::swiglu_row(level, activations, gate, &up[..width], &mut out[..width]);
        });
        Ok(())
    }

    fn attention_prepare(
        &mut self,
        batch: &Batch,
        kv_layer: usize,
        shape: &AttentionShape,
        projected: &Buffer,
        q_norm: &Vector,
        k_norm: &Vector,
        cache: &mut Cache,
        query: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let check = Check("attention_prepare");
        check.attention(batch, kv_layer, shape, cache)?;
        check.buffer("projected", projected, batch.rows(), shape.projected())?;
        check.buffer("query", query, batch.rows(), shape.query_columns())?;
        check.vector("q_norm", &q_norm.values, shape.head_dim)?;
        check.vector("k_norm", &k_norm.values, shape.head_dim)?;
        let norms = HeadNorms { query: &q_norm.values, key: &k_norm.values };
        let how = (self.level, &mut self.pool, self.options.activations);
        attention::prepare(
            how,
            batch,
            kv_layer,
            shape,
            projected,
            norms,
            &mut self.scratch.keys,
            cache,
            query,
        );
        Ok(())
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
    ) -> Result<(), DeviceError> {
        let check = Check("attention");
        check.attention(batch, kv_layer, shape, cache)?;
        check.buffer("query", query, batch.rows(), shape.query_columns())?;
        check.buffer("projected", projected, batch.rows(), shape.projected())?;
        check.buffer("out", out, batch.rows(), shape.query_columns())?;
        let how = (self.level, &mut self.pool, &self.scratch.workers);
        attention::attention(
            how,
            self.options.activations,
            batch,
            kv_layer,
            shape,
            query,
            projected,
            cache,
            out,
        );
        Ok(())
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
    ) -> Result<(), DeviceError> {
        let check = Check("gdn_prepare");
        check.gdn(batch, gdn_layer, shape, cache)?;
        check.buffer("projected", projected, batch.rows(), shape.projected())?;
        check.buffer("mixed", mixed, batch.rows(), shape.mixed())?;
        check.vector("conv", &weights.conv.values, shape.conv_channels() * shape.conv_width)?;
        check.vector("decay_rate", &weights.decay_rate.values, shape.value_heads)?;
        check.vector("dt_bias", &weights.dt_bias.values, shape.value_heads)?;
        check.that(weights.conv.taps == shape.conv_width, || {
            format!("conv holds {} taps a channel, needs {}", weights.conv.taps, shape.conv_width)
        })?;
        let weights = gdn_prepare::Weights {
            taps: &weights.conv.values,
            decay_rate: &weights.decay_rate.values,
            dt_bias: &weights.dt_bias.values,
        };
        let how = (self.level, &mut self.pool, &self.scratch.workers, self.options.activations);
        gdn_prepare::prepare(how, batch, shape, weights, projected, &mut cache.states[gdn_layer], mixed);
        Ok(())
    }

    fn gdn_scan(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        mixed: &Buffer,
        cache: &mut Cache,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let check = Check("gdn_scan");
        check.gdn(batch, gdn_layer, shape, cache)?;
        check.buffer("mixed", mixed, batch.rows(), shape.mixed())?;
        check.buffer("out", out, batch.rows(), shape.value_columns())?;
        let how = (self.level, &mut self.pool, &self.scratch.workers);
        let state = &mut cache.states[gdn_layer];
        gdn_scan::scan(how, self.options.activations, batch, shape, mixed, state, out);
        Ok(())
    }

    fn gated_norm(
        &mut self,
        rows: usize,
        shape: &GdnShape,
        scanned: &Buffer,
        projected: &Buffer,
        norm: &Vector,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let check = Check("gated_norm");
        let width = shape.value_columns();
        check.buffer("scanned", scanned, rows, width)?;
        check.buffer("projected", projected, rows, shape.projected())?;
        check.buffer("out", out, rows, width)?;
        check.vector("norm", &norm.values, shape.value_dim)?;
        let (level, activations) = (self.level, self.options.activations);
        self.each_row(rows, 4 * width, out, |_, row, out| {
            let gates = &projected.row(row)[shape.z_column()..][..width];
            let scanned = &scanned.row(row)[..width];
            simd::gated_norm_row(level, activations, shape, scanned, gates, &norm.values, &mut out[..width]);
        });
        Ok(())
    }

    fn mtp_combine(
        &mut self,
        batch: &Batch,
        table: &Matrix,
        hidden: &Buffer,
        embed_norm: &Vector,
        hidden_norm: &Vector,
        eps: f32,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let check = Check("mtp_combine");
        let (embed_norm, hidden_norm) = (&embed_norm.values, &hidden_norm.values);
        check.tokens(table, batch)?;
        check.vector("embed_norm", embed_norm, table.cols)?;
        check.buffer("hidden", hidden, batch.rows(), hidden_norm.len())?;
        check.buffer("out", out, batch.rows(), table.cols + hidden_norm.len())?;
        let (level, activations) = (self.level, self.options.activations);
        let mut embedded = self.scratch.take_inputs(batch.rows(), table.cols);
        self.each_row(batch.rows(), 4 * table.cols, &mut embedded, |_, row, out| {
            table.widen_row(batch.tokens[row] as usize, out);
        });
        self.each_row(batch.rows(), 2 * table.cols, out, |_, row, out| {
            let (left, right) = out.split_at_mut(table.cols);
            simd::rms_norm_row(level, activations, embedded.row(row), embed_norm, eps, left);
            simd::rms_norm_row(level, activations, hidden.row(row), hidden_norm, eps, right);
        });
        self.scratch.inputs = embedded;
        Ok(())
    }

    fn head(
        &mut self,
        rows: &[usize],
        hidden: &Buffer,
        matrix: &Matrix,
        logits: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let check = Check("head");
        check.gathered("hidden", rows.iter().copied(), hidden)?;
        check.buffer("hidden", hidden, 0, matrix.cols)?;
        check.buffer("logits", logits, rows.len(), matrix.rows)?;
        let mut gathered = self.scratch.take_inputs(rows.len(), matrix.cols);
        for (target, row) in rows.iter().enumerate() {
            gathered.row_mut(target).copy_from_slice(&hidden.row(*row)[..matrix.cols]);
        }
        self.multiply((&gathered.data, matrix.cols, rows.len()), &[matrix], Store::Exact, logits);
        self.scratch.inputs = gathered;
        Ok(())
    }

    fn sample(&mut self, logits: &Buffer, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, DeviceError> {
        Check("sample").gathered("logits", rows.iter().map(|row| row.logits_row), logits)?;
        Ok(sample::sample((self.level, &mut self.pool, &self.scratch.workers), logits, rows))
    }

    fn score(&mut self, logits: &Buffer, rows: &[ScoreRow]) -> Result<Vec<Sampled>, DeviceError> {
        Check("score").gathered("logits", rows.iter().map(|row| row.logits_row), logits)?;
        Ok(sample::score((self.level, &mut self.pool, &self.scratch.workers), logits, rows))
    }

    cache_ops!();

    fn read(&mut self, buffer: &Buffer, rows: usize) -> Result<Vec<f32>, DeviceError> {
        Check("read").buffer("buffer", buffer, rows, 0)?;
        Ok(buffer.rows(rows).to_vec())
    }

    fn write(&mut self, buffer: &mut Buffer, values: &[f32]) -> Result<(), DeviceError> {
        let check = Check("write");
        check.that(buffer.cols > 0 && values.len().is_multiple_of(buffer.cols), || {
            format!("{} values for rows of {}", values.len(), buffer.cols)
        })?;
        let rows = values.len() / buffer.cols;
        check.buffer("buffer", buffer, rows, 0)?;
        buffer.rows_mut(rows).copy_from_slice(values);
        Ok(())
    }

    fn gather(&mut self, rows: &[usize], from: &Buffer, to: &mut Buffer) -> Result<(), DeviceError> {
        let check = Check("gather");
        check.gathered("from", rows.iter().copied(), from)?;
        check.buffer("to", to, rows.len(), from.cols)?;
        for (target, row) in rows.iter().enumerate() {
            to.row_mut(target)[..from.cols].copy_from_slice(from.row(*row));
        }
        Ok(())
    }
}
