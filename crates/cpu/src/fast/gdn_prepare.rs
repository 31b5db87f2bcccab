//! Convolution, gates and L2 norms of a Gated `DeltaNet` layer.

use qwill_device::batch::CONV_RING;
use qwill_device::{Activations, Batch, GdnShape, Span};

use super::blocks::{Blocks, steps};
use super::elementwise::{round_row, sum_of_squares};
use super::pool::Pool;
use super::rows_per_piece;
use super::scratch::Workers;
use super::simd::{self, Level, Simd, silu, starts};
use crate::Buffer;
use crate::state::{Elements, StateLayer};

/// Added to the sum of squares of a query or key head before the root.
const L2_EPS: f32 = 1e-6;

/// The weights as the kernel reads them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weights<'a> {
    /// `[conv_width, conv_channels]`: the transpose of the checkpoint's.
    pub(super) taps: &'a [f32],
    /// `[value_heads]`.
    pub(super) decay_rate: &'a [f32],
    /// `[value_heads]`.
    pub(super) dt_bias: &'a [f32],
}

/// See `Device::gdn_prepare`. First every row is computed from the old ring and the batch, then the ring takes the
/// batch's last inputs: so rows need not wait for each other.
pub(super) fn prepare(
    (level, pool, workers, activations): (Level, &mut Pool, &Workers, Activations),
    batch: &Batch,
    shape: &GdnShape,
    weights: Weights<'_>,
    projected: &Buffer,
    state: &mut StateLayer,
    mixed: &mut Buffer,
) {
    let per_piece = rows_per_piece(batch.rows(), 4 * shape.conv_channels(), pool.threads());
    let bounds = steps(batch.rows(), per_piece);
    let cols = mixed.cols;
    let blocks = Blocks::new(&mut mixed.data, cols, bounds.clone(), vec![0, cols]);
    let spans = span_of_rows(batch);
    let ring = &*state;
    pool.run(bounds.len() - 1, &|worker, piece| {
        let mut block = blocks.take(piece, 0);
        workers.with(worker, memory(shape), |memory| {
            for row in 0..block.rows() {
                let at = piece * per_piece + row;
                let samples = samples(shape, &batch.spans[spans[at]], at, projected, ring, memory);
                let out = &mut block.row_mut(row)[..shape.mixed()];
                simd::gdn_prepare_row(level, activations, shape, weights, &samples, projected.row(at), out);
            }
        });
    });
    drop(blocks);
    batch.spans.iter().for_each(|span| store_ring(shape, span, projected, state));
}

/// Elements of a thread's work memory: the inputs under each tap, widened.
pub(super) fn memory(shape: &GdnShape) -> usize {
    shape.conv_width * shape.conv_channels()
}

/// The span of every row.
fn span_of_rows(batch: &Batch) -> Vec<usize> {
    batch.spans.iter().enumerate().flat_map(|(index, span)| std::iter::repeat_n(index, span.rows)).collect()
}

/// The inputs under each tap as the ring stores them, oldest first; `None` before the sequence's start. Where the ring
/// has f32, nothing is copied; else `memory` takes them.
fn samples<'a>(
    shape: &GdnShape,
    span: &Span,
    row: usize,
    projected: &'a Buffer,
    state: &'a StateLayer,
    memory: &'a mut [f32],
) -> Vec<Option<&'a [f32]>> {
    let channels = shape.conv_channels();
    let index = row - span.first_row;
    let position = span.position + index;
    let ring_at = |age: usize| (span.slot * CONV_RING + (position - age) % CONV_RING) * channels;
    let ages = (0..shape.conv_width).rev();
    let sample = |(age, wide): (usize, &'a mut [f32])| -> Option<&'a [f32]> {
        if age > position {
            return None;
        }
        let own = (age <= index).then(|| &projected.row(row - age)[..channels]);
        match (&state.conv, own) {
            (Elements::F32(_), Some(own)) => return Some(own),
            (Elements::F32(ring), None) => return Some(&ring[ring_at(age)..][..channels]),
            (_, Some(own)) => {
                wide.iter_mut().zip(own).for_each(|(wide, x)| *wide = state.state_type.round_input(*x));
            }
            (Elements::Half(half, ring), None) => half.widen(&ring[ring_at(age)..], wide),
        }
        Some(wide)
    };
    ages.zip(memory.chunks_mut(channels)).map(sample).collect()
}

