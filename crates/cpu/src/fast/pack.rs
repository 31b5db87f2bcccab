//! Weight matrices as the kernels read them: tiles of 16 outputs, inputs one after another.

use qwill_device::matrix::{MatrixElements, WeightFormat};
use qwill_device::numeric::f16_to_f32;
use qwill_device::{DeviceError, GROUP, MatrixData};

use super::blocks::{Blocks, steps};
use super::pool::Pool;
use super::simd::Simd;

/// Outputs of a tile.
pub(super) const TILE: usize = 16;

/// 64 bytes of codes on a cache line; see [`super::simd::IntTile`] for what they are.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [u8; 64]);

/// 16 half-precision bit patterns: one input, or one group's scales, of a tile.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct HalfLine(pub(super) [u16; TILE]);

/// 16 f32: one input of a tile.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct FloatLine(pub(super) [f32; TILE]);

/// A packed matrix `[rows, cols]`. Rows are padded to whole tiles with zeros, quantised columns to whole groups.
#[derive(Debug, Clone)]
pub struct Matrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) elements: Elements,
}

/// The elements of a [`Matrix`], tile by tile.
#[derive(Debug, Clone)]
pub(super) enum Elements {
    /// `[tiles, cols]`.
    F32(Vec<FloatLine>),
    /// `[tiles, cols]` IEEE half bits.
    F16(Vec<HalfLine>),
    /// `[tiles, cols]` bfloat16 bits.
    Bf16(Vec<HalfLine>),
    /// Codes `[tiles, groups, 32]`, scales `[tiles, groups]`.
    Int8 { codes: Vec<Line>, scales: Vec<HalfLine> },
    /// Codes `[tiles, groups, 16]`, scales `[tiles, groups]`.
    Int4 { codes: Vec<Line>, scales: Vec<HalfLine> },
}

/// Lines of a group of codes.
fn group_lines(format: WeightFormat) -> usize {
    if format == WeightFormat::Int4 { GROUP / 8 } else { GROUP / 4 }
}

/// Bytes of a packed matrix, exactly.
pub(super) fn packed_bytes(format: WeightFormat, rows: usize, cols: usize) -> u64 {
    let (tiles, groups) = (rows.div_ceil(TILE), cols.div_ceil(GROUP));
    let bytes = match format {
        WeightFormat::F32 => tiles * cols * size_of::<FloatLine>(),
        WeightFormat::F16 | WeightFormat::Bf16 => tiles * cols * size_of::<HalfLine>(),
        WeightFormat::Int8 | WeightFormat::Int4 => {
            tiles * groups * (group_lines(format) * size_of::<Line>() + size_of::<HalfLine>())
        }
    };
    bytes as u64
}

impl Matrix {
    /// All codes and elements zero.
    pub(super) fn empty(format: WeightFormat, rows: usize, cols: usize) -> Self {
        let (tiles, groups) = (rows.div_ceil(TILE), cols.div_ceil(GROUP));
        let halves = |lines: usize| vec![HalfLine([0; TILE]); lines];
        let codes = |zero: u8| vec![Line([zero; 64]); tiles * groups * group_lines(format)];
        let elements = match format {
            WeightFormat::F32 => Elements::F32(vec![FloatLine([0.0; TILE]); tiles * cols]),
            WeightFormat::F16 => Elements::F16(halves(tiles * cols)),
            WeightFormat::Bf16 => Elements::Bf16(halves(tiles * cols)),
            WeightFormat::Int8 => Elements::Int8 { codes: codes(0), scales: halves(tiles * groups) },
            WeightFormat::Int4 => Elements::Int4 { codes: codes(0x88), scales: halves(tiles * groups) },
        };
        Self { rows, cols, elements }
    }

