//! Kernels that look at one row alone: norms and gates.

use qwill_device::{Activations, GdnShape};

use super::simd::{Simd, silu, starts};

/// Rounds a finished row to the activation type.
#[inline(always)]
pub(super) fn round_row(activations: Activations, row: &mut [f32]) {
    if activations == Activations::Bf16 {
        for value in row.iter_mut() {
            *value = activations.round(*value);
        }
    }
}

/// `Σ x²`: 16 partial sums, then these from the first to the last.
///
/// The one order for every instruction set, the reference's as well: normed rows, their int8 codes and stored keys
/// are then the same bits everywhere.
#[inline(always)]
pub(super) fn sum_of_squares(x: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (blocks, rest) = x.as_chunks::<16>();
    for block in blocks {
        sums.iter_mut().zip(block).for_each(|(sum, x)| *sum += x * x);
    }
    sums.iter_mut().zip(rest).for_each(|(sum, x)| *sum += x * x);
    sums.iter().sum()
}

/// `1 / √(mean(x²) + eps)`.
#[inline(always)]
pub(super) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt()
}

/// Kernel: `out = x · rsqrt(mean(x²) + eps) · weight` over the width of `weight`, rounded.
#[inline(always)]
pub(super) fn rms_norm_row_body<S: Simd>(
    simd: S,
    activations: Activations,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let (x, out) = (&x[..weight.len()], &mut out[..weight.len()]);
    let factor = simd.splat(inverse_rms(x, eps));
    for at in starts(simd, x.len()) {
        let scaled = simd.mul(simd.load_part(&x[at..]), factor);
        simd.store_part(&mut out[at..], simd.mul(scaled, simd.load_part(&weight[at..])));
    }
    round_row(activations, out);
}

/// Kernel: `out = silu(gate) · up`, rounded.
#[inline(always)]
pub(super) fn swiglu_row_body<S: Simd>(
    simd: S,
    activations: Activations,
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
) {
    let (gate, up) = (&gate[..out.len()], &up[..out.len()]);
    for at in starts(simd, out.len()) {
        let gated = simd.mul(silu(simd, simd.load_part(&gate[at..])), simd.load_part(&up[at..]));
        simd.store_part(&mut out[at..], gated);
    }
    round_row(activations, out);
}

/// Kernel: per value head `out = scanned · rsqrt(mean(scanned²) + eps) · norm · silu(gate)`, rounded.
#[inline(always)]
pub(super) fn gated_norm_row_body<S: Simd>(
    simd: S,
    activations: Activations,
    shape: &GdnShape,
    scanned: &[f32],
    gates: &[f32],
    norm: &[f32],
    out: &mut [f32],
) {
    let dim = shape.value_dim;
    for ((head, gates), out) in
        scanned.chunks_exact(dim).zip(gates.chunks_exact(dim)).zip(out.chunks_exact_mut(dim))
    {
        let factor = simd.splat(inverse_rms(head, shape.norm_eps));
        for at in starts(simd, dim) {
            let scaled = simd.mul(simd.load_part(&head[at..]), factor);
            let normed = simd.mul(scaled, simd.load_part(&norm[at..]));
            simd.store_part(&mut out[at..], simd.mul(normed, silu(simd, simd.load_part(&gates[at..]))));
        }
    }
    round_row(activations, out);
}
