//! The definition of every op: plain loops in f32, one thread, no SIMD, no packing.
//!
//! Slow and simple on purpose; every other device is compared to it. One file per family of ops, each op a free
//! function whose comment gives the maths; this file checks shapes and forwards.

mod attention;
mod check;
mod gdn;
mod linear;
mod matrix;
mod norm;
mod sample;
#[cfg(test)]
mod tests;

use qwill_device::{
    Activations, AttentionShape, Batch, CacheSpec, Device, DeviceError, DeviceFacts, GdnShape, GdnState,
    GdnWeights, Geometry, KvPage, MatrixData, Precision, SampleRow, Sampled, ScoreRow, WeightFormat,
};

use crate::{Buffer, Cache, HostStore, available_memory_bytes};
use check::Check;
use linear::row_slices;
pub use matrix::Matrix;
pub use sample::{sample_row, score_row};

/// The plain device.
#[derive(Debug, Clone)]
pub struct ReferenceDevice {
    activations: Activations,
    memory_bytes: u64,
}

impl ReferenceDevice {
    /// A device that rounds activations as told.
    pub fn new(activations: Activations) -> Self {
        Self { activations, memory_bytes: available_memory_bytes() }
    }
}

impl Device for ReferenceDevice {
    type Buffer = Buffer;
    type Matrix = Matrix;
    type Vector = Vec<f32>;
    type Cache = Cache;
    type HostStore = HostStore;

