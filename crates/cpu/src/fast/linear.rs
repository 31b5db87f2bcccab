//! Matrix products: which thread does what, and in which order.
//!
//! The bits of an output depend on its weights and its row alone: one chain of sums over the inputs, whatever
//! rows, tiles and threads are beside it.

use std::ops::Range;

use qwill_device::{Activations, GROUP};

use super::blocks::{Block, Blocks};
use super::elementwise::round_row;
use super::pack::{self, Elements, Matrix, TILE};
use super::pool::Pool;
use super::quantize::QuantisedRows;
use super::scratch::Workers;
use super::simd::{self, From, IntTile, Level, Simd, gemm, int4_tile, int8_tile};
use crate::Buffer;

/// Bytes of activations that stay in the second-level cache while tiles of weights pass by.
const ROWS_BYTES: usize = 192 << 10;

/// What becomes of a product.
#[derive(Debug, Clone, Copy)]
pub(super) enum Store {
    /// Stored, rounded to the activation type.
    Set(Activations),
    /// Added to the old contents, the sum rounded to the activation type.
    Add(Activations),
    /// Stored in f32.
    Exact,
}

/// Rows on their way into a product.
#[derive(Debug, Clone, Copy)]
pub(super) struct Input<'a> {
    /// Rows in f32, `stride` apart.
    pub(super) values: &'a [f32],
    /// Elements from row to row.
    pub(super) stride: usize,
    /// Number of rows.
    pub(super) rows: usize,
    /// The same rows as int8 codes; given when integer matrices are to use them.
    pub(super) quantised: Option<&'a QuantisedRows>,
}

/// Tiles of one part that one thread does at once.
struct Piece<'a> {
    matrix: &'a Matrix,
    tiles: Range<usize>,
}

/// `out[row] = parts[0]·x[row] | parts[1]·x[row] | …`, stored as `store` says. Shapes have been checked.
pub(super) fn multiply(
    (level, pool, workers): (Level, &mut Pool, &Workers),
    input: Input<'_>,
    parts: &[&Matrix],
    store: Store,
    out: &mut Buffer,
) {
    let (pieces, col_bounds) = cut(parts, pool.threads());
    let blocks = Blocks::new(&mut out.data, out.cols, vec![0, input.rows], col_bounds);
    pool.run(pieces.len(), &|worker, index| {
        let piece = &pieces[index];
        let mut block = blocks.take(0, index);
        match (input.quantised, piece.matrix.is_quantised()) {
            (Some(quantised), true) => integer_piece(level, piece, quantised, store, &mut block),
            _ => float_piece(level, piece, input, (workers, worker), store, &mut block),
        }
    });
}

/// Cuts the parts into pieces of whole tiles, several per thread so that an interrupted thread delays little, and
/// gives the columns where they begin and end.
fn cut<'a>(parts: &[&'a Matrix], threads: usize) -> (Vec<Piece<'a>>, Vec<usize>) {
    let tiles: usize = parts.iter().map(|matrix| matrix.tiles()).sum();
    let per_piece = if threads == 1 { tiles } else { tiles.div_ceil(8 * threads) };
    let (mut pieces, mut bounds, mut first_col) = (Vec::new(), vec![0], 0);
    for matrix in parts {
        for first in (0..matrix.tiles()).step_by(per_piece.max(1)) {
            let end = (first + per_piece).min(matrix.tiles());
            pieces.push(Piece { matrix, tiles: first..end });
            bounds.push(first_col + (end * TILE).min(matrix.rows));
        }
        first_col += matrix.rows;
    }
    (pieces, bounds)
}

fn integer_piece(level: Level, piece: &Piece<'_>, input: &QuantisedRows, store: Store, out: &mut Block<'_>) {
    let chunk = (ROWS_BYTES / (piece.matrix.groups() * GROUP)).max(4) / 4 * 4;
    for first in (0..out.rows()).step_by(chunk) {
        let end = (first + chunk).min(out.rows());
        for tile in piece.tiles.clone() {
            let mut row = first;
            let first_col = (tile - piece.tiles.start) * TILE;
            while row < end {
                row += match end - row {
                    1 => integer_rows::<1>(level, piece.matrix, tile, input, row, (first_col, store), out),
                    2 => integer_rows::<2>(level, piece.matrix, tile, input, row, (first_col, store), out),
                    3 => integer_rows::<3>(level, piece.matrix, tile, input, row, (first_col, store), out),
                    _ => integer_rows::<4>(level, piece.matrix, tile, input, row, (first_col, store), out),
                };
            }
        }
    }
}

