//! Ops that look at one row alone.

use std::sync::Arc;

use qwill_device::{Batch, DeviceError, GdnShape};

use super::{Check, CudaBuffer, CudaDevice, CudaMatrix, CudaVector};
use crate::driver::{Extent, Function, Module};
use crate::launch::{EmbedParams, GatedNormParams, GatherParams, MtpParams, NormParams, SwigluParams};

/// Threads of a block, as `BLOCK` in the source.
const BLOCK: usize = 256;

/// Threads of `rms_norm`, as `NORM_BLOCK` in the source.
pub(super) const NORM_BLOCK: usize = 512;

/// Entry points of rows.cu.
#[derive(Debug)]
pub(super) struct RowKernels {
    embed: Function,
    pub(super) rms_norm: Function,
    mtp_combine: Function,
    swiglu: Function,
    gated_norm: Function,
    pub(super) gather: Function,
}

impl RowKernels {
    pub(super) fn new(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(Self {
            embed: module.early_function("embed", 0)?,
            rms_norm: module.early_function("rms_norm", 0)?,
            mtp_combine: module.early_function("mtp_combine", 0)?,
            swiglu: module.early_function("swiglu", 0)?,
            gated_norm: module.early_function("gated_norm", 0)?,
            gather: module.early_function("gather", 0)?,
        })
    }
}

impl CudaDevice {
    pub(super) fn run_embed(
        &mut self,
        table: &CudaMatrix,
        batch: &Batch,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("embed");
        check.tokens(table, batch)?;
        check.activations("out", out)?;
        check.buffer("out", out, batch.rows(), table.cols())?;
        let params = EmbedParams {
            table: table.params(),
            tokens: self.step.params("embed", batch)?.tokens,
            out: out.memory.address(),
            out_cols: out.stride as u32,
        };
        let extent = Extent::new((batch.rows(), 1, 1), BLOCK);
        self.driver.launch("embed", &self.kernels.rows.embed, extent, &params)
    }

    pub(super) fn run_rms_norm(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("rms_norm");
        check.activations("x", x)?;
        check.activations("out", out)?;
        check.buffer("x", x, rows, weight.len)?;
        check.buffer("out", out, rows, weight.len)?;
        let params = NormParams {
            x: x.memory.address(),
            weight: weight.memory.address(),
            out: out.memory.address(),
            x_cols: x.stride as u32,
            out_cols: out.stride as u32,
            cols: weight.len as u32,
            filled_cols: 0,
            eps,
        };
        self.driver.launch(
            "rms_norm",
            &self.kernels.rows.rms_norm,
            Extent::new((rows, 1, 1), NORM_BLOCK),
            &params,
        )
    }

    pub(super) fn run_swiglu(
        &mut self,
        rows: usize,
        width: usize,
        gate_up: &CudaBuffer,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("swiglu");
        check.activations("gate_up", gate_up)?;
        check.activations("out", out)?;
        check.buffer("gate_up", gate_up, rows, 2 * width)?;
        check.buffer("out", out, rows, width)?;
        let params = SwigluParams {
            gate_up: gate_up.memory.address(),
            out: out.memory.address(),
            in_cols: gate_up.stride as u32,
            out_cols: out.stride as u32,
            width: width as u32,
        };
        let extent = Extent::new((width.div_ceil(4 * BLOCK), rows, 1), BLOCK);
        self.driver.launch("swiglu", &self.kernels.rows.swiglu, extent, &params)
    }

    pub(super) fn run_gated_norm(
        &mut self,
        rows: usize,
        shape: &GdnShape,
        scanned: &CudaBuffer,
        projected: &CudaBuffer,
        norm: &CudaVector,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("gated_norm");
        check.activations("scanned", scanned)?;
        check.activations("projected", projected)?;
        check.activations("out", out)?;
        check.buffer("scanned", scanned, rows, shape.value_columns())?;
        check.buffer("projected", projected, rows, shape.projected())?;
        check.buffer("out", out, rows, shape.value_columns())?;
        check.vector("norm", norm, shape.value_dim)?;
        let params = GatedNormParams {
            scanned: scanned.memory.address(),
            projected: projected.memory.address(),
            norm: norm.memory.address(),
            out: out.memory.address(),
            scanned_cols: scanned.stride as u32,
            projected_cols: projected.stride as u32,
            out_cols: out.stride as u32,
            z_column: shape.z_column() as u32,
            heads: shape.value_heads as u32,
            dim: shape.value_dim as u32,
            eps: shape.norm_eps,
        };
        let extent = Extent::new((shape.value_heads.div_ceil(BLOCK / 32), rows, 1), BLOCK);
        self.driver.launch("gated_norm", &self.kernels.rows.gated_norm, extent, &params)
    }

    pub(super) fn run_mtp_combine(
        &mut self,
        batch: &Batch,
        table: &CudaMatrix,
        hidden: &CudaBuffer,
        (embed_norm, hidden_norm): (&CudaVector, &CudaVector),
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("mtp_combine");
        check.tokens(table, batch)?;
        check.vector("embed_norm", embed_norm, table.cols())?;
        check.activations("hidden", hidden)?;
        check.activations("out", out)?;
        check.buffer("hidden", hidden, batch.rows(), hidden_norm.len)?;
        check.buffer("out", out, batch.rows(), table.cols() + hidden_norm.len)?;
        let params = MtpParams {
            table: table.params(),
            tokens: self.step.params("mtp_combine", batch)?.tokens,
            hidden: hidden.memory.address(),
            embed_norm: embed_norm.memory.address(),
            hidden_norm: hidden_norm.memory.address(),
            out: out.memory.address(),
            hidden_cols: hidden.stride as u32,
            hidden_width: hidden_norm.len as u32,
            out_cols: out.stride as u32,
            eps,
        };
        let extent = Extent::new((batch.rows(), 1, 1), BLOCK);
        self.driver.launch("mtp_combine", &self.kernels.rows.mtp_combine, extent, &params)
    }

    pub(super) fn run_gather(
        &mut self,
        rows: &[usize],
        from: &CudaBuffer,
        to: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let check = Check("gather");
        check.activations("from", from)?;
        check.activations("to", to)?;
        check.gathered("from", rows, from)?;
        check.buffer("to", to, rows.len(), from.cols)?;
        let params = GatherParams {
            from: from.memory.address(),
            indices: self.upload_indices("gather", rows)?,
            to: to.memory.address(),
            cols: from.cols as u32,
            from_cols: from.stride as u32,
            to_cols: to.stride as u32,
        };
        let extent = Extent::new((rows.len(), 1, 1), BLOCK);
        self.driver.launch("gather", &self.kernels.rows.gather, extent, &params)
    }
}
