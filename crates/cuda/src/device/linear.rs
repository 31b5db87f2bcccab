//! Matrix products.

use std::sync::Arc;

use qwill_device::{DeviceError, GROUP, WeightFormat};

use super::linear_prompt::{PROMPT_OUTPUTS, PROMPT_THREADS, PromptKernels, prompt_shared_bytes};
use super::rows::NORM_BLOCK;
use super::{Check, CudaBuffer, CudaDevice, CudaMatrix, CudaVector};
use crate::driver::{Extent, Function, Module};
use crate::launch::{LinearParams, MAX_PARTS, NormParams, PartParams};

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

/// Outputs of a row tile, and runs of columns that are summed apart.
const TILE_ROWS: usize = 16;
const SPLITS: usize = 8;

/// Outputs from which on a block takes four row tiles of int4 at once: fewer would leave SMs without a block.
const WIDE_OUTPUTS: usize = 8192;

/// Rows up to which few outputs are left to more blocks; above, reading tokens costs more than idle SMs.
const NARROW_ROWS: usize = 4;

/// Shared memory of which a data-center card's SM holds one block: started early, the blocks of a launch that has fewer of
/// them than there are SMs would be put two on one SM, beside what still runs on the others.
const ALONE_SHARED_BYTES: usize = 116 << 10;

/// Entry points of linear.cu, and of `linear_prompt.cu` where the card has it.
#[derive(Debug)]
pub(super) struct LinearKernels {
    int4: Family,
    int8: Family,
    bf16: Family,
    plain: Function,
    pub(super) prompt: Option<PromptKernels>,
    card: Card,
}

/// What the choice of a kernel needs to know of the GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Card {
    pub(super) sm: u32,
    pub(super) sm_count: usize,
}

impl Card {
    /// As `MUCH_SHARED` in the source.
    fn much_shared(self) -> bool {
        self.sm == 80 || (90..120).contains(&self.sm)
    }
}

/// Kernels of one format.
#[derive(Debug)]
struct Family {
    /// For at most so many tokens, ascending.
    few: Vec<Few>,
    /// For at most eight tokens, and [`WIDE_OUTPUTS`] or more than [`NARROW_ROWS`] of them.
    wide: Option<Few>,
    /// For any number.
    many: Function,
}

/// A kernel whose blocks have some row tiles, and all columns in [`SPLITS`] warps.
#[derive(Debug)]
struct Few {
    most_rows: usize,
    /// Tokens of a block.
    tokens: usize,
    /// Row tiles of a block.
    row_tiles: usize,
    shared_bytes: usize,
    /// The same for so few blocks that each should have an SM.
    alone_shared_bytes: usize,
    kernel: Function,
}

impl Few {
    /// `eight_tokens`: a ring of halves of 64 columns, `codes_bytes` for each of the row tiles and eight tokens of 64
    /// activations and 16 bytes, and the scales of the groups.
    fn ring(
        card: Card,
        module: &Arc<Module>,
        name: &str,
        row_tiles: usize,
        codes_bytes: usize,
        ring: usize,
    ) -> Result<Self, DeviceError> {
        let groups = if ring.is_multiple_of(2) { ring / 2 } else { ring };
        let warp = ring * (row_tiles * codes_bytes + 8 * (64 + 8) * 2) + groups * row_tiles * TILE_ROWS * 2;
        let shared_bytes = (SPLITS * warp).max(sums_bytes(row_tiles, 8));
        let alone_shared_bytes = if card.much_shared() { ALONE_SHARED_BYTES } else { shared_bytes };
        let kernel = module.early_function(name, alone_shared_bytes as u32)?;
        Ok(Self { most_rows: 8, tokens: 8, row_tiles, shared_bytes, alone_shared_bytes, kernel })
    }

    /// `few_tokens`.
    fn registers(
        module: &Arc<Module>,
        name: &str,
        row_tiles: usize,
        tokens: usize,
        most_rows: usize,
    ) -> Result<Self, DeviceError> {
        let shared_bytes = sums_bytes(row_tiles, tokens);
        let kernel = module.early_function(name, shared_bytes as u32)?;
        Ok(Self { most_rows, tokens, row_tiles, shared_bytes, alone_shared_bytes: shared_bytes, kernel })
    }
}

/// Bytes of the runs' sums of a block.
fn sums_bytes(row_tiles: usize, tokens: usize) -> usize {
    SPLITS * row_tiles * TILE_ROWS * (tokens + 1) * 4
}

