//! Matrix products.

use std::sync::Arc;

use qwill_device::{DeviceError, GROUP, Phase, WeightFormat};

use super::linear_prompt::PromptKernels;
use super::linear_rounds::{RoundKernels, RoundProduct};
use super::rows::NORM_BLOCK;
use super::{Check, CudaBuffer, CudaDevice, CudaMatrix, CudaVector};
use crate::driver::{Extent, Function, Module};
use crate::launch::{LinearParams, MAX_PARTS, NormParams, PartParams};

/// What becomes of a sum; the values are those of linear.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Stored rounded.
    Round = 0,
    /// Added to what is there, the sum rounded.
    Add = 1,
    /// Stored as it is.
    Raw = 2,
    /// Two parts of as many outputs: the gated product of both.
    Swiglu = 3,
}

/// Shared memory of the kernels for any number of tokens: two groups of 64 tokens, and 32 sums a thread.
const MANY_SHARED_BYTES: usize = 2 * 64 * (GROUP + 8) * 2 + 32 * 256 * 4;

/// Outputs of a row tile, and runs of columns that are summed apart.
pub(super) const TILE_ROWS: usize = 16;
pub(super) const SPLITS: usize = 8;

/// Tokens that the kernels with rings take.
const RING_ROWS: usize = 8;

/// Shared memory of which a data-center card's SM holds one block: started early, the blocks of a launch that has fewer of
/// them than there are SMs would be put two on one SM, beside what still runs on the others.
const ALONE_SHARED_BYTES: usize = 116 << 10;

/// Entry points of linear.cu and `linear_many.cu`, and of `linear_rounds.cu` and `linear_prompt.cu` where the card has
/// them.
#[derive(Debug)]
pub(super) struct LinearKernels {
    int4: Family,
    int8: Family,
    bf16: Family,
    plain: Function,
    pub(super) rounds: Option<RoundKernels>,
    pub(super) prompt: Option<PromptKernels>,
    pub(super) card: Card,
}

/// The modules of the products.
pub(super) struct LinearModules {
    pub(super) ring: Arc<Module>,
    pub(super) many: Arc<Module>,
    pub(super) rounds: Option<Arc<Module>>,
    pub(super) prompt: Option<Arc<Module>>,
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
    /// For at most [`RING_ROWS`] tokens, by row tiles of a block, ascending.
    ring: Vec<Few>,
    /// For at most so many tokens, ascending.
    few: Vec<Few>,
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
        let alone_shared_bytes =
            if card.much_shared() { ALONE_SHARED_BYTES.max(shared_bytes) } else { shared_bytes };
        let kernel = module.early_function(name, alone_shared_bytes as u32)?;
        Ok(Self { most_rows: RING_ROWS, tokens: 8, row_tiles, shared_bytes, alone_shared_bytes, kernel })
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

/// What a launch is to compute.
#[derive(Debug, Clone, Copy)]
struct Product {
    format: WeightFormat,
    /// Of all parts.
    outputs: usize,
    rows: usize,
    mode: Mode,
}

impl LinearKernels {
    pub(super) fn new(modules: &LinearModules, card: Card) -> Result<Self, DeviceError> {
        let LinearModules { ring: module, many: many_module, .. } = modules;
        let ring = |large: usize, small: usize| if card.much_shared() { large } else { small };
        let many = |name: &str| many_module.early_function(name, MANY_SHARED_BYTES as u32);
        Ok(Self {
            int4: Family {
                ring: vec![
                    Few::ring(card, module, "int4_2", 2, 512, ring(6, 4))?,
                    Few::ring(card, module, "int4_3", 3, 512, ring(5, 4))?,
                    Few::ring(card, module, "int4_4", 4, 512, ring(4, 3))?,
                ],
                few: vec![
                    Few::registers(many_module, "int4_16", 4, 16, 16)?,
                    Few::registers(many_module, "int4_32", 3, 32, 64)?,
                ],
                many: many("int4_64")?,
            },
            int8: Family {
                ring: vec![
                    Few::ring(card, module, "int8_2", 2, 1024, 3)?,
                    Few::ring(card, module, "int8_4", 4, 1024, 2)?,
                ],
                few: vec![
                    Few::registers(many_module, "int8_16", 2, 16, 16)?,
                    Few::registers(many_module, "int8_32", 2, 32, 64)?,
                ],
                many: many("int8_64")?,
            },
            // 32 tokens and unpacked weights do not fit into registers.
            bf16: Family {
                ring: vec![Few::ring(card, module, "bf16_1", 1, 2048, 3)?],
                few: vec![Few::registers(many_module, "bf16_16", 2, 16, 16)?],
                many: many("bf16_64")?,
            },
            plain: module.early_function("plain", 0)?,
            rounds: modules.rounds.as_ref().map(RoundKernels::new).transpose()?,
            prompt: modules.prompt.as_ref().map(PromptKernels::new).transpose()?,
            card,
        })
    }

