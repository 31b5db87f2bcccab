//! Elementary functions on vectors.

use super::Simd;

/// Adding this to a small f32 rounds it to an integer, which then stands in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// `e^x` for finite x, to about one unit in the last place; clamped to `e^−87 ..= e^88`.
///
/// Cody and Waite's reduction by `ln 2` in two parts, then the polynomial of Cephes' `expf` on ±½ ln 2.
#[inline(always)]
pub(in crate::fast) fn exp<S: Simd>(simd: S, x: S::F) -> S::F {
    let constant = |value: f32| simd.splat(value);
    let x = simd.min(simd.max(x, constant(-87.0)), constant(88.0));
    let shifted = simd.mul_add(x, constant(std::f32::consts::LOG2_E), constant(ROUNDER));
    let power = simd.sub(shifted, constant(ROUNDER));
    let rest = simd.mul_add(power, constant(-0.693_359_4), x);
    let rest = simd.mul_add(power, constant(2.121_944_4e-4), rest);
    let mut series = constant(1.987_569_1e-4);
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        series = simd.mul_add(series, rest, constant(coefficient));
    }
    let squared = simd.mul(rest, rest);
    let value = simd.add(simd.mul_add(series, squared, rest), constant(1.0));
    simd.add_exponent(value, shifted)
}

/// `1 / (1 + e^(−x))`.
#[inline(always)]
pub(in crate::fast) fn sigmoid<S: Simd>(simd: S, x: S::F) -> S::F {
    simd.div(simd.splat(1.0), simd.add(simd.splat(1.0), exp(simd, simd.sub(simd.splat(0.0), x))))
}

/// `x / (1 + e^(−x))`.
#[inline(always)]
pub(in crate::fast) fn silu<S: Simd>(simd: S, x: S::F) -> S::F {
    simd.div(x, simd.add(simd.splat(1.0), exp(simd, simd.sub(simd.splat(0.0), x))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fast::simd::Scalar;

    #[test]
    fn exponentials_are_within_an_ulp_or_so_and_finite_everywhere() {
        let mut worst = 0.0f64;
        for step in -870_000..=880_000 {
            let x = step as f32 / 10_000.0;
            let found = f64::from(exp(Scalar, Scalar.splat(x))[0]);
            worst = worst.max((found / f64::from(x).exp() - 1.0).abs());
        }
        assert!(worst < 2e-7, "relative error {worst}");
        for x in [f32::NEG_INFINITY, f32::MIN, -1e4, 1e4, f32::MAX, f32::INFINITY, f32::NAN] {
            assert!(exp(Scalar, Scalar.splat(x))[0].is_finite(), "{x}");
        }
    }
}
