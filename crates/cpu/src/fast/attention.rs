//! Gated softmax attention over paged keys and values.

use qwill_device::batch::PAGE_TOKENS;
use qwill_device::{Activations, AttentionShape, Batch, Span};

use super::blocks::{Block, Blocks, steps};
use super::elementwise::{inverse_rms, round_row};
use super::pool::Pool;
use super::rows_per_piece;
use super::scratch::{Workers, grow};
use super::simd::{self, From, Level, MAX_LANES, Simd, exp, gemm, gemm_transposed, sigmoid};
use crate::storage::{KvElements, KvLayer};
use crate::{Buffer, Cache};

/// Weights of the q and k norms, `[head_dim]` each.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadNorms<'a> {
    pub(super) query: &'a [f32],
    pub(super) key: &'a [f32],
}

/// See `Device::attention_prepare`. `keys` is work memory: rows compute at once, the pages take the keys after.
pub(super) fn prepare(
    (level, pool, activations): (Level, &mut Pool, Activations),
    batch: &Batch,
    kv_layer: usize,
    shape: &AttentionShape,
    projected: &Buffer,
    norms: HeadNorms<'_>,
    keys: &mut Vec<f32>,
    cache: &mut Cache,
    query: &mut Buffer,
) {
    let (rows, kv_columns) = (batch.rows(), shape.kv_columns());
    grow(keys, rows * kv_columns);
    let frequencies = frequencies(shape);
    let positions: Vec<usize> =
        batch.spans.iter().flat_map(|span| span.position..span.position + span.rows).collect();
    let per_piece = rows_per_piece(rows, 4 * shape.projected(), pool.threads());
    let bounds = steps(rows, per_piece);
    let query_cols = query.cols;
    let query_blocks = Blocks::new(&mut query.data, query_cols, bounds.clone(), vec![0, query_cols]);
    let key_blocks = Blocks::new(keys, kv_columns, bounds.clone(), vec![0, kv_columns]);
    pool.run(bounds.len() - 1, &|_, piece| {
        let (mut query, mut keys) = (query_blocks.take(piece, 0), key_blocks.take(piece, 0));
        for row in 0..query.rows() {
            let at = piece * per_piece + row;
            let angles = angles(&frequencies, positions[at]);
            let (query, keys) = (query.row_mut(row), keys.row_mut(row));
            simd::attention_prepare_row(
                level,
                activations,
                shape,
                norms,
                &angles,
                projected.row(at),
                query,
                keys,
            );
        }
    });
    drop((query_blocks, key_blocks));
    append(batch, kv_layer, shape, projected, keys, cache);
}

/// `f32(rope_theta^(−2i/rope_dims))` of each rotated pair.
fn frequencies(shape: &AttentionShape) -> Vec<f32> {
    let power = |i| -2.0 * i as f64 / shape.rope_dims as f64;
    (0..shape.rope_dims / 2).map(|i| shape.rope_theta.powf(power(i)) as f32).collect()
}

/// `(cos θ, sin θ)` of each rotated pair at a position; `θ` is a product in f32, its functions are taken in f64.
fn angles(frequencies: &[f32], position: usize) -> Vec<(f32, f32)> {
    let turn = |frequency: &f32| {
        let (sine, cosine) = f64::from(position as f32 * frequency).sin_cos();
        (cosine as f32, sine as f32)
    };
    frequencies.iter().map(turn).collect()
}

/// Kernel of one row: roped, normed queries (rounded) and keys (the pages round them).
#[inline(always)]
pub(super) fn prepare_row_body<S: Simd>(
    _simd: S,
    activations: Activations,
    shape: &AttentionShape,
    norms: HeadNorms<'_>,
    angles: &[(f32, f32)],
    input: &[f32],
    query: &mut [f32],
    keys: &mut [f32],
) {
    let dim = shape.head_dim;
    let (query_gates, key_values) = input.split_at(2 * shape.query_columns());
    let query = &mut query[..shape.query_columns()];
    for (pair, out) in query_gates.chunks(2 * dim).zip(query.chunks_mut(dim)) {
        norm_and_rotate(shape, &pair[..dim], norms.query, angles, out);
    }
    round_row(activations, query);
    for (key, out) in key_values.chunks(dim).zip(keys.chunks_mut(dim)) {
        norm_and_rotate(shape, key, norms.key, angles, out);
    }
}

