//! Products of a prompt's tokens, on cards that have kernels of their own for them.

use std::sync::Arc;

use qwill_device::{DeviceError, GROUP, Geometry, WeightFormat};

use super::linear::{Arranged, ArrangedProduct, Input, Mode};
use super::{Check, CudaDevice, CudaMatrix};
use crate::driver::{Extent, Function, Module};
use crate::launch::ArrangeParams;

/// Tokens of a block, of a short prompt and of others; stages, outputs, and tokens and columns of an arranged square: as
/// in `linear_prompt.cu`.
const SHORT_TOKENS: usize = 64;
const LONG_TOKENS: usize = 128;
const STAGES: usize = 4;
const PROMPT_THREADS: usize = 384;
const SQUARE: usize = 64;
const ARRANGE_BLOCK: usize = 128;

/// Shared memory of a kernel: stages of a group of its tokens, and what aligns them.
fn prompt_shared_bytes(tokens: usize) -> usize {
    STAGES * tokens * GROUP * 2 + 1024
}

/// Bytes of arranged rows of a model's widest product.
pub(super) fn arranged_bytes(geometry: &Geometry, rows: usize) -> u64 {
    let Geometry { hidden, intermediate, attention, gdn, .. } = geometry;
    let widths = [2 * hidden, *intermediate, attention.query_heads * attention.head_dim, gdn.value_columns()];
    let widest = widths.into_iter().max().unwrap_or_default();
    bytes_of(rows, widest)
}

fn bytes_of(rows: usize, cols: usize) -> u64 {
    (rows.next_multiple_of(SQUARE) * cols.next_multiple_of(GROUP) * 2) as u64
}

/// Entry points of `linear_prompt.cu`.
#[derive(Debug)]
pub(super) struct PromptKernels {
    arrange: Function,
    /// With [`SHORT_TOKENS`] and [`LONG_TOKENS`] a block.
    int4: [Function; 2],
    int8: [Function; 2],
    bf16: [Function; 2],
}

impl PromptKernels {
    pub(super) fn new(module: &Arc<Module>) -> Result<Self, DeviceError> {
        let kernel = |format: &str, tokens: usize| {
            module.early_function(&format!("{format}_prompt_{tokens}"), prompt_shared_bytes(tokens) as u32)
        };
        let kernels = |format: &str| Ok([kernel(format, SHORT_TOKENS)?, kernel(format, LONG_TOKENS)?]);
        Ok(Self {
            arrange: module.early_function("arrange", 0)?,
            int4: kernels("int4")?,
            int8: kernels("int8")?,
            bf16: kernels("bf16")?,
        })
    }

    /// How a kernel with so many tokens a block is launched.
    pub(super) fn extent(tokens: usize, blocks: usize, rows: usize) -> Extent {
        let extent = Extent::new((rows.div_ceil(tokens), blocks, 1), PROMPT_THREADS);
        extent.with_shared(prompt_shared_bytes(tokens))
    }

    /// The kernel for matrices of a format and a number of rows, if there is one, and the tokens of its blocks.
    pub(super) fn of(&self, format: WeightFormat, rows: usize) -> Option<(&Function, usize)> {
        let [short, long] = match format {
            WeightFormat::Int4 => &self.int4,
            WeightFormat::Int8 => &self.int8,
            WeightFormat::Bf16 => &self.bf16,
            WeightFormat::F32 | WeightFormat::F16 => return None,
        };
        Some(if rows <= SHORT_TOKENS { (short, SHORT_TOKENS) } else { (long, LONG_TOKENS) })
    }
}

impl CudaDevice {
    /// Bytes that arranged inputs need; none without the kernels.
    pub(super) fn arranged_bytes(&self, geometry: &Geometry, max_rows: usize) -> u64 {
        self.kernels.linear.prompt.as_ref().map_or(0, |_| arranged_bytes(geometry, max_rows))
    }

    /// The input, arranged as well where the kernels that take the matrices want it so.
    pub(super) fn arranged_for(
        &mut self,
        check: Check,
        rows: usize,
        x: Input,
        parts: &[&CudaMatrix],
        mode: Mode,
    ) -> Result<Input, DeviceError> {
        let linear = &self.kernels.linear;
        let (Some(kernels), Some(first)) = (&linear.prompt, parts.first()) else { return Ok(x) };
        let pairs = mode == Mode::Swiglu;
        let product = ArrangedProduct { rows, is_chosen: x.indices != 0, format: first.format(), pairs };
        let arrangement = linear.arrangement(self.phase, product);
        if arrangement == Arranged::No || x.arranged.1 != 0 {
            return Ok(Input { arranged: (arrangement, x.arranged.1), ..x });
        }
        let groups = first.cols().div_ceil(GROUP);
        let address = self.arranged.at_least(&self.driver, bytes_of(rows, first.cols()))?.address();
        let params = ArrangeParams {
            x: x.address,
            indices: x.indices,
            out: address,
            rows: rows as u32,
            x_cols: x.stride as u32,
            groups: groups as u32,
            unused: 0,
        };
        let blocks = (groups * 16).div_ceil(ARRANGE_BLOCK);
        let extent = Extent::new((blocks, rows, 1), ARRANGE_BLOCK);
        self.driver.launch(check.0, &kernels.arrange, extent, &params)?;
        Ok(Input { arranged: (arrangement, address), ..x })
    }
}
