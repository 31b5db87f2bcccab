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

#[cfg(test)]
mod tests {
    use super::*;

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
