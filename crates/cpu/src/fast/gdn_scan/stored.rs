//! Parts of base states and rings in their storage type, shared out to threads.

use crate::fast::blocks::{Block, Blocks};
use crate::state::{Elements, Half};

/// [`Blocks`] of elements in any format.
pub(super) enum StoredBlocks<'a> {
    F32(Blocks<'a, f32>),
    Half(Half, Blocks<'a, u16>),
}

impl<'a> StoredBlocks<'a> {
    /// See [`Blocks::new`].
    pub(super) fn new(
        elements: &'a mut Elements,
        stride: usize,
        row_bounds: Vec<usize>,
        col_bounds: Vec<usize>,
    ) -> Self {
        match elements {
            Elements::F32(data) => Self::F32(Blocks::new(data, stride, row_bounds, col_bounds)),
            Elements::Half(half, data) => {
                Self::Half(*half, Blocks::new(data, stride, row_bounds, col_bounds))
            }
        }
    }

    /// See [`Blocks::take`].
    pub(super) fn take(&self, i: usize, j: usize) -> StoredBlock<'a> {
        match self {
            Self::F32(blocks) => StoredBlock::F32(blocks.take(i, j)),
            Self::Half(half, blocks) => StoredBlock::Half(*half, blocks.take(i, j)),
        }
    }
}

/// One block of [`StoredBlocks`].
pub(super) enum StoredBlock<'a> {
    F32(Block<'a, f32>),
    Half(Half, Block<'a, u16>),
}

impl StoredBlock<'_> {
    /// Reads `out.len()` columns of a row from `first` on.
    pub(super) fn load(&mut self, row: usize, first: usize, out: &mut [f32]) {
        match self {
            Self::F32(block) => out.copy_from_slice(&block.row_mut(row)[first..][..out.len()]),
            Self::Half(half, block) => half.widen(&block.row_mut(row)[first..], out),
        }
    }

    /// Rounds and writes columns of a row from `first` on.
    pub(super) fn store(&mut self, row: usize, first: usize, values: &[f32]) {
        match self {
            Self::F32(block) => block.row_mut(row)[first..][..values.len()].copy_from_slice(values),
            Self::Half(half, block) => half.narrow(values, &mut block.row_mut(row)[first..]),
        }
    }

    /// The whole block in f32: its own memory, or `wide` with the elements widened.
    pub(super) fn open<'b>(&'b mut self, wide: &'b mut [f32]) -> &'b mut [f32] {
        match self {
            Self::F32(block) => block.all_mut(),
            Self::Half(half, block) => {
                half.widen(block.all_mut(), wide);
                wide
            }
        }
    }

    /// Keeps what was changed in `wide` after [`StoredBlock::open`].
    pub(super) fn close(&mut self, wide: &[f32]) {
        if let Self::Half(half, block) = self {
            half.narrow(wide, block.all_mut());
        }
    }
}
