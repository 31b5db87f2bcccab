//! Norms, gates and embeddings: everything that looks at one row alone.

use qwill_device::{Activations, GdnShape};

use super::linear::dot;
use super::matrix::Matrix;
use crate::Buffer;

/// `1 / (1 + e^(−x))` in f32.
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x / (1 + e^(−x))` in f32.
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// `ln(1 + e^x)` in f32; `x` itself above 20, where the two agree to the last bit of f32.
pub(super) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// `1 / √(mean(x²) + eps)`, the squares summed by [`dot`].
pub(super) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// `out[i] = x[i] · rsqrt(mean(x²) + eps) · weight[i]` over the width of `weight`, rounded once.
pub(super) fn rms_norm_row(activations: Activations, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let x = &x[..weight.len()];
    let factor = inverse_rms(x, eps);
    for ((value, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *value = activations.round(x * factor * weight);
    }
}

/// [`rms_norm_row`] of rows `0..rows`.
pub(super) fn rms_norm(
    activations: Activations,
    rows: usize,
    x: &Buffer,
    weight: &[f32],
    eps: f32,
    out: &mut Buffer,
) {
    for row in 0..rows {
        rms_norm_row(activations, x.row(row), weight, eps, out.row_mut(row));
    }
}

/// `out[i] = silu(gate_up[i]) · gate_up[width + i]`, rounded once.
pub(super) fn swiglu(
    activations: Activations,
    rows: usize,
    width: usize,
    gate_up: &Buffer,
    out: &mut Buffer,
) {
    for row in 0..rows {
        let (gate, up) = gate_up.row(row).split_at(width);
        for ((value, gate), up) in out.row_mut(row).iter_mut().zip(gate).zip(&up[..width]) {
            *value = activations.round(silu(*gate) * up);
        }
    }
}

/// Per value head: `out = scanned · rsqrt(mean(scanned²) + eps) · norm · silu(z)`, rounded once.
pub(super) fn gated_norm(
    activations: Activations,
    rows: usize,
    shape: &GdnShape,
    scanned: &Buffer,
    projected: &Buffer,
    norm: &[f32],
    out: &mut Buffer,
) {
    for row in 0..rows {
        let gates = &projected.row(row)[shape.z_column()..][..shape.value_columns()];
        let values = &scanned.row(row)[..shape.value_columns()];
        let heads = values.chunks(shape.value_dim).zip(gates.chunks(shape.value_dim));
        for ((head, gate), out) in heads.zip(out.row_mut(row).chunks_mut(shape.value_dim)) {
            let factor = inverse_rms(head, shape.norm_eps);
            for (((value, x), weight), z) in out.iter_mut().zip(head).zip(norm).zip(gate) {
                *value = activations.round(x * factor * weight * silu(*z));
            }
        }
    }
}

/// `out[row] = table[tokens[row]]`, dequantised and rounded.
pub(super) fn embed(activations: Activations, table: &Matrix, tokens: &[u32], out: &mut Buffer) {
    for (row, token) in tokens.iter().enumerate() {
        let values = &mut out.row_mut(row)[..table.cols];
        table.widen_row(*token as usize, values);
        for value in values {
            *value = activations.round(*value);
        }
    }
}

/// Weights of [`mtp_combine`].
pub(super) struct MtpNorms<'a> {
    pub(super) embed: &'a [f32],
    pub(super) hidden: &'a [f32],
    pub(super) eps: f32,
}

/// `out[row] = rms_norm(table[tokens[row]], embed) | rms_norm(hidden[row], hidden)`; the embedding itself is
/// not rounded before its norm.
pub(super) fn mtp_combine(
    activations: Activations,
    table: &Matrix,
    tokens: &[u32],
    hidden: &Buffer,
    norms: &MtpNorms<'_>,
    out: &mut Buffer,
) {
    let mut embedding = vec![0.0; table.cols];
    for (row, token) in tokens.iter().enumerate() {
        table.widen_row(*token as usize, &mut embedding);
        let (left, right) = out.row_mut(row).split_at_mut(table.cols);
        rms_norm_row(activations, &embedding, norms.embed, norms.eps, left);
        rms_norm_row(activations, hidden.row(row), norms.hidden, norms.eps, right);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_agree_with_their_f64_formulas_and_saturate_without_nan() {
        for step in -4000..=4000 {
            let x = step as f32 / 40.0;
            let wide = f64::from(x);
            let logistic = 1.0 / (1.0 + (-wide).exp());
            assert!((f64::from(sigmoid(x)) - logistic).abs() <= 1e-7, "sigmoid({x})");
            assert!((f64::from(silu(x)) - wide * logistic).abs() <= 1e-6 * wide.abs().max(1.0), "silu({x})");
            let log = if wide > 0.0 { wide + (-wide).exp().ln_1p() } else { wide.exp().ln_1p() };
            assert!((f64::from(softplus(x)) - log).abs() <= 3e-7 * log.max(1e-20), "softplus({x})");
        }
        for x in [f32::MIN, -1e4, 1e4, f32::MAX] {
            assert!(sigmoid(x).is_finite() && silu(x).is_finite() && softplus(x).is_finite(), "{x}");
        }
    }

    #[test]
    fn rms_norm_agrees_with_f64_at_odd_widths_and_at_zero() {
        for width in [1, 2, 15, 16, 17, 255, 256, 1000] {
            let x: Vec<f32> = (0..width).map(|i| ((i * 31 % 17) as f32 - 8.0) * 3.0).collect();
            let weight: Vec<f32> = (0..width).map(|i| 1.0 + (i % 5) as f32 / 10.0).collect();
            let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
            let mut out = vec![f32::NAN; width];
            rms_norm_row(Activations::F32, &x, &weight, 1e-6, &mut out);
            for ((y, x), w) in out.iter().zip(&x).zip(&weight) {
                let expected = f64::from(*x) / (mean + 1e-6).sqrt() * f64::from(*w);
                assert!((f64::from(*y) - expected).abs() <= 1e-6 * expected.abs().max(1.0), "{y} {expected}");
            }
            rms_norm_row(Activations::F32, &vec![0.0; width], &weight, 1e-6, &mut out);
            assert!(out.iter().all(|y| *y == 0.0));
        }
    }
}