#[inline(always)]
fn norm_and_rotate(
    shape: &AttentionShape,
    input: &[f32],
    norm: &[f32],
    angles: &[(f32, f32)],
    out: &mut [f32],
) {
    let factor = inverse_rms(input, shape.norm_eps);
    for ((out, x), weight) in out.iter_mut().zip(input).zip(norm) {
        *out = x * factor * weight;
    }
    let (first, second) = out.split_at_mut(angles.len());
    for ((a, b), (cosine, sine)) in first.iter_mut().zip(second).zip(angles) {
        (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
    }
}

fn append(
    batch: &Batch,
    kv_layer: usize,
    shape: &AttentionShape,
    projected: &Buffer,
    keys: &[f32],
    cache: &mut Cache,
) {
    let (dim, kv_columns) = (shape.head_dim, shape.kv_columns());
    for span in &batch.spans {
        for index in 0..span.rows {
            let row = span.first_row + index;
            let (page, offset) = batch.place(span, span.position + index);
            let values = &projected.row(row)[2 * shape.query_columns() + kv_columns..][..kv_columns];
            let keys = &keys[row * kv_columns..][..kv_columns];
            for (head, (key, value)) in keys.chunks(dim).zip(values.chunks(dim)).enumerate() {
                let at = cache.kv_offset(page, head, offset);
                let layer = &mut cache.kv[kv_layer];
                layer.keys.store(at, key);
                layer.values.store(at, value);
            }
        }
    }
}

/// Rows of one span that one thread does at once, with all query heads of a kv head: what a page of keys and values
/// is read for.
const ROWS: usize = 8;

/// See `Device::attention`.
pub(super) fn attention(
    (level, pool, workers): (Level, &mut Pool, &Workers),
    activations: Activations,
    batch: &Batch,
    kv_layer: usize,
    shape: &AttentionShape,
    query: &Buffer,
    projected: &Buffer,
    cache: &Cache,
    out: &mut Buffer,
) {
    let mut pieces: Vec<(&Span, usize)> = Vec::new();
    for span in &batch.spans {
        pieces.extend((span.first_row..span.first_row + span.rows).step_by(ROWS).map(|row| (span, row)));
    }
    let row_bounds: Vec<usize> = pieces.iter().map(|(_, row)| *row).chain([batch.rows()]).collect();
    let group = shape.query_heads / shape.kv_heads;
    let out_cols = out.cols;
    let col_bounds = (0..=shape.kv_heads).map(|head| head * group * shape.head_dim).collect();
    let blocks = Blocks::new(&mut out.data, out_cols, row_bounds.clone(), col_bounds);
    pool.run(pieces.len() * shape.kv_heads, &|worker, index| {
        // Long spans' last rows first: they are the most work.
        let piece = pieces.len() - 1 - index / shape.kv_heads;
        let kv_head = index % shape.kv_heads;
        let (span, first_row) = pieces[piece];
        let rows = row_bounds[piece + 1] - first_row;
        let heads = Heads { batch, span, layer: &cache.kv[kv_layer], cache, shape, kv_head, first_row, rows };
        let mut block = blocks.take(piece, kv_head);
        workers.with(worker, memory(shape), |memory| {
            simd::attend(level, activations, &heads, query, projected, memory, &mut block);
        });
    });
}

/// Elements of work memory of [`attend_body`].
pub(super) fn memory(shape: &AttentionShape) -> usize {
    let (dim, queries) = (shape.head_dim, ROWS * shape.query_heads / shape.kv_heads);
    queries * (2 * dim + PAGE_TOKENS + 2) + WIDENED_TOKENS * dim
}

/// Some rows of a span and one kv head with the query heads that read it.
pub(super) struct Heads<'a> {
    batch: &'a Batch,
    span: &'a Span,
    layer: &'a KvLayer,
    cache: &'a Cache,
    shape: &'a AttentionShape,
    kv_head: usize,
    first_row: usize,
    rows: usize,
}

