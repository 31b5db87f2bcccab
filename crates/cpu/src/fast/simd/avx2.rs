//! AVX2, FMA and F16C vectors.

#![expect(unsafe_code, reason = "processor intrinsics")]
#![allow(clippy::wildcard_imports, reason = "dozens of intrinsics")]

use std::arch::x86_64::*;

use super::Simd;
use super::gemm::{Dots, Product};

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(in crate::fast) struct Avx2(());

impl Avx2 {
    /// Only [`super::Level::new`] calls this, after asking the processor.
    pub(super) fn found() -> Self {
        Self(())
    }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_product(simd: Avx2, mut product: Product<'_>) {
    product.run(simd);
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_dots(simd: Avx2, mut dots: Dots<'_>) {
    dots.run(simd);
}

const LANES: usize = 8;

/// Lanes added pairwise: `i + 4`, `i + 2`, `i + 1`.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn sum_lanes(value: __m256) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps::<1>(value));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

/// The largest lane.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn largest_lane(value: __m256) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps::<1>(value));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
    }
}

// SAFETY of every block below: the token proves the instructions; loads and stores check their slices.
impl Simd for Avx2 {
    type F = __m256;
    const LANES: usize = LANES;

    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_set1_ps(value) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn add_exponent(self, value: __m256, by: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let by = _mm256_slli_epi32::<23>(_mm256_castps_si256(by));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), by))
        }
    }
    #[inline(always)]
    fn sum(self, value: __m256) -> f32 {
        // SAFETY: see above.
        unsafe { sum_lanes(value) }
    }
    #[inline(always)]
    fn largest(self, value: __m256) -> f32 {
        // SAFETY: see above.
        unsafe { largest_lane(value) }
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_loadu_ps(from[..LANES].as_ptr()) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32], value: __m256) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(to[..LANES].as_mut_ptr(), value) }
    }
    #[inline(always)]
    unsafe fn load_from(self, from: *const f32) -> __m256 {
        // SAFETY: the token, and the caller's promise.
        unsafe { _mm256_loadu_ps(from) }
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
