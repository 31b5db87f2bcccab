//! Round to nearest, and which matrices it applies to.
//!
//! Groups of [`GROUP`] inputs; scale = max|w| / (2^(b−1) − ½) in f32, at least 1e-5, rounded to f16; code =
//! round-half-even(w / scale) clamped to [−2^(b−1), 2^(b−1) − 1], with the scale as rounded. The half in the
//! divisor lets the largest magnitude lie half a step beyond the last positive code, which halves the loss of
//! an asymmetric code range.

use qwill_device::numeric::{f16_to_f32, f32_to_f16};
use qwill_device::{GROUP, WeightFormat};

/// What to do with dense matrices at load. Matrices that are stored quantised stay as they are.
///
/// | matrices | `Int8` | `Int4` |
/// | --- | --- | --- |
/// | `q_proj k_proj v_proj o_proj`, `in_proj_qkv in_proj_z out_proj`, `gate_proj up_proj down_proj`, `mtp.fc` | int8 | int4 |
/// | `embed_tokens`, `lm_head` | int8 | int8 |
/// | `in_proj_a`, `in_proj_b` | as stored | as stored |
///
/// The last two are a thousandth of a layer and steer its decay and write strength; the head decides every
/// token. Vectors are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Quantize {
    /// Keep every matrix as stored.
    #[default]
    None,
    /// 8-bit codes.
    Int8,
    /// 4-bit codes, 8-bit embedding and head.
    Int4,
}

impl Quantize {
    /// Name in files.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// The format that a dense matrix of this canonical name is rounded to, `None` if it stays.
    pub(crate) fn target(self, name: &str) -> Option<WeightFormat> {
        match (self, name.rsplit('.').next()) {
            (Self::None, _) | (_, Some("in_proj_a" | "in_proj_b")) => None,
            (Self::Int8, _) | (Self::Int4, Some("embed_tokens" | "lm_head")) => Some(WeightFormat::Int8),
            (Self::Int4, _) => Some(WeightFormat::Int4),
        }
    }
}

/// Rounds `[rows, cols]` to 4 bits: packed nibbles `[rows, ceil(cols / 2)]` (even input low, stored as
/// code + 8, an odd row padded with code 0) and f16 scales `[rows, ceil(cols / GROUP)]`. A group that holds
/// NaN or infinity, or whose scale exceeds f16, gets a scale that is not finite.
///
/// # Panics
/// If `values` does not hold `rows * cols` elements.
pub fn quantize_int4(values: &[f32], rows: usize, cols: usize) -> (Vec<u8>, Vec<u16>) {
    assert_eq!(values.len(), rows * cols, "elements of a matrix [{rows}, {cols}]");
    let mut packed = vec![0; rows * cols.div_ceil(2)];
    let mut scales = vec![0; rows * cols.div_ceil(GROUP)];
    int4_rows(values, cols, |value| value, &mut packed, &mut scales);
    (packed, scales)
}

/// Rounds `[rows, cols]` to 8 bits: codes `[rows, cols]` and f16 scales `[rows, ceil(cols / GROUP)]`. A group
/// that holds NaN or infinity, or whose scale exceeds f16, gets a scale that is not finite.
///
/// # Panics
/// If `values` does not hold `rows * cols` elements.
pub fn quantize_int8(values: &[f32], rows: usize, cols: usize) -> (Vec<i8>, Vec<u16>) {
    assert_eq!(values.len(), rows * cols, "elements of a matrix [{rows}, {cols}]");
    let mut codes = vec![0; rows * cols];
    let mut scales = vec![0; rows * cols.div_ceil(GROUP)];
    int8_rows(values, cols, |value| value, &mut codes, &mut scales);
    (codes, scales)
}

/// [`quantize_int4`] of any element type, into memory for as many rows as there are values.
pub(crate) fn int4_rows<T: Copy>(
    values: &[T],
    cols: usize,
    widen: impl Fn(T) -> f32,
    packed: &mut [u8],
    scales: &mut [u16],
) {
    // Empty matrices have nothing to chunk.
    let rows = values.chunks_exact(cols.max(1)).zip(packed.chunks_exact_mut(cols.div_ceil(2).max(1)));
    for ((row, packed), scales) in rows.zip(scales.chunks_exact_mut(cols.div_ceil(GROUP).max(1))) {
        let groups = row.chunks(GROUP).zip(packed.chunks_mut(GROUP / 2));
        for ((group, packed), scale) in groups.zip(scales) {
            let (codes, rounded) = round_group::<4>(&padded(group, &widen));
            *scale = rounded;
            // The codes of a short group are followed by zeros, which pad an odd row.
            for (byte, pair) in packed.iter_mut().zip(codes.chunks_exact(2)) {
                *byte = pair[0] & 15 | pair[1] << 4;
            }
        }
    }
}

/// [`quantize_int8`] of any element type, into memory for as many rows as there are values.
pub(crate) fn int8_rows<T: Copy>(
    values: &[T],
    cols: usize,
    widen: impl Fn(T) -> f32,
    codes: &mut [i8],
    scales: &mut [u16],
) {
    let rows = values.chunks_exact(cols.max(1)).zip(codes.chunks_exact_mut(cols.max(1)));
    for ((row, codes), scales) in rows.zip(scales.chunks_exact_mut(cols.div_ceil(GROUP).max(1))) {
        for ((group, codes), scale) in row.chunks(GROUP).zip(codes.chunks_mut(GROUP)).zip(scales) {
            let (offset, rounded) = round_group::<8>(&padded(group, &widen));
            *scale = rounded;
            for (code, offset) in codes.iter_mut().zip(offset) {
                *code = (offset ^ 0x80) as i8;
            }
        }
    }
}