    /// Packs a block of rows on all threads of the pool.
    pub(super) fn fill(
        &mut self,
        first_row: usize,
        block: &MatrixData<'_>,
        pool: &mut Pool,
    ) -> Result<(), DeviceError> {
        block
            .check_block(self.format(), self.rows, self.cols, first_row)
            .map_err(|reason| DeviceError::shape("matrix", reason))?;
        let (cols, groups, rows) = (self.cols, self.groups(), (first_row, block.rows));
        match (&mut self.elements, block.elements) {
            (Elements::F32(lines), MatrixElements::F32(values)) => {
                pack(lines, cols, rows, pool, |row, col, lane, line| {
                    line.0[lane] = values[row * cols + col];
                });
            }
            (Elements::F16(lines), MatrixElements::F16(bits))
            | (Elements::Bf16(lines), MatrixElements::Bf16(bits)) => {
                pack_halves(lines, cols, rows, pool, bits);
            }
            (Elements::Int8 { codes: lines, scales }, MatrixElements::Int8 { codes, scales: halves }) => {
                let per_tile = groups * group_lines(WeightFormat::Int8);
                pack(lines, per_tile, rows, pool, |row, quad, lane, line| {
                    for (input, byte) in line.0[4 * lane..4 * lane + 4].iter_mut().enumerate() {
                        let col = 4 * quad + input;
                        *byte = if col < cols { codes[row * cols + col] as u8 } else { 0 };
                    }
                });
                pack_halves(scales, groups, rows, pool, halves);
            }
            (Elements::Int4 { codes: lines, scales }, MatrixElements::Int4 { packed, scales: halves }) => {
                let (per_tile, row_bytes) = (groups * group_lines(WeightFormat::Int4), cols.div_ceil(2));
                let nibble = |row: usize, col: usize| {
                    let byte = if col < cols { packed[row * row_bytes + col / 2] } else { 0x88 };
                    if col.is_multiple_of(2) { byte & 15 } else { byte >> 4 }
                };
                pack(lines, per_tile, rows, pool, |row, octet, lane, line| {
                    for (input, byte) in line.0[4 * lane..4 * lane + 4].iter_mut().enumerate() {
                        let col = 8 * octet + input;
                        *byte = nibble(row, col) | nibble(row, col + 4) << 4;
                    }
                });
                pack_halves(scales, groups, rows, pool, halves);
            }
            _ => return Err(DeviceError::shape("matrix", "a block of another format")),
        }
        Ok(())
    }

    fn format(&self) -> WeightFormat {
        match self.elements {
            Elements::F32(_) => WeightFormat::F32,
            Elements::F16(_) => WeightFormat::F16,
            Elements::Bf16(_) => WeightFormat::Bf16,
            Elements::Int8 { .. } => WeightFormat::Int8,
            Elements::Int4 { .. } => WeightFormat::Int4,
        }
    }

    /// Groups of a row.
    pub(super) fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }

    /// Tiles of the matrix.
    pub(super) fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }

    /// Whether the elements are integer codes with a scale per group.
    pub(super) fn is_quantised(&self) -> bool {
        matches!(self.elements, Elements::Int8 { .. } | Elements::Int4 { .. })
    }

    /// Writes row `row` in f32: exactly `MatrixData::value` of each column.
    pub(super) fn widen_row(&self, row: usize, out: &mut [f32]) {
        let (tile, lane) = (row / TILE, row % TILE);
        let out = &mut out[..self.cols];
        let groups = self.groups();
        match &self.elements {
            Elements::F32(lines) => {
                for (value, line) in out.iter_mut().zip(&lines[tile * self.cols..]) {
                    *value = line.0[lane];
                }
            }
            Elements::F16(lines) => {
                for (value, line) in out.iter_mut().zip(&lines[tile * self.cols..]) {
                    *value = half(line.0[lane]);
                }
            }
            Elements::Bf16(lines) => {
                for (value, line) in out.iter_mut().zip(&lines[tile * self.cols..]) {
                    *value = brain(line.0[lane]);
                }
            }
            Elements::Int8 { codes, scales } => {
                let lines = &codes[tile * groups * (GROUP / 4)..];
                for (group, out) in out.chunks_mut(GROUP).enumerate() {
                    let scale = f16_to_f32(scales[tile * groups + group].0[lane]);
                    for (out, line) in out.chunks_mut(4).zip(&lines[group * (GROUP / 4)..]) {
                        for (value, code) in out.iter_mut().zip(&line.0[4 * lane..]) {
                            *value = f32::from(*code as i8) * scale;
                        }
                    }
                }
            }
            Elements::Int4 { codes, scales } => {
                let lines = &codes[tile * groups * (GROUP / 8)..];
                for (group, out) in out.chunks_mut(GROUP).enumerate() {
                    let scale = f16_to_f32(scales[tile * groups + group].0[lane]);
                    for (out, line) in out.chunks_mut(8).zip(&lines[group * (GROUP / 8)..]) {
                        let bytes = &line.0[4 * lane..4 * lane + 4];
                        let nibbles = bytes.iter().map(|b| b & 15).chain(bytes.iter().map(|b| b >> 4));
                        for (value, nibble) in out.iter_mut().zip(nibbles) {
                            *value = (f32::from(nibble) - 8.0) * scale;
                        }
                    }
                }
            }
        }
    }
}