impl LinearKernels {
    /// The modules of linear.cu and, for a card that has it, `linear_prompt.cu`.
    pub(super) fn new(
        module: &Arc<Module>,
        prompt: Option<&Arc<Module>>,
        card: Card,
    ) -> Result<Self, DeviceError> {
        let ring = |large: usize, small: usize| if card.much_shared() { large } else { small };
        let many = |name: &str| module.early_function(name, MANY_SHARED_BYTES as u32);
        Ok(Self {
            int4: Family {
                few: vec![
                    Few::ring(card, module, "int4_8", 2, 512, ring(6, 4))?,
                    Few::registers(module, "int4_16", 4, 16, 16)?,
                    Few::registers(module, "int4_32", 3, 32, 64)?,
                ],
                wide: Some(Few::ring(card, module, "int4_wide_8", 4, 512, ring(4, 3))?),
                many: many("int4_64")?,
            },
            int8: Family {
                few: vec![
                    Few::ring(card, module, "int8_8", 2, 1024, 3)?,
                    Few::registers(module, "int8_16", 2, 16, 16)?,
                    Few::registers(module, "int8_32", 2, 32, 64)?,
                ],
                wide: None,
                many: many("int8_64")?,
            },
            // 32 tokens and unpacked weights do not fit into registers.
            bf16: Family {
                few: vec![
                    Few::ring(card, module, "bf16_8", 1, 2048, 3)?,
                    Few::registers(module, "bf16_16", 2, 16, 16)?,
                ],
                wide: None,
                many: many("bf16_64")?,
            },
            plain: module.early_function("plain", 0)?,
            prompt: prompt.map(PromptKernels::new).transpose()?,
            card,
        })
    }

    /// The kernel for matrices of a format with some outputs together, and a number of rows; the bits are the same
    /// whichever it is, apart for prompts and everything else.
    fn choose(&self, format: WeightFormat, outputs: usize, rows: usize, is_arranged: bool) -> Choice<'_> {
        let prompt = self.prompt.as_ref().filter(|_| is_arranged);
        if let Some((kernel, tokens)) = prompt.and_then(|prompt| prompt.of(format, rows)) {
            return Choice::Prompt(kernel, tokens);
        }
        let family = match format {
            WeightFormat::Int4 => &self.int4,
            WeightFormat::Int8 => &self.int8,
            WeightFormat::Bf16 => &self.bf16,
            WeightFormat::F32 | WeightFormat::F16 => return Choice::Plain(&self.plain),
        };
        let shared = outputs >= WIDE_OUTPUTS || rows > NARROW_ROWS;
        let wide = family.wide.iter().filter(|few| shared && rows <= few.most_rows);
        match wide.chain(&family.few).find(|few| rows <= few.most_rows) {
            Some(few) => Choice::Few(few),
            None => Choice::Many(&family.many),
        }
    }
}

