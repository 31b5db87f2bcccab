//! Vectors of f32 behind one trait, so that a kernel is written once and compiled for every instruction set.
//!
//! A kernel is a generic, always inlined function whose first argument is a [`Simd`] token. `dispatch` wraps each
//! in functions compiled for AVX2 and AVX-512. A token of an instruction set exists only where [`Level::new`]
//! found it on the processor: holding one is the proof that its instructions may run.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dispatch;
mod gemm;
mod int;
#[cfg(target_arch = "x86_64")]
mod int_avx2;
#[cfg(target_arch = "x86_64")]
mod int_avx512;
mod math;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
pub(super) use dispatch::*;
pub(super) use gemm::{From, gemm, gemm_transposed};
pub(super) use int::{IntRows, IntTile, int4_tile, int8_tile};
pub(super) use math::{exp, sigmoid, silu};
pub(super) use scalar::Scalar;

use super::Isa;

/// Most lanes of any instruction set.
pub(super) const MAX_LANES: usize = 16;

/// Vectors of `LANES` f32 of one instruction set.
///
/// Every operation is exact IEEE arithmetic, lane by lane, except `mul_add`, which may round once or twice.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// A vector.
    type F: Copy;
    /// Lanes of a vector.
    const LANES: usize;

    fn splat(self, value: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a·b + c`.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Adds `bits(by) << 23` to the bits of `value`: multiplies by a power of two whose exponent stands in the
    /// low bits of `by`.
    fn add_exponent(self, value: Self::F, by: Self::F) -> Self::F;
    /// Lanes 0–7, then 8–15 where there are 16, added pairwise: `i + 4`, `i + 2`, `i + 1`.
    fn sum(self, value: Self::F) -> f32;
    /// The largest lane.
    fn largest(self, value: Self::F) -> f32;
    /// The first [`Simd::LANES`] elements.
    fn load(self, from: &[f32]) -> Self::F;
    /// Writes the first [`Simd::LANES`] elements.
    fn store(self, to: &mut [f32], value: Self::F);
    /// Unaligned load.
    ///
    /// # Safety
    /// [`Simd::LANES`] elements can be read at `from`.
    #[expect(unsafe_code, reason = "kernels that check their bounds once need loads that do not")]
    unsafe fn load_from(self, from: *const f32) -> Self::F;

    /// Runs a product in a function compiled for the instruction set: one copy for all callers.
    fn gemm(self, product: gemm::Product<'_>);
    /// As [`Simd::gemm`].
    fn gemm_transposed(self, dots: gemm::Dots<'_>);

    /// Up to [`Simd::LANES`] elements, the other lanes 0.
    #[inline(always)]
    fn load_part(self, from: &[f32]) -> Self::F {
        if from.len() >= Self::LANES {
            return self.load(from);
        }
        let mut lanes = [0.0; MAX_LANES];
        lanes[..from.len()].copy_from_slice(from);
        self.load(&lanes)
    }
    /// Writes as many lanes as fit.
    #[inline(always)]
    fn store_part(self, to: &mut [f32], value: Self::F) {
        if to.len() >= Self::LANES {
            return self.store(to, value);
        }
        let mut lanes = [0.0; MAX_LANES];
        self.store(&mut lanes, value);
        to.copy_from_slice(&lanes[..to.len()]);
    }
}

/// Where vectors that cover `len` elements begin: the last one is moved back to end with the last element, so only
/// fewer elements than a vector need [`Simd::load_part`]. For loops that do not read what they write.
#[inline(always)]
pub(super) fn starts<S: Simd>(_simd: S, len: usize) -> impl Iterator<Item = usize> {
    let last = len.saturating_sub(S::LANES);
    (0..len).step_by(S::LANES).map(move |start| start.min(last))
}

/// An instruction set that was found on this processor, with its token.
#[derive(Debug, Clone, Copy)]
pub(super) enum Level {
    Scalar(Scalar),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Level {
    /// `None` where the processor has no such instructions.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        if !isa.is_available() {
            return None;
        }
        match isa {
            Isa::Scalar => Some(Self::Scalar(Scalar)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Some(Self::Avx2(Avx2::found())),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Some(Self::Avx512(Avx512::found())),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => None,
        }
    }
}
