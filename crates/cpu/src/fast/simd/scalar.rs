//! Portable vectors: arrays that the compiler maps to whatever the target has.

use super::Simd;
use super::gemm::{Dots, Product};

/// Token of the portable instruction set.
#[derive(Debug, Clone, Copy)]
pub(in crate::fast) struct Scalar;

const LANES: usize = 8;
type Lanes = [f32; LANES];

#[inline(always)]
fn zip(a: Lanes, b: Lanes, op: impl Fn(f32, f32) -> f32) -> Lanes {
    std::array::from_fn(|lane| op(a[lane], b[lane]))
}

#[inline(always)]
fn fold(value: Lanes, op: impl Fn(f32, f32) -> f32) -> f32 {
    let four: [f32; 4] = std::array::from_fn(|lane| op(value[lane], value[lane + 4]));
    op(op(four[0], four[2]), op(four[1], four[3]))
}

impl Simd for Scalar {
    type F = Lanes;
    const LANES: usize = LANES;

    #[inline(always)]
    fn splat(self, value: f32) -> Lanes {
        [value; LANES]
    }
    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn mul_add(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }
    #[inline(always)]
    fn add_exponent(self, value: Lanes, by: Lanes) -> Lanes {
        zip(value, by, |value, by| f32::from_bits(value.to_bits().wrapping_add(by.to_bits() << 23)))
    }
    #[inline(always)]
    fn sum(self, value: Lanes) -> f32 {
        fold(value, |a, b| a + b)
    }
    #[inline(always)]
    fn largest(self, value: Lanes) -> f32 {
        fold(value, f32::max)
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> Lanes {
        std::array::from_fn(|lane| from[..LANES][lane])
    }
    #[inline(always)]
    fn store(self, to: &mut [f32], value: Lanes) {
        to[..LANES].copy_from_slice(&value);
    }
    #[expect(unsafe_code, reason = "the trait's unchecked load")]
    #[inline(always)]
    unsafe fn load_from(self, from: *const f32) -> Lanes {
        // SAFETY: the caller promises `LANES` readable elements; an array of f32 needs no more alignment.
        unsafe { from.cast::<Lanes>().read() }
    }
    #[inline(never)]
    fn gemm(self, mut product: Product<'_>) {
        product.run(self);
    }
    #[inline(never)]
    fn gemm_transposed(self, mut dots: Dots<'_>) {
        dots.run(self);
    }
}