impl Heads<'_> {
    /// Query heads of the kv head.
    fn group(&self) -> usize {
        self.shape.query_heads / self.shape.kv_heads
    }
    /// Query vectors in all.
    fn queries(&self) -> usize {
        self.rows * self.group()
    }
    /// Absolute position of the first row.
    fn position(&self) -> usize {
        self.span.position + self.first_row - self.span.first_row
    }
}

/// Tokens of a page that are widened to f32 at once: 16 KiB at the usual width, which the first-level cache holds.
const WIDENED_TOKENS: usize = 16;

/// One head's vectors of `dim` elements in f32, widened into `memory` where they are stored narrower.
#[inline(always)]
fn page_vectors<'a>(elements: &'a KvElements, dim: usize, at: usize, memory: &'a mut [f32]) -> &'a [f32] {
    match elements {
        KvElements::F32(data) => &data[at..at + memory.len()],
        KvElements::Bf16(data) => {
            for (value, bits) in memory.iter_mut().zip(&data[at..]) {
                *value = f32::from_bits(u32::from(*bits) << 16);
            }
            memory
        }
        KvElements::Int8(data) => {
            for (out, (codes, scale)) in memory.chunks_exact_mut(dim).zip(data.vectors(at)) {
                for (value, code) in out.iter_mut().zip(codes) {
                    *value = f32::from(*code) * scale;
                }
            }
            memory
        }
    }
}

/// Kernel: online softmax, one page after another. For each query the order of everything is fixed by its position.
#[inline(always)]
pub(super) fn attend_body<S: Simd>(
    simd: S,
    activations: Activations,
    heads: &Heads<'_>,
    query: &Buffer,
    projected: &Buffer,
    memory: &mut [f32],
    out: &mut Block<'_>,
) {
    let (dim, group, queries) = (heads.shape.head_dim, heads.group(), heads.queries());
    let (gathered, memory) = memory.split_at_mut(queries * dim);
    let (sums, memory) = memory.split_at_mut(queries * dim);
    let (scores, memory) = memory.split_at_mut(queries * PAGE_TOKENS);
    let (largest, memory) = memory.split_at_mut(queries);
    let (totals, memory) = memory.split_at_mut(queries);
    let widened = &mut memory[..WIDENED_TOKENS * dim];
    for (row, gathered) in gathered.chunks_mut(group * dim).enumerate() {
        let from = heads.kv_head * group * dim;
        gathered.copy_from_slice(&query.row(heads.first_row + row)[from..from + group * dim]);
    }
    sums.fill(0.0);
    largest.fill(f32::MIN);
    totals.fill(0.0);
    let end = heads.position() + heads.rows;
    for first in (0..end).step_by(PAGE_TOKENS) {
        let tokens = PAGE_TOKENS.min(end - first);
        let (page, _) = heads.batch.place(heads.span, first);
        let at = heads.cache.kv_offset(page, heads.kv_head, 0);
        // Rows before the page see nothing of it.
        let first_query = first.saturating_sub(heads.position()) * group;
        let seen = queries - first_query;
        let gathered = &gathered[first_query * dim..];
        let scores = &mut scores[first_query * PAGE_TOKENS..];
        for token in (0..tokens).step_by(WIDENED_TOKENS) {
            let some = WIDENED_TOKENS.min(tokens - token);
            let keys = page_vectors(&heads.layer.keys, dim, at + token * dim, &mut widened[..some * dim]);
            let scores = &mut scores[token..];
            gemm_transposed(simd, (seen, some, dim), gathered, dim, keys, dim, scores, PAGE_TOKENS);
        }
        let sums = &mut sums[first_query * dim..];
        let row_tokens = |query: usize| (heads.position() + query / group + 1 - first).min(PAGE_TOKENS);
        let state = largest[first_query..].iter_mut().zip(&mut totals[first_query..]);
        for (i, (largest, total)) in state.enumerate() {
            let scores = &mut scores[i * PAGE_TOKENS..(i + 1) * PAGE_TOKENS];
            let visible = row_tokens(first_query + i);
            let kept = soften(simd, heads.shape.scale(), scores, visible, largest, total);
            scale(simd, &mut sums[i * dim..(i + 1) * dim], kept);
        }
        for token in (0..tokens).step_by(WIDENED_TOKENS) {
            let some = WIDENED_TOKENS.min(tokens - token);
            let values = page_vectors(&heads.layer.values, dim, at + token * dim, &mut widened[..some * dim]);
            let scores = &scores[token..];
            if row_tokens(first_query) >= token + some {
                gemm(simd, (seen, dim, some), scores, PAGE_TOKENS, 1, values, dim, sums, dim, From::Old);
                continue;
            }
            // What a row does not see may be anything, even no number: a weight of 0 would not leave it out.
            for i in (0..seen).step_by(group) {
                let some = some.min(row_tokens(first_query + i).saturating_sub(token));
                let (scores, sums) = (&scores[i * PAGE_TOKENS..], &mut sums[i * dim..]);
                gemm(simd, (group, dim, some), scores, PAGE_TOKENS, 1, values, dim, sums, dim, From::Old);
            }
        }
    }
    for (i, (sums, total)) in sums.chunks(dim).zip(totals.iter()).enumerate() {
        let (row, head) = (i / group, i % group);
        let gate_column = (2 * (heads.kv_head * group + head) + 1) * dim;
        let gate = &projected.row(heads.first_row + row)[gate_column..gate_column + dim];
        let out = &mut out.row_mut(row)[head * dim..(head + 1) * dim];
        gate_output(simd, sums, *total, gate, out);
        round_row(activations, out);
    }
}