/// [`pack`] of `[rows, lines of a tile]` half-precision bits.
fn pack_halves(
    lines: &mut [HalfLine],
    tile_lines: usize,
    rows: (usize, usize),
    pool: &mut Pool,
    bits: &[u16],
) {
    pack(lines, tile_lines, rows, pool, |row, index, lane, line| {
        line.0[lane] = bits[row * tile_lines + index];
    });
}

/// Into `[tiles, tile_lines]`: calls `fill(row of the block, line within the tile, lane, line)` for every row of every
/// line of a block of rows, given by its first row, which begins a tile, and their number.
fn pack<T: Send>(
    lines: &mut [T],
    tile_lines: usize,
    (first_row, rows): (usize, usize),
    pool: &mut Pool,
    fill: impl Fn(usize, usize, usize, &mut T) + Sync,
) {
    let (first_tile, tiles) = (first_row / TILE, rows.div_ceil(TILE));
    let lines = &mut lines[first_tile * tile_lines..(first_tile + tiles) * tile_lines];
    let per_piece = tiles.div_ceil(8 * pool.threads()).max(1);
    let bounds = steps(tiles, per_piece);
    let pieces = bounds.len() - 1;
    let blocks = Blocks::new(lines, tile_lines, bounds, vec![0, tile_lines]);
    pool.run(pieces, &|_, piece| {
        let mut block = blocks.take(piece, 0);
        for tile in 0..block.rows() {
            let first = (piece * per_piece + tile) * TILE;
            // Lane by lane: each reads its row of the source in order.
            for lane in 0..TILE.min(rows - first) {
                for (index, line) in block.row_mut(tile).iter_mut().enumerate() {
                    fill(first + lane, index, lane, line);
                }
            }
        }
    });
}

/// Widens IEEE half bits without branches.
#[inline(always)]
fn half(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // Moving the exponent by a multiplication also normalises subnormals.
    let finite = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let special = f32::from_bits(magnitude | 0x7f80_0000);
    let value = if bits & 0x7c00 == 0x7c00 { special } else { finite };
    f32::from_bits(value.to_bits() | u32::from(bits & 0x8000) << 16)
}

