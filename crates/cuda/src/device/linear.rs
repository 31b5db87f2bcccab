//! Matrix products.

use std::sync::Arc;

use qwill_device::{DeviceError, GROUP, WeightFormat};

use super::{Check, CudaBuffer, CudaDevice, CudaMatrix, CudaVector};
use crate::driver::{Extent, Function, Module};
use crate::launch::{LinearParams, NormParams};

/// What becomes of a sum; the values are those of linear.cu.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mode {
    /// Stored rounded.
    Round = 0,
    /// Added to what is there, the sum rounded.
    Add = 1,
    /// Stored as it is.
    Raw = 2,
}

/// Shared memory of the kernels for any number of tokens: two groups of 64 tokens, and 32 sums a thread.
const MANY_SHARED_BYTES: usize = 2 * 64 * (GROUP + 8) * 2 + 32 * 256 * 4;

/// Entry points of linear.cu, per format one for at most 2, 8, 16, 32 and any number of tokens.
#[derive(Debug)]
pub(super) struct LinearKernels {
    int4: [Function; 5],
    int8: [Function; 5],
    bf16: [Function; 5],
    plain: Function,
}

impl LinearKernels {
    pub(super) fn new(module: &Arc<Module>) -> Result<Self, DeviceError> {
        let family = |format: &str| -> Result<[Function; 5], DeviceError> {
            let kernel = |tokens: u32, shared| module.function(&format!("{format}_{tokens}"), shared);
            Ok([
                kernel(2, 0)?,
                kernel(8, 0)?,
                kernel(16, 0)?,
                kernel(32, 0)?,
                kernel(64, MANY_SHARED_BYTES as u32)?,
            ])
        };
        Ok(Self {
            int4: family("int4")?,
            int8: family("int8")?,
            bf16: family("bf16")?,
            plain: module.function("plain", 0)?,
        })
    }
}

impl CudaDevice {
    /// Writes rows of `x`, normed where `norm` is given, as bf16 `[rows, cols rounded up to a group]` and returns the
    /// address. `indices` picks the rows.
    pub(super) fn stage(
        &mut self,
        check: Check,
        rows: usize,
        indices: Option<&[usize]>,
        x: &CudaBuffer,
        norm: Option<(&CudaVector, f32)>,
        cols: usize,
    ) -> Result<u64, DeviceError> {
        match indices {
            Some(indices) => check.gathered("input", indices, x)?,
            None => check.buffer("input", x, rows, cols)?,
        }
        check.buffer("input", x, 0, cols)?;
        let padded = cols.next_multiple_of(GROUP);
        let indices = match indices {
            Some(indices) => self.upload_indices(check.0, indices)?,
            None => 0,
        };
        let staged = self.staged.at_least(&self.driver, rows as u64 * padded as u64 * 2)?.address();
        let params = NormParams {
            x: x.memory.address(),
            indices,
            weight: norm.map_or(0, |(weight, _)| weight.memory.address()),
            out: 0,
            staged,
            x_cols: x.cols as u32,
            out_cols: 0,
            cols: cols as u32,
            padded: padded as u32,
            eps: norm.map_or(0.0, |(_, eps)| eps),
        };
        self.driver.launch(check.0, &self.kernels.rows.rms_norm, Extent::new((rows, 1, 1), 256), &params)?;
        Ok(staged)
    }

    /// `out[row][first_column + i] = matrix[i] · x[row]` for staged rows.
    pub(super) fn multiply(
        &mut self,
        check: Check,
        rows: usize,
        x: u64,
        matrix: &CudaMatrix,
        out: &mut CudaBuffer,
        first_column: usize,
        mode: Mode,
    ) -> Result<(), DeviceError> {
        check.buffer("out", out, rows, first_column + matrix.rows())?;
        let params = LinearParams {
            matrix: matrix.params(),
            x,
            out: out.memory.address(),
            out_cols: out.cols as u32,
            out_column: first_column as u32,
            rows: rows as u32,
            mode: mode as u32,
        };
        let kernels = &self.kernels.linear;
        let family = match matrix.format() {
            WeightFormat::Int4 => &kernels.int4,
            WeightFormat::Int8 => &kernels.int8,
            WeightFormat::Bf16 => &kernels.bf16,
            WeightFormat::F32 | WeightFormat::F16 => {
                let extent = Extent::new((matrix.rows().div_ceil(8), rows, 1), 256);
                return self.driver.launch(check.0, &kernels.plain, extent, &params);
            }
        };
        let few = |outputs: usize| Extent::new((matrix.rows().div_ceil(outputs), 1, 1), 256);
        let many = Extent::new((rows.div_ceil(64), matrix.rows().div_ceil(128), 1), 256);
        let (kernel, extent) = match rows {
            0..=2 => (&family[0], few(16)),
            3..=8 => (&family[1], few(32)),
            9..=16 => (&family[2], few(32)),
            17..=32 => (&family[3], few(32)),
            _ => (&family[4], many.with_shared(MANY_SHARED_BYTES)),
        };
        self.driver.launch(check.0, kernel, extent, &params)
    }
}
