//! [`super::int`] with AVX-512 VNNI: four products of unsigned and signed bytes at once, summed in i32.

#![expect(
    unsafe_code,
    clippy::cast_ptr_alignment,
    reason = "processor intrinsics; loads through these pointers are unaligned"
)]
#![allow(clippy::wildcard_imports, reason = "dozens of intrinsics")]

use std::arch::x86_64::*;

use qwill_device::GROUP;

use super::int::{INT4_LINES, INT8_LINES, IntRows, IntTile};
use crate::fast::pack::TILE;

/// # Safety
/// The processor has AVX-512 F, BW, DQ, VL, VNNI and F16C; tile and rows hold what `int::int4_tile` checks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn int4<const R: usize>(tile: IntTile<'_>, rows: IntRows<'_>, out: &mut [[f32; TILE]; R]) {
    let nibble = _mm512_set1_epi8(15);
    let mut sums = [_mm512_setzero_ps(); R];
    for group in 0..rows.groups {
        // Even and odd quads apart: two chains of dependent sums instead of one.
        let mut dots = [[_mm512_setzero_si512(); 2]; R];
        // SAFETY: `group` is below the checked number of groups, rows below R.
        unsafe {
            let codes = tile.codes.as_ptr().add(group * INT4_LINES).cast::<__m512i>();
            let inputs = rows.codes.as_ptr().add(group * GROUP).cast::<i32>();
            for line in 0..INT4_LINES {
                let both = _mm512_load_si512(codes.add(line));
                let low = _mm512_and_si512(both, nibble);
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(both), nibble);
                for (r, dots) in dots.iter_mut().enumerate() {
                    let quads = inputs.add(r * rows.groups * GROUP / 4 + 2 * line);
                    dots[0] = _mm512_dpbusd_epi32(dots[0], low, _mm512_set1_epi32(quads.read_unaligned()));
                    dots[1] =
                        _mm512_dpbusd_epi32(dots[1], high, _mm512_set1_epi32(quads.add(1).read_unaligned()));
                }
            }
            // The codes are stored with 8 added.
            combine(tile, rows, group, 8, &dots, &mut sums);
        }
    }
    store(&sums, out);
}

/// # Safety
/// As [`int4`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn int8<const R: usize>(tile: IntTile<'_>, rows: IntRows<'_>, out: &mut [[f32; TILE]; R]) {
    let top = _mm512_set1_epi8(i8::MIN);
    let mut sums = [_mm512_setzero_ps(); R];
    for group in 0..rows.groups {
        let mut dots = [[_mm512_setzero_si512(); 2]; R];
        // SAFETY: `group` is below the checked number of groups, rows below R.
        unsafe {
            let codes = tile.codes.as_ptr().add(group * INT8_LINES).cast::<__m512i>();
            let inputs = rows.codes.as_ptr().add(group * GROUP).cast::<i32>();
            for pair in 0..INT8_LINES / 2 {
                // Flipping the top bit adds 128 and makes the code unsigned.
                let even = _mm512_xor_si512(_mm512_load_si512(codes.add(2 * pair)), top);
                let odd = _mm512_xor_si512(_mm512_load_si512(codes.add(2 * pair + 1)), top);
                for (r, dots) in dots.iter_mut().enumerate() {
                    let quads = inputs.add(r * rows.groups * GROUP / 4 + 2 * pair);
                    dots[0] = _mm512_dpbusd_epi32(dots[0], even, _mm512_set1_epi32(quads.read_unaligned()));
                    dots[1] =
                        _mm512_dpbusd_epi32(dots[1], odd, _mm512_set1_epi32(quads.add(1).read_unaligned()));
                }
            }
            combine(tile, rows, group, 128, &dots, &mut sums);
        }
    }
    store(&sums, out);
}

/// `sum += f32(dot − added · Σ input codes) · (weight scale · input scale)`.
///
/// # Safety
/// `group` is a group of the tile and of the `R` rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn combine<const R: usize>(
    tile: IntTile<'_>,
    rows: IntRows<'_>,
    group: usize,
    added: i32,
    dots: &[[__m512i; 2]; R],
    sums: &mut [__m512; R],
) {
    // SAFETY: the caller's promise; a line of scales is 32 bytes.
    unsafe {
        let weight_scales =
            _mm512_cvtph_ps(_mm256_load_si256(tile.scales.as_ptr().add(group).cast::<__m256i>()));
        for r in 0..R {
            let at = r * rows.groups + group;
            let offset = _mm512_set1_epi32(added * *rows.sums.get_unchecked(at));
            let dot = _mm512_sub_epi32(_mm512_add_epi32(dots[r][0], dots[r][1]), offset);
            let scale = _mm512_mul_ps(weight_scales, _mm512_set1_ps(*rows.scales.get_unchecked(at)));
            sums[r] = _mm512_add_ps(sums[r], _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale));
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store<const R: usize>(sums: &[__m512; R], out: &mut [[f32; TILE]; R]) {
    for (sum, out) in sums.iter().zip(out) {
        // SAFETY: 16 elements are one vector.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *sum) };
    }
}