    /// The kernel of a product; the bits are the same whichever it is, apart for prompts and everything else.
    fn choose(&self, product: Product, arranged: Arranged) -> Choice<'_> {
        let Product { format, outputs, rows, mode } = product;
        match arranged {
            Arranged::No => {}
            Arranged::ForPrompts => {
                if let Some((kernel, tokens)) =
                    self.prompt.as_ref().and_then(|kernels| kernels.of(format, rows))
                {
                    return Choice::Prompt(kernel, tokens);
                }
            }
            Arranged::ForRounds => {
                if let Some(product) = self.rounds.as_ref().and_then(|kernels| kernels.of(format, rows)) {
                    return Choice::Round(product);
                }
            }
        }
        let family = match format {
            WeightFormat::Int4 => &self.int4,
            WeightFormat::Int8 => &self.int8,
            WeightFormat::Bf16 => &self.bf16,
            WeightFormat::F32 | WeightFormat::F16 => return Choice::Plain(&self.plain),
        };
        if rows <= RING_ROWS {
            // The fewest row tiles with which every block has an SM; else the most, which share the tokens. A pair of
            // matrices has half of a block's tiles each.
            let tiles = outputs.div_ceil(TILE_ROWS);
            let fits = |few: &&Few| tiles <= few.row_tiles * self.card.sm_count;
            let mut usable =
                family.ring.iter().filter(|few| mode != Mode::Swiglu || few.row_tiles.is_multiple_of(2));
            if let Some(few) = usable.clone().find(fits).or_else(|| usable.next_back()) {
                return Choice::Few(few);
            }
        }
        match family.few.iter().find(|few| rows <= few.most_rows) {
            Some(few) => Choice::Few(few),
            None => Choice::Many(&family.many),
        }
    }

    /// Whether a pair of matrices of a format can be one gated product, for rows of a phase.
    fn pairs(&self, format: WeightFormat, rows: usize, phase: Phase) -> bool {
        let packed = matches!(format, WeightFormat::Int4 | WeightFormat::Int8);
        packed && (rows <= RING_ROWS || self.rounds.is_some()) && phase == Phase::Rows
    }

    /// Which kernels the rows of an input are to be arranged for. Prompts' rows are multiplied by kernels of their own; the
    /// head takes chosen rows, of prompts as of rounds, and has one order of summation for both.
    pub(super) fn arrangement(&self, phase: Phase, product: ArrangedProduct) -> Arranged {
        let ArrangedProduct { rows, is_chosen, format, pairs } = product;
        if phase == Phase::Prefill && !is_chosen {
            let taken = self.prompt.as_ref().is_some_and(|kernels| kernels.of(format, rows).is_some());
            return if taken { Arranged::ForPrompts } else { Arranged::No };
        }
        // Up to 16 rows the kernels with tokens in registers are faster, but for pairs, which they do not take.
        let wanted = rows > 16 || rows > RING_ROWS && (pairs || format == WeightFormat::Int8);
        let taken = wanted && self.rounds.as_ref().is_some_and(|kernels| kernels.of(format, rows).is_some());
        if taken { Arranged::ForRounds } else { Arranged::No }
    }
}

/// What decides how the rows of an input are arranged.
#[derive(Debug, Clone, Copy)]
pub(super) struct ArrangedProduct {
    pub(super) rows: usize,
    /// Some rows of the input, by index.
    pub(super) is_chosen: bool,
    pub(super) format: WeightFormat,
    /// Two matrices make one gated product.
    pub(super) pairs: bool,
}

/// Whether rows lie as the tensor cores of Hopper cards want them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arranged {
    No,
    ForPrompts,
    ForRounds,
}

