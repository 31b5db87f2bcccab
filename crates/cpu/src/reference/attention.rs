//! Gated softmax attention over paged keys and values.

use qwill_device::batch::PAGE_TOKENS;
use qwill_device::{Activations, AttentionShape, Batch, Span};

use super::linear::dot;
use super::norm::{rms_norm_row, sigmoid};
use crate::{Buffer, Cache};

/// `(cos θ, sin θ)` of each rotated pair at a position: `θ_i = f32(position) · f32(rope_theta^(−2i/rope_dims))`,
/// the product in f32, its cosine and sine rounded from f64.
pub(super) fn rope_angles(shape: &AttentionShape, position: usize) -> Vec<(f32, f32)> {
    (0..shape.rope_dims / 2)
        .map(|i| {
            let inverse = shape.rope_theta.powf(-2.0 * i as f64 / shape.rope_dims as f64) as f32;
            let (sine, cosine) = f64::from(position as f32 * inverse).sin_cos();
            (cosine as f32, sine as f32)
        })
        .collect()
}

/// Turns dims `i` and `i + angles.len()` by angle `i`: `(a, b) → (a cos θ − b sin θ, b cos θ + a sin θ)`.
pub(super) fn rotate(head: &mut [f32], angles: &[(f32, f32)]) {
    for (i, (cosine, sine)) in angles.iter().enumerate() {
        let (a, b) = (head[i], head[i + angles.len()]);
        head[i] = a * cosine - b * sine;
        head[i + angles.len()] = b * cosine + a * sine;
    }
}

/// Weights of the q and k norms, `[head_dim]` each.
pub(super) struct HeadNorms<'a> {
    pub(super) query: &'a [f32],
    pub(super) key: &'a [f32],
}

/// RMS norm in f32, then [`rotate`]; nothing is rounded in between.
fn norm_and_rotate(
    shape: &AttentionShape,
    input: &[f32],
    norm: &[f32],
    angles: &[(f32, f32)],
    out: &mut [f32],
) {
    rms_norm_row(Activations::F32, input, norm, shape.norm_eps, out);
    rotate(out, angles);
}

/// Writes the queries and appends keys and values, see `Device::attention_prepare`.
pub(super) fn prepare(
    activations: Activations,
    batch: &Batch,
    kv_layer: usize,
    shape: &AttentionShape,
    projected: &Buffer,
    norms: &HeadNorms<'_>,
    cache: &mut Cache,
    query: &mut Buffer,
) {
    let dim = shape.head_dim;
    let mut key = vec![0.0; dim];
    for (span, row, position) in rows_of(batch) {
        let angles = rope_angles(shape, position);
        let input = projected.row(row);
        let (query_gates, key_values) = input.split_at(2 * shape.query_columns());
        let (keys, values) = key_values.split_at(shape.kv_columns());
        for (pair, out) in query_gates.chunks(2 * dim).zip(query.row_mut(row).chunks_mut(dim)) {
            norm_and_rotate(shape, &pair[..dim], norms.query, &angles, out);
            for value in out.iter_mut() {
                *value = activations.round(*value);
            }
        }
        let (page, offset) = batch.place(span, position);
        for head in 0..shape.kv_heads {
            norm_and_rotate(shape, &keys[head * dim..][..dim], norms.key, &angles, &mut key);
            let at = cache.kv_offset(page, head, offset);
            let layer = &mut cache.kv[kv_layer];
            layer.keys.store(at, &key);
            layer.values.store(at, &values[head * dim..][..dim]);
        }
    }
}

/// `(span, row, absolute position)` of every row of a batch.
pub(super) fn rows_of(batch: &Batch) -> impl Iterator<Item = (&Span, usize, usize)> {
    batch
        .spans
        .iter()
        .flat_map(|span| (0..span.rows).map(move |i| (span, span.first_row + i, span.position + i)))
}

/// Softmax attention and gate, see `Device::attention`.
///
/// Two passes over the positions: scores and their maximum, then `e^(score − maximum)` with the weighted sum of
/// the values, both in position order in f32; one division at the end.
pub(super) fn attention(
    activations: Activations,
    batch: &Batch,
    kv_layer: usize,
    shape: &AttentionShape,
    query: &Buffer,
    projected: &Buffer,
    cache: &Cache,
    out: &mut Buffer,
) {
    let dim = shape.head_dim;
    let heads_per_kv = shape.query_heads / shape.kv_heads;
    for span in &batch.spans {
        for kv_head in 0..shape.kv_heads {
            let history = History::read(batch, span, kv_layer, kv_head, cache);
            for row in span.first_row..span.first_row + span.rows {
                let positions = span.position + (row - span.first_row) + 1;
                for head in kv_head * heads_per_kv..(kv_head + 1) * heads_per_kv {
                    let mixed =
                        history.attend(&query.row(row)[head * dim..][..dim], shape.scale(), positions);
                    let gate = &projected.row(row)[(2 * head + 1) * dim..][..dim];
                    let out = &mut out.row_mut(row)[head * dim..][..dim];
                    for ((value, mixed), gate) in out.iter_mut().zip(mixed).zip(gate) {
                        *value = activations.round(mixed * sigmoid(*gate));
                    }
                }
            }
        }
    }
}

/// Keys and values of one kv head of a sequence, `[positions, head_dim]`, gathered from its pages.
struct History {
    keys: Vec<f32>,
    values: Vec<f32>,
    head_dim: usize,
}

impl History {
    fn read(batch: &Batch, span: &Span, kv_layer: usize, kv_head: usize, cache: &Cache) -> Self {
        let head_dim = cache.spec.attention.head_dim;
        let positions = span.position + span.rows;
        let mut keys = vec![0.0; positions * head_dim];
        let mut values = vec![0.0; positions * head_dim];
        let layer = &cache.kv[kv_layer];
        let pages = keys.chunks_mut(PAGE_TOKENS * head_dim).zip(values.chunks_mut(PAGE_TOKENS * head_dim));
        for (logical, (keys, values)) in pages.enumerate() {
            let (page, offset) = batch.place(span, logical * PAGE_TOKENS);
            let at = cache.kv_offset(page, kv_head, offset);
            layer.keys.load(at, keys);
            layer.values.load(at, values);
        }
        Self { keys, values, head_dim }
    }

    /// `Σ_p softmax_p(scale · query·key_p) value_p` over positions `0..positions`.
    fn attend(&self, query: &[f32], scale: f32, positions: usize) -> Vec<f32> {
        let keys = self.keys.chunks(self.head_dim).take(positions);
        let mut weights: Vec<f32> = keys.map(|key| dot(query, key) * scale).collect();
        let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0.0;
        let mut sum = vec![0.0; self.head_dim];
        for (weight, value) in weights.iter_mut().zip(self.values.chunks(self.head_dim)) {
            *weight = (*weight - largest).exp();
            total += *weight;
            for (sum, value) in sum.iter_mut().zip(value) {
                *sum += *weight * value;
            }
        }
        for value in &mut sum {
            *value /= total;
        }
        sum
    }
}
