//! Matrix products.

use std::sync::Arc;

use qwill_device::{DeviceError, GROUP, WeightFormat};

use super::rows::{BLOCK, NORM_BLOCK};
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

/// Entry points of linear.cu.
#[derive(Debug)]
pub(super) struct LinearKernels {
    int4: Family,
    int8: Family,
    bf16: Family,
    plain: Function,
}

/// Kernels of one format.
#[derive(Debug)]
struct Family {
    /// For at most so many tokens, ascending, and the tokens of a block.
    few: Vec<(usize, usize, Function)>,
    /// For any number.
    many: Function,
}

impl LinearKernels {
    pub(super) fn new(module: &Arc<Module>) -> Result<Self, DeviceError> {
        let kernel = |name: &str| module.function(name, 0);
        let many = |name: &str| module.function(name, MANY_SHARED_BYTES as u32);
        Ok(Self {
            int4: Family {
                few: vec![
                    (8, 8, kernel("int4_8")?),
                    (16, 16, kernel("int4_16")?),
                    (64, 32, kernel("int4_32")?),
                ],
                many: many("int4_64")?,
            },
            int8: Family {
                few: vec![
                    (8, 8, kernel("int8_8")?),
                    (16, 16, kernel("int8_16")?),
                    (64, 32, kernel("int8_32")?),
                ],
                many: many("int8_64")?,
            },
            // 32 tokens and unpacked weights do not fit into registers.
            bf16: Family {
                few: vec![(8, 8, kernel("bf16_8")?), (16, 16, kernel("bf16_16")?)],
                many: many("bf16_64")?,
            },
            plain: kernel("plain")?,
        })
    }
}

impl Family {
    /// The kernel for a number of rows and its extent; the bits are the same whichever it is.
    fn launch_for(&self, rows: usize, outputs: usize) -> (&Function, Extent) {
        if let Some((_, tokens, kernel)) = self.few.iter().find(|(most, ..)| rows <= *most) {
            return (kernel, Extent::new((outputs.div_ceil(32), rows.div_ceil(*tokens), 1), 256));
        }
        let extent = Extent::new((rows.div_ceil(64), outputs.div_ceil(128), 1), 256);
        (&self.many, extent.with_shared(MANY_SHARED_BYTES))
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
        let kernels = &self.kernels.rows;
        let (kernel, extent) = match norm {
            Some(_) => (&kernels.rms_norm, Extent::new((rows, 1, 1), NORM_BLOCK)),
            None => (&kernels.stage, Extent::new((padded.div_ceil(4 * BLOCK), rows, 1), BLOCK)),
        };
        self.driver.launch(check.0, kernel, extent, &params)?;
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
        let (kernel, extent) = family.launch_for(rows, matrix.rows());
        self.driver.launch(check.0, kernel, extent, &params)
    }
}
