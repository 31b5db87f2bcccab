//! Exact integer products of one tile of weights and a few rows of int8 activations.
//!
//! A tile is 16 outputs. A *quad* is four consecutive inputs; a group has 32. An int8 line holds one quad,
//! `line[4·output + input]`; an int4 line holds two in its low and high nibbles, the even quad low, as code + 8.
//! Per group the dot product is exact in i32; then `sum += f32(dot) · (weight scale · input scale)`, groups in order,
//! two roundings each: the definition, so every instruction set gives the same bits.

#![expect(unsafe_code, reason = "calls functions compiled for instructions that a token proves")]

use qwill_device::GROUP;
use qwill_device::numeric::f16_to_f32;

use super::Level;
use crate::fast::pack::{HalfLine, Line, TILE};

/// Lines of a group of int8 codes: one per quad.
pub(super) const INT8_LINES: usize = GROUP / 4;
/// Lines of a group of int4 codes: one per two quads.
pub(super) const INT4_LINES: usize = GROUP / 8;

/// One tile's codes and scales.
#[derive(Debug, Clone, Copy)]
pub(in crate::fast) struct IntTile<'a> {
    /// `[groups, lines of a group]`.
    pub(in crate::fast) codes: &'a [Line],
    /// `[groups]`, f16 bits of the 16 outputs.
    pub(in crate::fast) scales: &'a [HalfLine],
}

/// Consecutive rows of quantised activations.
#[derive(Debug, Clone, Copy)]
pub(in crate::fast) struct IntRows<'a> {
    /// `[rows, groups · GROUP]`, −127 ..= 127.
    pub(in crate::fast) codes: &'a [i8],
    /// `[rows, groups]`.
    pub(in crate::fast) scales: &'a [f32],
    /// `[rows, groups]`: sums of a group's codes.
    pub(in crate::fast) sums: &'a [i32],
    /// Groups of a row.
    pub(in crate::fast) groups: usize,
}

impl IntRows<'_> {
    fn check(&self, rows: usize, tile: IntTile<'_>, lines: usize) {
        let groups = self.groups;
        assert!(self.codes.len() >= rows * groups * GROUP && self.scales.len() >= rows * groups);
        assert!(self.sums.len() >= rows * groups);
        assert!(tile.codes.len() >= groups * lines && tile.scales.len() >= groups);
    }
}

/// `R` rows times a tile of int4 codes.
#[inline]
pub(in crate::fast) fn int4_tile<const R: usize>(
    level: Level,
    tile: IntTile<'_>,
    rows: IntRows<'_>,
    out: &mut [[f32; TILE]; R],
) {
    rows.check(R, tile, INT4_LINES);
    match level {
        Level::Scalar(_) => int4_scalar(tile, rows, out),
        // SAFETY: the token proves the instructions, `check` the lengths.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(_) => unsafe { super::int_avx2::int4(tile, rows, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512(_) => unsafe { super::int_avx512::int4(tile, rows, out) },
    }
}

/// `R` rows times a tile of int8 codes.
#[inline]
pub(in crate::fast) fn int8_tile<const R: usize>(
    level: Level,
    tile: IntTile<'_>,
    rows: IntRows<'_>,
    out: &mut [[f32; TILE]; R],
) {
    rows.check(R, tile, INT8_LINES);
    match level {
        Level::Scalar(_) => int8_scalar(tile, rows, out),
        // SAFETY: the token proves the instructions, `check` the lengths.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(_) => unsafe { super::int_avx2::int8(tile, rows, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512(_) => unsafe { super::int_avx512::int8(tile, rows, out) },
    }
}

fn int4_scalar<const R: usize>(tile: IntTile<'_>, rows: IntRows<'_>, out: &mut [[f32; TILE]; R]) {
    scalar(rows, tile.scales, out, |group, inputs| {
        let mut dots = [0i32; TILE];
        for (line, octet) in tile.codes[group * INT4_LINES..].iter().zip(inputs.as_chunks::<8>().0) {
            for (dot, codes) in dots.iter_mut().zip(line.0.as_chunks::<4>().0) {
                for (input, code) in codes.iter().enumerate() {
                    *dot += (i32::from(code & 15) - 8) * i32::from(octet[input]);
                    *dot += (i32::from(code >> 4) - 8) * i32::from(octet[input + 4]);
                }
            }
        }
        dots
    });
}

fn int8_scalar<const R: usize>(tile: IntTile<'_>, rows: IntRows<'_>, out: &mut [[f32; TILE]; R]) {
    scalar(rows, tile.scales, out, |group, inputs| {
        let mut dots = [0i32; TILE];
        for (line, quad) in tile.codes[group * INT8_LINES..].iter().zip(inputs.as_chunks::<4>().0) {
            for (dot, codes) in dots.iter_mut().zip(line.0.as_chunks::<4>().0) {
                for (code, input) in codes.iter().zip(quad) {
                    *dot += i32::from(*code as i8) * i32::from(*input);
                }
            }
        }
        dots
    });
}

fn scalar<const R: usize>(
    rows: IntRows<'_>,
    scales: &[HalfLine],
    out: &mut [[f32; TILE]; R],
    dots: impl Fn(usize, &[i8]) -> [i32; TILE],
) {
    for (row, sums) in out.iter_mut().enumerate() {
        *sums = [0.0; TILE];
        for (group, scales) in scales.iter().enumerate().take(rows.groups) {
            let at = row * rows.groups + group;
            let dots = dots(group, &rows.codes[at * GROUP..(at + 1) * GROUP]);
            for ((sum, dot), scale) in sums.iter_mut().zip(dots).zip(scales.0) {
                *sum += dot as f32 * (f16_to_f32(scale) * rows.scales[at]);
            }
        }
    }
}