/// A kernel and how its grid covers outputs and rows.
enum Choice<'a> {
    Few(&'a Few),
    Many(&'a Function),
    Round(&'a RoundProduct),
    /// With the tokens of a block.
    Prompt(&'a Function, usize),
    Plain(&'a Function),
}

impl Choice<'_> {
    /// Outputs of a block, of a part in a format.
    fn outputs_of_a_block(&self, format: WeightFormat, mode: Mode) -> usize {
        let tiles = match self {
            // A bf16 matrix beside int4 ones has a row tile a block.
            Self::Few(few) if format == WeightFormat::Bf16 && few.most_rows == RING_ROWS => 1,
            Self::Few(few) => few.row_tiles,
            Self::Round(product) => product.row_tiles,
            Self::Many(_) | Self::Prompt(..) => 8,
            Self::Plain(_) => return 8,
        };
        tiles * TILE_ROWS / if mode == Mode::Swiglu { 2 } else { 1 }
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
            Self::Round(product) => product.launch(card, blocks, rows),
            Self::Prompt(kernel, tokens) => (kernel, PromptKernels::extent(*tokens, blocks, rows)),
            Self::Plain(kernel) => (kernel, Extent::new((blocks, rows, 1), 256)),
        }
    }

    /// Blocks along outputs that are not split.
    fn whole_blocks(&self, card: Card, blocks: usize, rows: usize) -> usize {
        match self {
            Self::Round(product) => product.whole_blocks(card, blocks, rows),
            _ => blocks,
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
    /// The same rows as Hopper's tensor cores want them, and for which kernels.
    pub(super) arranged: (Arranged, u64),
}

impl Input {
    /// Rows one after another.
    pub(super) fn plain(address: u64, stride: usize) -> Self {
        Self { address, indices: 0, stride, arranged: (Arranged::No, 0) }
    }
}

impl CudaBuffer {
    /// The buffer's rows as they are, for matrices of `cols` inputs.
    pub(super) fn input(&self, check: Check, rows: usize, cols: usize) -> Result<Input, DeviceError> {
        check.activations("input", self)?;
        check.buffer("input", self, rows, cols)?;
        check.that(cols == self.cols || cols.is_multiple_of(GROUP), || {
            format!("{cols} inputs in rows of {}: what follows them is not zero", self.cols)
        })?;
        Ok(Input::plain(self.memory.address(), self.stride))
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
        Ok(Input::plain(address, stride))
    }

    /// `out[row] = parts[0] · x[row] | parts[1] · x[row] | …`. Neighbours that one kernel takes share a launch.
    pub(super) fn multiply(
        &mut self,
        check: Check,
        rows: usize,
        x: Input,
        parts: &[&CudaMatrix],
        out: &mut CudaBuffer,
        mode: Mode,
    ) -> Result<(), DeviceError> {
        let outputs: usize = parts.iter().map(|part| part.rows()).sum();
        check.buffer("out", out, rows, if mode == Mode::Swiglu { outputs / 2 } else { outputs })?;
        match mode {
            Mode::Round | Mode::Add | Mode::Swiglu => check.activations("out", out)?,
            Mode::Raw => check.full("out", out)?,
        }
        let mut x = x;
        let mut out_column = 0;
        let prompts_apart = self.phase == Phase::Prefill && self.kernels.linear.prompt.is_some();
        let rings = rows <= RING_ROWS && !(prompts_apart && x.indices == 0);
        for joined in parts.chunk_by(|a, b| joins(a.format(), b.format(), rings)) {
            x = self.arranged_for(check, rows, x, joined, mode)?;
            for parts in joined.chunks(MAX_PARTS) {
                out_column += self.multiply_together(check, rows, x, parts, out, out_column, mode)?;
            }
        }
        Ok(())
    }

    /// The gated product of two matrices on normed rows where one launch can do it; `false`: it cannot, and nothing was
    /// done.
    pub(super) fn run_norm_swiglu(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        (norm, eps): (&CudaVector, f32),
        [gate, up]: [&CudaMatrix; 2],
        out: &mut CudaBuffer,
    ) -> Result<bool, DeviceError> {
        // Under the name of its larger part, for those who measure ops.
        let check = Check("norm_linears");
        let alike = gate.format() == up.format() && gate.rows() == up.rows() && gate.cols() == up.cols();
        if !alike || !self.kernels.linear.pairs(gate.format(), rows, self.phase) {
            return Ok(false);
        }
        check.that(gate.cols() == norm.len, || {
            format!("{} inputs after a norm of {}", gate.cols(), norm.len)
        })?;
        let x = self.normed(check, rows, x, norm, eps)?;
        self.multiply(check, rows, x, &[gate, up], out, Mode::Swiglu)?;
        Ok(true)
    }

    /// One launch for matrices that one kernel takes; returns their outputs.
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
        let product = Product { format: first.format(), outputs: all_outputs, rows, mode };
        let choice = self.kernels.linear.choose(product, x.arranged.0);
        let arranged = matches!(choice, Choice::Prompt(..) | Choice::Round(_));
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
            // The blocks of a gated product have tiles of both its parts.
            if mode != Mode::Swiglu || blocks == 0 {
                blocks += part.rows().div_ceil(choice.outputs_of_a_block(part.format(), mode));
            }
        }
        let card = self.kernels.linear.card;
        let (sums, arrivals) = match &choice {
            Choice::Round(_) => self.split_sums.addresses(&self.driver)?,
            _ => (0, 0),
        };
        let params = LinearParams {
            parts: params,
            x: if arranged { x.arranged.1 } else { x.address },
            indices: x.indices,
            out: out.memory.address(),
            sums,
            arrivals,
            part_count: if mode == Mode::Swiglu { 1 } else { parts.len() as u32 },
            x_cols: x.stride as u32,
            out_cols: out.stride as u32,
            rows: rows as u32,
            mode: mode as u32,
            whole_blocks: choice.whole_blocks(card, blocks, rows) as u32,
        };
        let (kernel, extent) = choice.launch(card, blocks, rows);
        self.driver.launch(check.0, kernel, extent, &params)?;
        Ok(outputs)
    }
}

/// Whether matrices on the same inputs share a launch: those of one format, and small bf16 ones behind int4 ones where
/// the kernels with rings take the rows.
fn joins(first: WeightFormat, second: WeightFormat, rings: bool) -> bool {
    first == second || rings && first == WeightFormat::Int4 && second == WeightFormat::Bf16
}