    fn facts(&self) -> DeviceFacts {
        DeviceFacts {
            name: "cpu (reference, 1 thread)".into(),
            memory_bytes: self.memory_bytes,
            activations: self.activations,
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
        matrix.fill(first_row, block)
    }

    fn matrix_bytes(&self, format: WeightFormat, rows: usize, cols: usize) -> u64 {
        format.matrix_bytes(rows, cols)
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vec<f32>, DeviceError> {
        Ok(values.to_vec())
    }

    fn conv_taps(&mut self, values: &[f32], _taps: usize) -> Result<Vec<f32>, DeviceError> {
        self.vector(values)
    }

    /// None is planned: the plain loops allocate as they go, which is part of being plain.
    fn scratch_bytes(&self, _geometry: &Geometry, _max_rows: usize, _max_logit_rows: usize) -> u64 {
        0
    }

    fn reserve(
        &mut self,
        _geometry: &Geometry,
        _max_rows: usize,
        _max_logit_rows: usize,
    ) -> Result<(), DeviceError> {
        Ok(())
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

    fn begin_step(&mut self, batch: &Batch) -> Result<(), DeviceError> {
        batch.check().map_err(|reason| DeviceError::shape("begin_step", reason))
    }

    fn embed(&mut self, table: &Matrix, batch: &Batch, out: &mut Buffer) -> Result<(), DeviceError> {
        let check = Check("embed");
        check.tokens(table, batch)?;
        check.buffer("out", out, batch.rows(), table.cols)?;
        norm::embed(self.activations, table, &batch.tokens, out);
        Ok(())
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &Buffer,
        weight: &Vec<f32>,
        eps: f32,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let check = Check("rms_norm");
        check.buffer("x", x, rows, weight.len())?;
        check.buffer("out", out, rows, weight.len())?;
        norm::rms_norm(self.activations, rows, x, weight, eps, out);
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
    ) -> Result<(), DeviceError> {
        let check = Check("norm_linears");
        check.buffer("x", x, rows, norm.len())?;
        check.buffer("out", out, rows, parts.iter().map(|part| part.rows).sum())?;
        for part in parts {
            check.that(part.cols == norm.len(), || {
                format!("a part of {} inputs after a norm of {}", part.cols, norm.len())
            })?;
        }
        let mut normed = Buffer::new(rows, norm.len());
        norm::rms_norm(self.activations, rows, x, norm, eps, &mut normed);
        let mut first_column = 0;
        for part in parts {
            linear::linear_into(self.activations, &row_slices(&normed, rows), part, first_column, out);
            first_column += part.rows;
        }
        Ok(())
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
        linear::linear_into(self.activations, &row_slices(input, rows), matrix, 0, out);
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
        linear::linear_add(self.activations, &row_slices(input, rows), matrix, x);
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
        norm::swiglu(self.activations, rows, width, gate_up, out);
        Ok(())
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
    ) -> Result<(), DeviceError> {
        let check = Check("attention_prepare");
        check.attention(batch, kv_layer, shape, cache)?;
        check.buffer("projected", projected, batch.rows(), shape.projected())?;
        check.buffer("query", query, batch.rows(), shape.query_columns())?;
        check.vector("q_norm", q_norm, shape.head_dim)?;
        check.vector("k_norm", k_norm, shape.head_dim)?;
        let norms = attention::HeadNorms { query: q_norm, key: k_norm };
        attention::prepare(self.activations, batch, kv_layer, shape, projected, &norms, cache, query);
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
        attention::attention(self.activations, batch, kv_layer, shape, query, projected, cache, out);
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
        check.vector("conv", &weights.conv, shape.conv_channels() * shape.conv_width)?;
        check.vector("decay_rate", &weights.decay_rate, shape.value_heads)?;
        check.vector("dt_bias", &weights.dt_bias, shape.value_heads)?;
        let gates = gdn::GateWeights {
            conv: &weights.conv,
            decay_rate: &weights.decay_rate,
            dt_bias: &weights.dt_bias,
        };
        gdn::prepare(self.activations, batch, shape, &gates, projected, &mut cache.states[gdn_layer], mixed);
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
        gdn::scan(self.activations, batch, gdn_layer, shape, mixed, cache, out);
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
    ) -> Result<(), DeviceError> {
        let check = Check("gated_norm");
        check.buffer("scanned", scanned, rows, shape.value_columns())?;
        check.buffer("projected", projected, rows, shape.projected())?;
        check.buffer("out", out, rows, shape.value_columns())?;
        check.vector("norm", norm, shape.value_dim)?;
        norm::gated_norm(self.activations, rows, shape, scanned, projected, norm, out);
        Ok(())
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
    ) -> Result<(), DeviceError> {
        let check = Check("mtp_combine");
        check.tokens(table, batch)?;
        check.vector("embed_norm", embed_norm, table.cols)?;
        check.buffer("hidden", hidden, batch.rows(), hidden_norm.len())?;
        check.buffer("out", out, batch.rows(), table.cols + hidden_norm.len())?;
        let norms = norm::MtpNorms { embed: embed_norm, hidden: hidden_norm, eps };
        norm::mtp_combine(self.activations, table, &batch.tokens, hidden, &norms, out);
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
        check.gathered("hidden", rows, hidden)?;
        check.buffer("hidden", hidden, 0, matrix.cols)?;
        check.buffer("logits", logits, rows.len(), matrix.rows)?;
        let inputs: Vec<&[f32]> = rows.iter().map(|row| hidden.row(*row)).collect();
        linear::head(self.activations, &inputs, matrix, logits);
        Ok(())
    }

    fn sample(&mut self, logits: &Buffer, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, DeviceError> {
        let indices: Vec<usize> = rows.iter().map(|row| row.logits_row).collect();
        Check("sample").gathered("logits", &indices, logits)?;
        Ok(rows.iter().map(|row| sample_row(logits.row(row.logits_row), row)).collect())
    }

    fn score(&mut self, logits: &Buffer, rows: &[ScoreRow]) -> Result<Vec<Sampled>, DeviceError> {
        let indices: Vec<usize> = rows.iter().map(|row| row.logits_row).collect();
        Check("score").gathered("logits", &indices, logits)?;
        Ok(rows.iter().map(|row| score_row(logits.row(row.logits_row), row)).collect())
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
        check.gathered("from", rows, from)?;
        check.buffer("to", to, rows.len(), from.cols)?;
        for (target, row) in rows.iter().enumerate() {
            to.row_mut(target)[..from.cols].copy_from_slice(from.row(*row));
        }
        Ok(())
    }
}
