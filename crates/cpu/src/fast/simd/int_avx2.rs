//! [`super::int`] with AVX2: products of unsigned and signed bytes, summed pairwise in i16.

#![expect(
    unsafe_code,
    clippy::cast_ptr_alignment,
    reason = "processor intrinsics; loads through these pointers are unaligned"
)]
#![allow(clippy::wildcard_imports, reason = "dozens of intrinsics")]

use std::arch::asm;
use std::arch::x86_64::*;

use qwill_device::GROUP;

use super::int::{INT4_LINES, INT8_LINES, IntRows, IntTile};
use crate::fast::pack::TILE;

/// Lines of int4 codes whose products fit in i16 together: eight sums of two products of at most 15 · 127.
const LINES_IN_I16: usize = 4;

/// # Safety
/// The processor has AVX2, FMA and F16C; tile and rows hold what `int::int4_tile` checks.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn int4<const R: usize>(tile: IntTile<'_>, rows: IntRows<'_>, out: &mut [[f32; TILE]; R]) {
    let nibble = _mm256_set1_epi8(15);
    let ones = _mm256_set1_epi16(1);
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for group in 0..rows.groups {
        let mut dots = [[_mm256_setzero_si256(); 2]; R];
        // SAFETY: `group` is below the checked number of groups, rows below R.
        unsafe {
            let codes = tile.codes.as_ptr().add(group * INT4_LINES).cast::<__m256i>();
            let inputs = rows.codes.as_ptr().add(group * GROUP).cast::<i32>();
            for block in 0..INT4_LINES / LINES_IN_I16 {
                let mut pairs = [[_mm256_setzero_si256(); 2]; R];
                for line in block * LINES_IN_I16..(block + 1) * LINES_IN_I16 {
                    let first = _mm256_load_si256(codes.add(2 * line));
                    let second = _mm256_load_si256(codes.add(2 * line + 1));
                    let low = [_mm256_and_si256(first, nibble), _mm256_and_si256(second, nibble)];
                    let high = [
                        _mm256_and_si256(_mm256_srli_epi16::<4>(first), nibble),
                        _mm256_and_si256(_mm256_srli_epi16::<4>(second), nibble),
                    ];
                    for (r, pairs) in pairs.iter_mut().enumerate() {
                        let quads = inputs.add(r * rows.groups * GROUP / 4 + 2 * line);
                        let even = _mm256_set1_epi32(quads.read_unaligned());
                        let odd = _mm256_set1_epi32(quads.add(1).read_unaligned());
                        for half in 0..2 {
                            let sum = _mm256_add_epi16(pairs[half], _mm256_maddubs_epi16(low[half], even));
                            pairs[half] =
                                pinned(_mm256_add_epi16(sum, _mm256_maddubs_epi16(high[half], odd)));
                        }
                    }
                }
                for (dots, pairs) in dots.iter_mut().zip(&pairs) {
                    for (dot, pairs) in dots.iter_mut().zip(pairs) {
                        *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(*pairs, ones));
                    }
                }
            }
            let weight_scales = load_scales(tile, group);
            for r in 0..R {
                let at = r * rows.groups + group;
                // The codes are stored with 8 added.
                let offset = _mm256_set1_epi32(8 * *rows.sums.get_unchecked(at));
                for half in 0..2 {
                    let dot = _mm256_sub_epi32(dots[r][half], offset);
                    let scale =
                        _mm256_mul_ps(weight_scales[half], _mm256_set1_ps(*rows.scales.get_unchecked(at)));
                    sums[r][half] =
                        _mm256_add_ps(sums[r][half], _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale));
                }
            }
        }
    }
    store(&sums, out);
}

/// # Safety
/// As [`int4`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn int8<const R: usize>(tile: IntTile<'_>, rows: IntRows<'_>, out: &mut [[f32; TILE]; R]) {
    let ones = _mm256_set1_epi16(1);
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for group in 0..rows.groups {
        let mut dots = [[_mm256_setzero_si256(); 2]; R];
        // SAFETY: `group` is below the checked number of groups, rows below R.
        unsafe {
            let codes = tile.codes.as_ptr().add(group * INT8_LINES).cast::<__m256i>();
            let inputs = rows.codes.as_ptr().add(group * GROUP).cast::<i32>();
            for line in 0..INT8_LINES {
                let weights =
                    [_mm256_load_si256(codes.add(2 * line)), _mm256_load_si256(codes.add(2 * line + 1))];
                let sizes = [_mm256_abs_epi8(weights[0]), _mm256_abs_epi8(weights[1])];
                for (r, dots) in dots.iter_mut().enumerate() {
                    let quad = inputs.add(r * rows.groups * GROUP / 4 + line);
                    let quad = _mm256_set1_epi32(quad.read_unaligned());
                    for half in 0..2 {
                        // |w| · (a with the sign of w): at most 2 · 128 · 127, which i16 holds.
                        let signed = _mm256_sign_epi8(quad, weights[half]);
                        let pairs = _mm256_maddubs_epi16(sizes[half], signed);
                        dots[half] = pinned(_mm256_add_epi32(dots[half], _mm256_madd_epi16(pairs, ones)));
                    }
                }
            }
            let weight_scales = load_scales(tile, group);
            for r in 0..R {
                let scale = _mm256_set1_ps(*rows.scales.get_unchecked(r * rows.groups + group));
                for half in 0..2 {
                    let scale = _mm256_mul_ps(weight_scales[half], scale);
                    let product = _mm256_mul_ps(_mm256_cvtepi32_ps(dots[r][half]), scale);
                    sums[r][half] = _mm256_add_ps(sums[r][half], product);
                }
            }
        }
    }
    store(&sums, out);
}

/// The same value, opaque to the optimiser: it would otherwise turn the chains of integer sums into trees, which need
/// more registers than there are.
#[inline]
#[target_feature(enable = "avx2")]
fn pinned(mut value: __m256i) -> __m256i {
    // SAFETY: no instruction at all.
    unsafe { asm!("/* {0} */", inout(ymm_reg) value, options(pure, nomem, nostack, preserves_flags)) };
    value
}

/// # Safety
/// `group` is a group of the tile.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_scales(tile: IntTile<'_>, group: usize) -> [__m256; 2] {
    // SAFETY: the caller's promise; a line of scales is 32 bytes.
    unsafe {
        let scales = tile.scales.as_ptr().add(group).cast::<__m128i>();
        [_mm256_cvtph_ps(_mm_load_si128(scales)), _mm256_cvtph_ps(_mm_load_si128(scales.add(1)))]
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store<const R: usize>(sums: &[[__m256; 2]; R], out: &mut [[f32; TILE]; R]) {
    for (sums, out) in sums.iter().zip(out) {
        // SAFETY: 16 elements are two vectors.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), sums[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), sums[1]);
        }
    }
}