/// Turns a page's dot products into `e^(scale · score − maximum)`, those beyond `visible` into 0, and carries the
/// maximum and the total. Returns the factor on what was summed before.
#[inline(always)]
fn soften<S: Simd>(
    simd: S,
    scale: f32,
    scores: &mut [f32],
    visible: usize,
    largest: &mut f32,
    total: &mut f32,
) -> f32 {
    // The lowest finite value: the difference to a maximum is still no NaN.
    scores[visible..].fill(f32::MIN);
    let mut page_largest = simd.splat(f32::MIN);
    for part in scores[..visible].chunks_mut(S::LANES) {
        let scaled = simd.mul(simd.load_part(part), simd.splat(scale));
        simd.store_part(part, scaled);
    }
    for part in scores.chunks(S::LANES) {
        page_largest = simd.max(simd.load(part), page_largest);
    }
    let new = largest.max(simd.largest(page_largest));
    for part in scores.chunks_mut(S::LANES) {
        simd.store(part, exp(simd, simd.sub(simd.load(part), simd.splat(new))));
    }
    scores[visible..].fill(0.0);
    let mut sum = simd.splat(0.0);
    for part in scores.chunks(S::LANES) {
        sum = simd.add(sum, simd.load(part));
    }
    let mut kept = [0.0; MAX_LANES];
    simd.store(&mut kept, exp(simd, simd.splat(*largest - new)));
    *largest = new;
    *total = *total * kept[0] + simd.sum(sum);
    kept[0]
}

#[inline(always)]
fn scale<S: Simd>(simd: S, values: &mut [f32], factor: f32) {
    if factor == 1.0 {
        return;
    }
    for part in values.chunks_mut(S::LANES) {
        simd.store_part(part, simd.mul(simd.load_part(part), simd.splat(factor)));
    }
}

/// `out = σ(gate) ⊙ sums / total`.
#[inline(always)]
fn gate_output<S: Simd>(simd: S, sums: &[f32], total: f32, gate: &[f32], out: &mut [f32]) {
    for ((sums, gate), out) in sums.chunks(S::LANES).zip(gate.chunks(S::LANES)).zip(out.chunks_mut(S::LANES))
    {
        let mixed = simd.div(simd.load_part(sums), simd.splat(total));
        simd.store_part(out, simd.mul(mixed, sigmoid(simd, simd.load_part(gate))));
    }
}