/// A kernel and how its grid covers outputs and rows.
enum Choice<'a> {
    Few(&'a Few),
    Many(&'a Function),
    /// With the tokens of a block.
    Prompt(&'a Function, usize),
    Plain(&'a Function),
}

impl Choice<'_> {
    fn outputs_of_a_block(&self) -> usize {
        match self {
            Self::Few(few) => few.row_tiles * TILE_ROWS,
            Self::Many(_) => 128,
            Self::Prompt(..) => PROMPT_OUTPUTS,
            Self::Plain(_) => 8,
        }
    }

    fn launch(&self, card: Card, blocks: usize, rows: usize) -> (&Function, Extent) {
        match self {
            Self::Few(few) => {
                let alone = blocks <= card.sm_count;
                let shared_bytes = if alone { few.alone_shared_bytes } else { few.shared_bytes };
                let extent = Extent::new((blocks, rows.div_ceil(few.tokens), 1), SPLITS * 32);
                (&few.kernel, extent.with_shared(shared_bytes))
            }
            Self::Many(kernel) => {
                let extent = Extent::new((rows.div_ceil(64), blocks, 1), 256);
                (kernel, extent.with_shared(MANY_SHARED_BYTES))
            }
            Self::Prompt(kernel, tokens) => {
                let extent = Extent::new((rows.div_ceil(*tokens), blocks, 1), PROMPT_THREADS);
                (kernel, extent.with_shared(prompt_shared_bytes(*tokens)))
            }
            Self::Plain(kernel) => (kernel, Extent::new((blocks, rows, 1), 256)),
        }
    }
}

/// Rows that a product reads: activations, zero-padded to whole groups.
#[derive(Clone, Copy)]
pub(super) struct Input {
    pub(super) address: u64,
    /// Addresses of row indices, or 0: all rows in order.
    pub(super) indices: u64,
    /// Elements from row to row.
    pub(super) stride: usize,
    /// The same rows as the kernels for prompts want them.
    pub(super) arranged: Option<u64>,
}

impl CudaBuffer {
    /// The buffer's rows as they are, for matrices of `cols` inputs.
    pub(super) fn input(&self, check: Check, rows: usize, cols: usize) -> Result<Input, DeviceError> {
        check.activations("input", self)?;
        check.buffer("input", self, rows, cols)?;
        check.that(cols == self.cols || cols.is_multiple_of(GROUP), || {
            format!("{cols} inputs in rows of {}: what follows them is not zero", self.cols)
        })?;
        Ok(Input { address: self.memory.address(), indices: 0, stride: self.stride, arranged: None })
    }
}

impl CudaDevice {
    /// The normed rows of `x`, in scratch memory.
    pub(super) fn normed(
        &mut self,
        check: Check,
        rows: usize,
        x: &CudaBuffer,
        norm: &CudaVector,
        eps: f32,
    ) -> Result<Input, DeviceError> {
        check.activations("x", x)?;
        check.buffer("x", x, rows, norm.len)?;
        let stride = norm.len.next_multiple_of(GROUP);
        let address = self.normed.at_least(&self.driver, (rows * stride * 2) as u64)?.address();
        let params = NormParams {
            x: x.memory.address(),
            weight: norm.memory.address(),
            out: address,
            x_cols: x.stride as u32,
            out_cols: stride as u32,
            cols: norm.len as u32,
            filled_cols: stride as u32,
            eps,
        };
        let kernel = &self.kernels.rows.rms_norm;
        self.driver.launch(check.0, kernel, Extent::new((rows, 1, 1), NORM_BLOCK), &params)?;
        Ok(Input { address, indices: 0, stride, arranged: None })
    }

    /// `out[row] = parts[0] · x[row] | parts[1] · x[row] | …`. Neighbours of one format share a launch.
    pub(super) fn multiply(
        &mut self,
        check: Check,
        rows: usize,
        x: Input,
        parts: &[&CudaMatrix],
        out: &mut CudaBuffer,
        mode: Mode,
    ) -> Result<(), DeviceError> {
        check.buffer("out", out, rows, parts.iter().map(|part| part.rows()).sum())?;
        match mode {
            Mode::Round | Mode::Add => check.activations("out", out)?,
            Mode::Raw => check.full("out", out)?,
        }
        let x = self.arranged_for(check, rows, x, parts)?;
        let mut out_column = 0;
        for same_format in parts.chunk_by(|a, b| a.format() == b.format()) {
            for parts in same_format.chunks(MAX_PARTS) {
                out_column += self.multiply_together(check, rows, x, parts, out, out_column, mode)?;
            }
        }
        Ok(())
    }

    /// One launch for matrices of one format; returns their outputs.
    fn multiply_together(
        &mut self,
        check: Check,
        rows: usize,
        x: Input,
        parts: &[&CudaMatrix],
        out: &CudaBuffer,
        first_column: usize,
        mode: Mode,
    ) -> Result<usize, DeviceError> {
        let Some(first) = parts.first() else { return Ok(0) };
        let all_outputs = parts.iter().map(|part| part.rows()).sum();
        let choice = self.kernels.linear.choose(first.format(), all_outputs, rows, x.arranged.is_some());
        let arranged = x.arranged.filter(|_| matches!(choice, Choice::Prompt(..)));
        let (mut outputs, mut blocks) = (0, 0);
        let mut params = [PartParams::default(); MAX_PARTS];
        for (part, params) in parts.iter().zip(&mut params) {
            check.that(part.cols() == first.cols(), || {
                format!("matrices of {} and {} inputs side by side", first.cols(), part.cols())
            })?;
            *params = PartParams {
                matrix: part.params(),
                out_column: (first_column + outputs) as u32,
                first_block: blocks as u32,
            };
            outputs += part.rows();
            blocks += part.rows().div_ceil(choice.outputs_of_a_block());
        }
        let params = LinearParams {
            parts: params,
            x: arranged.unwrap_or(x.address),
            indices: x.indices,
            out: out.memory.address(),
            part_count: parts.len() as u32,
            x_cols: x.stride as u32,
            out_cols: out.stride as u32,
            rows: rows as u32,
            mode: mode as u32,
        };
        let (kernel, extent) = choice.launch(self.kernels.linear.card, blocks, rows);
        self.driver.launch(check.0, kernel, extent, &params)?;
        Ok(outputs)
    }
}