/// `R` rows of one tile; returns `R`.
fn integer_rows<const R: usize>(
    level: Level,
    matrix: &Matrix,
    tile: usize,
    input: &QuantisedRows,
    row: usize,
    (first_col, store): (usize, Store),
    out: &mut Block<'_>,
) -> usize {
    let groups = matrix.groups();
    let mut sums = [[0.0; TILE]; R];
    let of_tile = |lines: usize| tile * groups * lines..(tile + 1) * groups * lines;
    match &matrix.elements {
        Elements::Int4 { codes, scales } => {
            let tile =
                IntTile { codes: &codes[of_tile(GROUP / 8)], scales: &scales[tile * groups..][..groups] };
            int4_tile(level, tile, input.rows_from(row), &mut sums);
        }
        Elements::Int8 { codes, scales } => {
            let tile =
                IntTile { codes: &codes[of_tile(GROUP / 4)], scales: &scales[tile * groups..][..groups] };
            int8_tile(level, tile, input.rows_from(row), &mut sums);
        }
        // `multiply` sends integer matrices only.
        Elements::F32(_) | Elements::F16(_) | Elements::Bf16(_) => {}
    }
    for (r, sums) in sums.iter().enumerate() {
        finish(sums, &mut out.row_mut(row + r)[first_col..], store);
    }
    R
}

/// Stores a tile's sums of one row, as many as the row has.
fn finish(sums: &[f32], out: &mut [f32], store: Store) {
    let len = sums.len().min(out.len());
    let (sums, out) = (&sums[..len], &mut out[..len]);
    match store {
        Store::Exact => out.copy_from_slice(sums),
        Store::Set(activations) => {
            out.copy_from_slice(sums);
            round_row(activations, out);
        }
        Store::Add(activations) => {
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
            round_row(activations, out);
        }
    }
}

/// Most rows that [`float_piece`] does at once: their sums stay in the first-level cache.
const FLOAT_ROWS: usize = 120;

/// Elements of work memory of a product of `rows` rows.
pub(super) fn memory(rows: usize) -> usize {
    (GROUP + rows.min(FLOAT_ROWS)) * TILE
}

fn float_piece(
    level: Level,
    piece: &Piece<'_>,
    input: Input<'_>,
    (workers, worker): (&Workers, usize),
    store: Store,
    out: &mut Block<'_>,
) {
    workers.with(worker, memory(input.rows), |memory| {
        let (widened, sums) = memory.split_at_mut(GROUP * TILE);
        for first in (0..input.rows).step_by(FLOAT_ROWS) {
            let rows = FLOAT_ROWS.min(input.rows - first);
            let values = &input.values[first * input.stride..];
            for tile in piece.tiles.clone() {
                simd::float_tile(level, piece.matrix, tile, values, input.stride, rows, widened, sums);
                let first_col = (tile - piece.tiles.start) * TILE;
                for (row, sums) in sums.chunks(TILE).enumerate().take(rows) {
                    finish(sums, &mut out.row_mut(first + row)[first_col..], store);
                }
            }
        }
    });
}

/// Kernel: `sums[row] = tile · values[row]`, the weights widened one group at a time.
#[inline(always)]
pub(super) fn float_tile_body<S: Simd>(
    simd: S,
    matrix: &Matrix,
    tile: usize,
    values: &[f32],
    stride: usize,
    rows: usize,
    widened: &mut [f32],
    sums: &mut [f32],
) {
    for group in 0..matrix.groups() {
        let inputs = pack::widen_group(simd, matrix, tile, group, widened);
        let from = if group == 0 { From::Zero } else { From::Old };
        let values = &values[group * GROUP..];
        gemm(simd, (rows, TILE, inputs), values, stride, 1, widened, TILE, sums, TILE, from);
    }
}

#[cfg(test)]
mod tests;
