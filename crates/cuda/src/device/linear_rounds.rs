//! Products of the more than eight rows of a round, on cards that have kernels of their own for them.

use std::sync::Arc;

use qwill_device::{DeviceError, GROUP, WeightFormat};

use super::linear::{Card, SPLITS, TILE_ROWS};
use crate::driver::{Driver, Extent, Function, Memory, Module};

/// Bytes of the runs' sums of split blocks; products that would need more are not split. 40 blocks of 128 outputs and 64
/// rows, as 5,120 outputs have.
const SUMS_BYTES: u64 = (40 * SPLITS * 64 * 8 * TILE_ROWS * 4) as u64;

/// Bytes of the counters of split blocks: fewer of them than of a card's SMs are split.
const ARRIVALS_BYTES: u64 = 4096;

/// Where the runs of split blocks meet.
#[derive(Debug, Default)]
pub(super) struct SplitSums(Option<(Memory, Memory)>);

impl SplitSums {
    pub(super) const BYTES: u64 = SUMS_BYTES + ARRIVALS_BYTES;

    /// Addresses of the sums and of the counters, which are 0 between launches.
    pub(super) fn addresses(&mut self, driver: &Arc<Driver>) -> Result<(u64, u64), DeviceError> {
        if self.0.is_none() {
            let sums = driver.allocate("sums of split products", SUMS_BYTES)?;
            let arrivals = driver.allocate("counters of split products", ARRIVALS_BYTES)?;
            arrivals.clear("linear", 0, ARRIVALS_BYTES)?;
            self.0 = Some((sums, arrivals));
        }
        Ok(self.0.as_ref().map_or((0, 0), |(sums, arrivals)| (sums.address(), arrivals.address())))
    }
}

/// Entry points of `linear_rounds.cu`, for 16, 32 and 64 tokens a block.
#[derive(Debug)]
pub(super) struct RoundKernels {
    int4: [RoundProduct; 3],
    int8: [RoundProduct; 3],
    bf16: [RoundProduct; 3],
}

/// A kernel: its blocks have some tokens and row tiles, a warp for each tile.
#[derive(Debug)]
pub(super) struct RoundProduct {
    pub(super) row_tiles: usize,
    tokens: usize,
    shared_bytes: usize,
    kernel: Function,
}

impl RoundKernels {
    pub(super) fn new(module: &Arc<Module>) -> Result<Self, DeviceError> {
        let product = |format: &str, row_tiles: usize, tile_bytes: usize, tokens: usize, stages: usize| {
            let stage = tokens * GROUP * 2 + row_tiles * (tile_bytes + TILE_ROWS * 2);
            let totals = tokens * (row_tiles * TILE_ROWS + 4) * 4;
            // What aligns the stages, two barriers a stage, and who came last.
            let shared_bytes = 1024 + stages * stage + totals + stages * 16 + 16;
            let kernel = module.early_function(&format!("{format}_round_{tokens}"), shared_bytes as u32)?;
            Ok(RoundProduct { row_tiles, tokens, shared_bytes, kernel })
        };
        Ok(Self {
            int4: [
                product("int4", 4, 1024, 16, 6)?,
                product("int4", 8, 1024, 32, 5)?,
                product("int4", 8, 1024, 64, 3)?,
            ],
            int8: [
                product("int8", 8, 2048, 16, 4)?,
                product("int8", 8, 2048, 32, 3)?,
                product("int8", 8, 2048, 64, 2)?,
            ],
            bf16: [
                product("bf16", 8, 4096, 16, 2)?,
                product("bf16", 8, 4096, 32, 2)?,
                product("bf16", 8, 4096, 64, 2)?,
            ],
        })
    }

    /// The kernel for matrices of a format and a number of rows, if there is one.
    pub(super) fn of(&self, format: WeightFormat, rows: usize) -> Option<&RoundProduct> {
        let products = match format {
            WeightFormat::Int4 => &self.int4,
            WeightFormat::Int8 => &self.int8,
            WeightFormat::Bf16 => &self.bf16,
            WeightFormat::F32 | WeightFormat::F16 => return None,
        };
        products.iter().find(|product| rows <= product.tokens).or(products.last())
    }
}

impl RoundProduct {
    /// Blocks along outputs that are not split. All SMs get the same number of whole blocks; those that are left over
    /// are split into their runs where that is done sooner.
    pub(super) fn whole_blocks(&self, card: Card, blocks: usize, rows: usize) -> usize {
        let (turns, left) = (blocks / card.sm_count, blocks % card.sm_count);
        let bytes = (left * SPLITS * self.tokens * self.row_tiles * TILE_ROWS * 4) as u64;
        let split_turns = (left * SPLITS).div_ceil(card.sm_count);
        let possible = rows <= self.tokens && bytes <= SUMS_BYTES && left as u64 * 4 <= ARRIVALS_BYTES;
        if possible && split_turns < SPLITS { turns * card.sm_count } else { blocks }
    }

    pub(super) fn launch(&self, card: Card, blocks: usize, rows: usize) -> (&Function, Extent) {
        let whole = self.whole_blocks(card, blocks, rows);
        let grid = (rows.div_ceil(self.tokens), whole + (blocks - whole) * SPLITS, 1);
        (&self.kernel, Extent::new(grid, self.row_tiles * 32).with_shared(self.shared_bytes))
    }
}