#[inline(always)]
fn brain(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Kernel: inputs `GROUP·group ..` of a tile as f32 `[inputs, TILE]`; returns how many inputs there are.
#[inline(always)]
pub(super) fn widen_group<S: Simd>(
    _simd: S,
    matrix: &Matrix,
    tile: usize,
    group: usize,
    out: &mut [f32],
) -> usize {
    let inputs = GROUP.min(matrix.cols - group * GROUP);
    let out = out.as_chunks_mut::<TILE>().0;
    let groups = matrix.groups();
    let dense = tile * matrix.cols + group * GROUP;
    match &matrix.elements {
        Elements::F32(lines) => {
            for (out, line) in out.iter_mut().zip(&lines[dense..dense + inputs]) {
                *out = line.0;
            }
        }
        Elements::F16(lines) => {
            for (out, line) in out.iter_mut().zip(&lines[dense..dense + inputs]) {
                *out = line.0.map(half);
            }
        }
        Elements::Bf16(lines) => {
            for (out, line) in out.iter_mut().zip(&lines[dense..dense + inputs]) {
                *out = line.0.map(brain);
            }
        }
        Elements::Int8 { codes, scales } => {
            let at = tile * groups + group;
            let scales = scales[at].0.map(half);
            let lines = &codes[at * (GROUP / 4)..(at + 1) * (GROUP / 4)];
            for (quad, line) in out.as_chunks_mut::<4>().0.iter_mut().zip(lines) {
                let words = words(line);
                for (input, out) in quad.iter_mut().enumerate() {
                    for ((value, word), scale) in out.iter_mut().zip(words).zip(scales) {
                        *value = (((word << (24 - 8 * input)) as i32) >> 24) as f32 * scale;
                    }
                }
            }
        }
        Elements::Int4 { codes, scales } => {
            let at = tile * groups + group;
            let scales = scales[at].0.map(half);
            let lines = &codes[at * (GROUP / 8)..(at + 1) * (GROUP / 8)];
            for (octet, line) in out.as_chunks_mut::<8>().0.iter_mut().zip(lines) {
                let words = words(line);
                for (input, out) in octet.iter_mut().enumerate() {
                    let shift = if input < 4 { 8 * input } else { 8 * (input - 4) + 4 };
                    for ((value, word), scale) in out.iter_mut().zip(words).zip(scales) {
                        *value = (((word >> shift) & 15) as i32 - 8) as f32 * scale;
                    }
                }
            }
        }
    }
    inputs
}

/// The four bytes of each output.
#[inline(always)]
fn words(line: &Line) -> [u32; TILE] {
    std::array::from_fn(|lane| {
        u32::from_le_bytes([
            line.0[4 * lane],
            line.0[4 * lane + 1],
            line.0[4 * lane + 2],
            line.0[4 * lane + 3],
        ])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fast::Isa;
    use crate::fast::simd::{Level, widen_group};

    /// Random data of every format at a shape, handed to `check`.
    fn with_all_formats(rows: usize, cols: usize, mut check: impl FnMut(&MatrixData<'_>)) {
        let bits: Vec<u16> = (0..rows * cols).map(|i| (i * 40_503 % 65_521) as u16 & 0xfbff).collect();
        let values: Vec<f32> = bits.iter().map(|b| f16_to_f32(*b)).collect();
        let codes: Vec<i8> = bits.iter().map(|b| *b as i8).collect();
        let packed: Vec<u8> = (0..rows * cols.div_ceil(2)).map(|i| (i * 167 + i / 256) as u8).collect();
        let groups = cols.div_ceil(GROUP);
        let scales: Vec<u16> =
            (0..rows * groups).map(|i| 0x2c00 + (i as u16 * 7) + 0x8000 * (i as u16 % 2)).collect();
        for elements in [
            MatrixElements::F32(&values),
            MatrixElements::F16(&bits),
            MatrixElements::Bf16(&bits),
            MatrixElements::Int8 { codes: &codes, scales: &scales },
            MatrixElements::Int4 { packed: &packed, scales: &scales },
        ] {
            check(&MatrixData { rows, cols, elements });
        }
    }

    #[test]
    fn rows_and_groups_widen_to_the_definition_bit_for_bit() {
        let mut pool = Pool::new(2).unwrap();
        for (rows, cols) in [(1, 1), (3, 5), (16, 128), (17, 129), (40, 300), (50, 257)] {
            with_all_formats(rows, cols, |data| {
                let mut matrix = Matrix::empty(data.format(), rows, cols);
                matrix.fill(0, data, &mut pool).unwrap();
                let mut row_values = vec![f32::NAN; cols];
                for row in 0..rows {
                    matrix.widen_row(row, &mut row_values);
                    for (col, value) in row_values.iter().enumerate() {
                        assert_eq!(value.to_bits(), data.value(row, col).to_bits(), "{:?}", data.format());
                    }
                }
                for isa in Isa::available() {
                    check_groups(Level::new(isa).unwrap(), &matrix, data);
                }
            });
        }
    }

    fn check_groups(level: Level, matrix: &Matrix, data: &MatrixData<'_>) {
        let mut block = vec![f32::NAN; GROUP * TILE];
        for row in 0..data.rows {
            for group in 0..matrix.groups() {
                let inputs = widen_group(level, matrix, row / TILE, group, &mut block);
                for input in 0..inputs {
                    let (found, expected) =
                        (block[input * TILE + row % TILE], data.value(row, group * GROUP + input));
                    assert_eq!(found.to_bits(), expected.to_bits(), "{level:?} {:?}", data.format());
                }
            }
        }
    }

    #[test]
    fn bytes_are_those_that_are_allocated() {
        let mut pool = Pool::new(1).unwrap();
        for (rows, cols) in [(1, 1), (16, 128), (33, 300)] {
            with_all_formats(rows, cols, |data| {
                let mut matrix = Matrix::empty(data.format(), rows, cols);
                matrix.fill(0, data, &mut pool).unwrap();
                let allocated = match &matrix.elements {
                    Elements::F32(lines) => size_of_val(&lines[..]),
                    Elements::F16(lines) | Elements::Bf16(lines) => size_of_val(&lines[..]),
                    Elements::Int8 { codes, scales } | Elements::Int4 { codes, scales } => {
                        size_of_val(&codes[..]) + size_of_val(&scales[..])
                    }
                };
                assert_eq!(packed_bytes(data.format(), rows, cols), allocated as u64);
            });
        }
    }
}