/// A group in f32, a short last one filled up with zeros: they change neither the scale nor other codes, and
/// every loop over a group has a fixed length.
#[inline]
fn padded<T: Copy>(group: &[T], widen: impl Fn(T) -> f32) -> [f32; GROUP] {
    let mut values = [0.0; GROUP];
    if let Ok(full) = <&[T; GROUP]>::try_from(group) {
        for (value, element) in values.iter_mut().zip(full) {
            *value = widen(*element);
        }
    } else {
        for (value, element) in values.iter_mut().zip(group) {
            *value = widen(*element);
        }
    }
    values
}

/// Rounds one group: codes + 2^(BITS−1), and the scale's f16 bits.
#[inline]
fn round_group<const BITS: u32>(values: &[f32; GROUP]) -> ([u8; GROUP], u16) {
    // 1.5·2^23: adding it to a small number rounds that to an integer, ties to even, and leaves the integer
    // in the low bits. Plain additions, so the loop becomes SIMD on every target.
    const ROUND: f32 = 12_582_912.0;
    let half = (1 << (BITS - 1)) as f32;
    // Magnitudes order like their bits, and NaN orders above all: it must not be lost in the maximum.
    let largest =
        values.iter().fold(0, |most, value| (value.to_bits() & 0x7fff_ffff).cast_signed().max(most));
    let wanted = f32::from_bits(largest.cast_unsigned()) / (half - 0.5);
    // Not `max`, which would drop NaN.
    let scale_bits = f32_to_f16(if wanted < 1e-5 { 1e-5 } else { wanted });
    let scale = f16_to_f32(scale_bits);
    let mut codes = [0; GROUP];
    for (code, value) in codes.iter_mut().zip(values) {
        let rounded = (value / scale).clamp(-half, half - 1.0) + ROUND;
        *code = (rounded.to_bits() as u8).wrapping_add(1 << (BITS - 1));
    }
    (codes, scale_bits)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use qwill_device::MatrixData;
    use qwill_device::matrix::MatrixElements;

    use super::*;

    #[test]
    fn the_policy_is_the_documented_one() {
        use WeightFormat::{Int4, Int8};
        let targets = |name: &str| (Quantize::Int8.target(name), Quantize::Int4.target(name));
        for name in [
            "layers.3.self_attn.q_proj",
            "layers.0.linear_attn.in_proj_z",
            "mtp.fc",
            "mtp.layers.0.mlp.up_proj",
        ] {
            assert_eq!(targets(name), (Some(Int8), Some(Int4)), "{name}");
            assert_eq!(Quantize::None.target(name), None);
        }
        assert_eq!(targets("embed_tokens"), (Some(Int8), Some(Int8)));
        assert_eq!(targets("lm_head"), (Some(Int8), Some(Int8)));
        assert_eq!(targets("layers.0.linear_attn.in_proj_a"), (None, None));
        assert_eq!(targets("layers.0.linear_attn.in_proj_b"), (None, None));
    }

    #[test]
    fn not_a_number_and_infinity_reach_the_scale() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
            let mut values = vec![0.5; 256];
            values[200] = bad;
            for scales in [quantize_int4(&values, 1, 256).1, quantize_int8(&values, 1, 256).1] {
                assert!(f16_to_f32(scales[0]).is_finite());
                assert!(!f16_to_f32(scales[1]).is_finite(), "{bad}");
            }
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let (packed, scales) = quantize_int4(&[0.0; 6], 2, 3);
        assert_eq!(packed, [0x88; 4]);
        assert_eq!(scales, [f32_to_f16(1e-5); 2]);
        assert!(quantize_int8(&[], 0, 0).0.is_empty());
        assert!(quantize_int4(&[], 3, 0).0.is_empty());
    }

    proptest! {
        /// The fast loops against the recipe written out, on any shape.
        #[test]
        fn codes_follow_the_recipe(rows in 1usize..4, cols in 1usize..300, seed in any::<u64>(), magnitude in -6i32..3) {
            let unit = |n: usize| crate::random::unit(crate::random::mix(seed.wrapping_add(n as u64)));
            let values: Vec<f32> = (0..rows * cols)
                .map(|n| (unit(n) - 0.5) * 10f32.powi(magnitude))
                .collect();
            let (packed, scales4) = quantize_int4(&values, rows, cols);
            let (codes, scales8) = quantize_int8(&values, rows, cols);
            let int4 = MatrixData { rows, cols, elements: MatrixElements::Int4 { packed: &packed, scales: &scales4 } };
            let int8 = MatrixData { rows, cols, elements: MatrixElements::Int8 { codes: &codes, scales: &scales8 } };
            prop_assert!(int4.check().is_ok() && int8.check().is_ok());
            for row in 0..rows {
                for col in 0..cols {
                    let group = &values[row * cols + col / GROUP * GROUP..row * cols + cols.min((col / GROUP + 1) * GROUP)];
                    let largest = group.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                    for (matrix, half) in [(&int4, 8.0f32), (&int8, 128.0)] {
                        let scale = f16_to_f32(f32_to_f16((largest / (half - 0.5)).max(1e-5)));
                        let code = (values[row * cols + col] / scale).round_ties_even().clamp(-half, half - 1.0);
                        prop_assert_eq!(matrix.value(row, col), code * scale);
                    }
                }
            }
            if !cols.is_multiple_of(2) {
                prop_assert!(packed.chunks(cols.div_ceil(2)).all(|row| row[cols / 2] >> 4 == 8));
            }
        }
    }
}
