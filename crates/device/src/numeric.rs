//! Number formats: f16 and bf16 as bit patterns, and how activations are rounded.

/// How a device rounds activations between ops. Part of the numerics mode: it changes the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activations {
    /// f32 throughout: the reference.
    F32,
    /// Every op rounds its result to bfloat16.
    Bf16,
    /// f32 between ops; inputs of int4 and int8 matrices are quantised to int8 per token and
    /// [`crate::GROUP`] inputs, products summed exactly in int32 within a group.
    Int8,
}

impl Activations {
    /// Name used in flags, metrics and benchmark rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }
    /// The value as an op of this mode stores it.
    #[inline]
    pub fn round(self, value: f32) -> f32 {
        match self {
            Self::Bf16 => bf16_to_f32(f32_to_bf16(value)),
            Self::F32 | Self::Int8 => value,
        }
    }
}

/// Widens bfloat16 bits.
#[inline]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to bfloat16, ties to even; NaN stays NaN.
#[inline]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    let round = 0x7fff + ((bits >> 16) & 1);
    ((bits.wrapping_add(round)) >> 16) as u16
}

/// Widens IEEE half bits, subnormals included.
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let exponent = u32::from(bits >> 10) & 31;
    let mantissa = u32::from(bits & 0x3ff);
    match exponent {
        0 => {
            // Subnormal: mantissa · 2^-24, exact in f32.
            let magnitude = mantissa as f32 * (1.0 / 16_777_216.0);
            f32::from_bits(magnitude.to_bits() | sign)
        }
        31 => f32::from_bits(sign | 0x7f80_0000 | (mantissa << 13)),
        _ => f32::from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13)),
    }
}

/// Rounds to IEEE half, ties to even; overflow gives infinity, NaN stays NaN.
#[inline]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00;
    }
    if magnitude >= 0x4780_0000 {
        return sign | 0x7c00; // 65536 and above
    }
    if magnitude < 0x3880_0000 {
        // Below the smallest normal half: let f32 addition do the rounding at 2^-24 steps.
        let rounded = f32::from_bits(magnitude) + 0.5;
        return sign | (rounded.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let rebased = magnitude - (112 << 23);
    let round = 0xfff + ((rebased >> 13) & 1);
    sign | ((rebased + round) >> 13) as u16 // a carry into infinity is the right rounding
}

/// Quantises a vector to int8 codes and returns the f16 bits of its scale, so that `code · scale` stands for a value.
///
/// The scale is `max|x| / 127` rounded to f16 (65504 at most), a code is `x / scale` rounded to the nearest, ties to even,
/// within ±127. Where the scale is 0 (a vector of zeros, or of values below 127 · 2^-25), all codes are 0. A vector with
/// a NaN or an infinity gets a NaN for a scale: what it holds cannot be mistaken for numbers.
pub fn quantize_vector(values: &[f32], codes: &mut [i8]) -> u16 {
    let finite = values.iter().all(|value| value.is_finite());
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let bits = if finite { f32_to_f16((largest / 127.0).min(65_504.0)) } else { 0x7e00 };
    let scale = f16_to_f32(bits);
    for (code, value) in codes.iter_mut().zip(values) {
        // The cast saturates only where the clamp has not already, and turns NaN into 0.
        *code = if scale > 0.0 { (value / scale).round_ties_even().clamp(-127.0, 127.0) as i8 } else { 0 };
    }
    bits
}

/// Rounds to IEEE half, ties to even; beyond the largest half, and for infinity, gives the largest half of that sign.
/// NaN stays NaN.
#[inline]
pub fn f32_to_f16_saturated(value: f32) -> u16 {
    const LARGEST: f32 = 65_504.0;
    f32_to_f16(value.clamp(-LARGEST, LARGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(values: &[f32]) -> (f32, Vec<i8>) {
        let mut codes = vec![1; values.len()];
        (f16_to_f32(quantize_vector(values, &mut codes)), codes)
    }

    #[test]
    fn a_vector_of_multiples_of_its_scale_survives() {
        let values: Vec<f32> = (-127i8..=127).map(|code| f32::from(code) * 0.25).collect();
        assert_eq!(quantized(&values), (0.25, (-127..=127).collect()));
        // 0.5 and 1.5 lie between two codes.
        assert_eq!(quantized(&[127.0, 0.5, 1.5, -0.5, -1.5]), (1.0, vec![127, 0, 2, 0, -2]));
    }

    #[test]
    fn no_value_is_further_from_its_code_than_half_a_step() {
        let mut seed = 1u64;
        for power in -20..=20 {
            let values: Vec<f32> = (0..64)
                .map(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    ((seed >> 40) as f32 / 8_388_608.0 - 1.0) * 2.0f32.powi(power)
                })
                .collect();
            let (scale, codes) = quantized(&values);
            let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            for (value, code) in values.iter().zip(codes) {
                // A scale is up to 2^-11 of itself too small, or 2^-25 where it is subnormal: the largest code is cut.
                let allowed = scale / 2.0 + (largest / 2048.0).max(127.0 * 2.0f32.powi(-25));
                assert!((value - f32::from(code) * scale).abs() <= allowed, "{value} as {code} of {scale}");
            }
        }
    }

    #[test]
    fn zeros_have_no_scale_and_what_is_no_number_stays_none() {
        assert_eq!(quantized(&[0.0, -0.0]), (0.0, vec![0, 0]));
        assert_eq!(quantized(&[1e-7, -1e-9]), (0.0, vec![0, 0]));
        for bad in [f32::NAN, f32::INFINITY] {
            let (scale, codes) = quantized(&[1.0, bad, -2.0]);
            assert!(scale.is_nan() && codes == [0, 0, 0]);
        }
        assert_eq!(quantized(&[f32::MAX, -f32::MAX, 65_504.0]), (65_504.0, vec![127, -127, 1]));
    }

    #[test]
    fn every_half_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let value = f16_to_f32(bits);
            if value.is_nan() {
                assert!(f16_to_f32(f32_to_f16(value)).is_nan());
            } else {
                assert_eq!(f32_to_f16(value), bits);
            }
        }
    }

    #[test]
    fn halves_round_to_the_nearest_with_ties_to_even() {
        for bits in 0..0x7bffu16 {
            let (low, high) = (f16_to_f32(bits), f16_to_f32(bits + 1));
            let middle = low + (high - low) / 2.0;
            let even = if bits.is_multiple_of(2) { bits } else { bits + 1 };
            assert_eq!(f32_to_f16(middle), even, "between {low} and {high}");
            assert_eq!(f32_to_f16(f32::from_bits(middle.to_bits() - 1)), bits);
            assert_eq!(f32_to_f16(f32::from_bits(middle.to_bits() + 1)), bits + 1);
            assert_eq!(f32_to_f16(-middle), even | 0x8000);
        }
        assert_eq!(f32_to_f16(65_519.0), 0x7bff);
        assert_eq!(f32_to_f16(65_520.0), 0x7c00);
        assert_eq!(f32_to_f16(f32::INFINITY), 0x7c00);
    }

    #[test]
    fn bfloat16_rounds_ties_to_even() {
        assert_eq!(f32_to_bf16(1.0), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8001)), 0x3f81);
        assert!(bf16_to_f32(f32_to_bf16(f32::NAN)).is_nan());
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
    }
}
