//! A row-major matrix cut into blocks that several threads write at once.

#![expect(unsafe_code, reason = "column blocks of a row-major matrix cannot be split as slices")]

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

/// A matrix cut at row and column bounds; each block can be taken once.
pub(super) struct Blocks<'a, T = f32> {
    data: *mut T,
    stride: usize,
    row_bounds: Vec<usize>,
    col_bounds: Vec<usize>,
    taken: Vec<AtomicBool>,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: threads reach the elements only through `take`, which hands out every block once, and blocks do not
// overlap.
unsafe impl<T: Send> Sync for Blocks<'_, T> {}

/// One block, exclusively borrowed.
pub(super) struct Block<'a, T = f32> {
    data: *mut T,
    stride: usize,
    rows: usize,
    cols: usize,
    borrow: PhantomData<&'a mut [T]>,
}

impl<'a, T> Blocks<'a, T> {
    /// Cuts `data` (rows of `stride` elements) at ascending bounds: block `(i, j)` has rows
    /// `row_bounds[i]..row_bounds[i + 1]` and columns `col_bounds[j]..col_bounds[j + 1]`.
    pub(super) fn new(
        data: &'a mut [T],
        stride: usize,
        row_bounds: Vec<usize>,
        col_bounds: Vec<usize>,
    ) -> Self {
        assert!(row_bounds.is_sorted() && col_bounds.is_sorted(), "bounds must ascend");
        let (rows, cols) = (row_bounds.last().map_or(0, |r| *r), col_bounds.last().map_or(0, |c| *c));
        assert!(rows * stride <= data.len() && cols <= stride, "{rows} x {cols} outside the matrix");
        let blocks = row_bounds.len().saturating_sub(1) * col_bounds.len().saturating_sub(1);
        let taken = (0..blocks).map(|_| AtomicBool::new(false)).collect();
        Self { data: data.as_mut_ptr(), stride, row_bounds, col_bounds, taken, borrow: PhantomData }
    }

    /// Takes block `(i, j)`; panics when it was taken before.
    pub(super) fn take(&self, i: usize, j: usize) -> Block<'a, T> {
        let (first_row, end_row) = (self.row_bounds[i], self.row_bounds[i + 1]);
        let (first_col, end_col) = (self.col_bounds[j], self.col_bounds[j + 1]);
        let taken = &self.taken[i * (self.col_bounds.len() - 1) + j];
        assert!(!taken.swap(true, Ordering::Relaxed), "block {i}, {j} taken twice");
        // SAFETY: `new` checked that all bounds lie within the matrix.
        let data = unsafe { self.data.add((first_row * self.stride + first_col).min(self.end())) };
        Block {
            data,
            stride: self.stride,
            rows: end_row - first_row,
            cols: end_col - first_col,
            borrow: PhantomData,
        }
    }

    fn end(&self) -> usize {
        self.row_bounds.last().map_or(0, |rows| rows * self.stride)
    }
}

impl<T> Block<'_, T> {
    /// Number of rows.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }
    /// One row of the block.
    pub(super) fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row lies within the matrix and the block, which this one borrow owns.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.stride), self.cols) }
    }
    /// All elements of a block as wide as the matrix.
    pub(super) fn all_mut(&mut self) -> &mut [T] {
        assert!(self.cols == self.stride || self.rows <= 1, "rows of a block are not contiguous");
        // SAFETY: full rows are contiguous, lie within the matrix, and this one borrow owns them.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.rows * self.cols) }
    }
}

/// `0, step, 2·step, …, end`.
pub(super) fn steps(end: usize, step: usize) -> Vec<usize> {
    (0..end).step_by(step.max(1)).chain([end]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_the_matrix_once() {
        let (rows, stride) = (7, 11);
        let mut data = vec![0.0; rows * stride];
        let blocks = Blocks::new(&mut data, stride, vec![0, 3, 7], vec![0, 1, 4, 11]);
        for i in 0..2 {
            for j in 0..3 {
                let mut block = blocks.take(i, j);
                for row in 0..block.rows() {
                    for value in block.row_mut(row).iter_mut() {
                        *value += 1.0;
                    }
                }
            }
        }
        assert!(data.iter().all(|value| *value == 1.0));
        assert_eq!(steps(5, 2), [0, 2, 4, 5]);
        assert_eq!(steps(4, 2), [0, 2, 4]);
    }

    #[test]
    #[should_panic(expected = "taken twice")]
    fn a_block_cannot_be_taken_twice() {
        let mut data = vec![0.0; 4];
        let blocks = Blocks::new(&mut data, 2, vec![0, 2], vec![0, 2]);
        let _first = blocks.take(0, 0);
        let _second = blocks.take(0, 0);
    }
}
