//! AVX-512 vectors.

#![expect(unsafe_code, reason = "processor intrinsics")]
#![allow(clippy::wildcard_imports, reason = "dozens of intrinsics")]

use std::arch::x86_64::*;

use super::Simd;
use super::avx2::{largest_lane, sum_lanes};
use super::gemm::{Dots, Product};

/// Proof that the processor has AVX-512.
#[derive(Debug, Clone, Copy)]
pub(in crate::fast) struct Avx512(());

impl Avx512 {
    /// Only [`super::Level::new`] calls this, after asking the processor.
    pub(super) fn found() -> Self {
        Self(())
    }
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run_product(simd: Avx512, mut product: Product<'_>) {
    product.run(simd);
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run_dots(simd: Avx512, mut dots: Dots<'_>) {
    dots.run(simd);
}

const LANES: usize = 16;

/// The two halves of a vector.
///
/// # Safety
/// The processor has AVX-512 DQ.
#[inline(always)]
unsafe fn halves(value: __m512) -> (__m256, __m256) {
    // SAFETY: the caller's promise.
    unsafe { (_mm512_castps512_ps256(value), _mm512_extractf32x8_ps::<1>(value)) }
}

// SAFETY of every block below: the token proves the instructions; loads and stores check their slices.
impl Simd for Avx512 {
    type F = __m512;
    const LANES: usize = LANES;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn add_exponent(self, value: __m512, by: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let by = _mm512_slli_epi32::<23>(_mm512_castps_si512(by));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(value), by))
        }
    }
    #[inline(always)]
    fn sum(self, value: __m512) -> f32 {
        // SAFETY: see above.
        unsafe {
            let (low, high) = halves(value);
            sum_lanes(_mm256_add_ps(low, high))
        }
    }
    #[inline(always)]
    fn largest(self, value: __m512) -> f32 {
        // SAFETY: see above.
        unsafe {
            let (low, high) = halves(value);
            largest_lane(_mm256_max_ps(low, high))
        }
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(from[..LANES].as_ptr()) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32], value: __m512) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to[..LANES].as_mut_ptr(), value) }
    }
    #[inline(always)]
    unsafe fn load_from(self, from: *const f32) -> __m512 {
        // SAFETY: the token, and the caller's promise.
        unsafe { _mm512_loadu_ps(from) }
    }
    fn gemm(self, product: Product<'_>) {
        // SAFETY: the token proves the instructions.
        unsafe { run_product(self, product) }
    }
    fn gemm_transposed(self, dots: Dots<'_>) {
        // SAFETY: the token proves the instructions.
        unsafe { run_dots(self, dots) }
    }
}