/// Keeps the span's last inputs, each at its position modulo the ring's length.
fn store_ring(shape: &GdnShape, span: &Span, projected: &Buffer, state: &mut StateLayer) {
    let channels = shape.conv_channels();
    for index in span.rows.saturating_sub(CONV_RING)..span.rows {
        let slot_row = span.slot * CONV_RING + (span.position + index) % CONV_RING;
        let input = &projected.row(span.first_row + index)[..channels];
        state.conv.store(slot_row * channels, input);
    }
}

/// Kernel of one row: `out` is `q̂ | k̂ | v | log-decay | β`.
#[inline(always)]
pub(super) fn prepare_row_body<S: Simd>(
    simd: S,
    activations: Activations,
    shape: &GdnShape,
    weights: Weights<'_>,
    samples: &[Option<&[f32]>],
    input: &[f32],
    out: &mut [f32],
) {
    let channels = shape.conv_channels();
    let (convolved, gates) = out.split_at_mut(channels);
    convolve(simd, samples, weights.taps, convolved);
    for (head, values) in convolved[..2 * shape.key_columns()].chunks_mut(shape.key_dim).enumerate() {
        let factor = if head < shape.key_heads { 1.0 / (shape.key_dim as f32).sqrt() } else { 1.0 };
        let scale = factor / (sum_of_squares(values) + L2_EPS).sqrt();
        for value in values.iter_mut() {
            *value *= scale;
        }
    }
    round_row(activations, convolved);
    let (log_decays, betas) = gates.split_at_mut(shape.value_heads);
    for (head, (log_decay, beta)) in log_decays.iter_mut().zip(betas).enumerate() {
        let decay_input = input[shape.a_column() + head] + weights.dt_bias[head];
        *log_decay = weights.decay_rate[head] * softplus(decay_input);
        *beta = 1.0 / (1.0 + (-input[shape.b_column() + head]).exp());
    }
}

/// `out = silu(Σ_tap taps[tap] · samples[tap])`, oldest sample first, absent samples left out.
#[inline(always)]
fn convolve<S: Simd>(simd: S, samples: &[Option<&[f32]>], taps: &[f32], out: &mut [f32]) {
    let channels = out.len();
    if let [Some(a), Some(b), Some(c), Some(d)] = *samples {
        // The usual width, away from the sequence's start: everything stays in registers.
        let samples = [&a[..channels], &b[..channels], &c[..channels], &d[..channels]];
        let taps: [&[f32]; 4] = std::array::from_fn(|tap| &taps[tap * channels..][..channels]);
        for at in starts(simd, channels) {
            let mut sum = simd.splat(0.0);
            for (sample, taps) in samples.iter().zip(taps) {
                sum = simd.mul_add(simd.load_part(&sample[at..]), simd.load_part(&taps[at..]), sum);
            }
            simd.store_part(&mut out[at..], silu(simd, sum));
        }
        return;
    }
    for at in starts(simd, channels) {
        let mut sum = simd.splat(0.0);
        for (sample, taps) in samples.iter().zip(taps.chunks_exact(channels)) {
            if let Some(sample) = sample {
                sum = simd.mul_add(simd.load_part(&sample[at..]), simd.load_part(&taps[at..]), sum);
            }
        }
        simd.store_part(&mut out[at..], silu(simd, sum));
    }
}

/// `ln(1 + e^x)`; `x` itself above 20.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
