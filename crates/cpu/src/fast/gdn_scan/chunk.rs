//! One prefill chunk of the gated delta rule in the chunked (WY) form.
//!
//! With `G_i` the sum of the chunk's first i log-decays and `L_ij = e^(G_i − G_j)` for i ≥ j:
//! `A = strict_lower(diag(β) K Kᵀ ⊙ L)`; `U = (I + A)⁻¹ diag(β) (V − diag(e^G) K S)`;
//! `O = diag(e^G) Q S + (Q Kᵀ ⊙ L) U`; `S ← e^(G_C) S + (diag(e^(G_C − G)) K)ᵀ U`.
//! The inverse is never formed: forward substitution, a block of rows at a time.

use std::ops::Range;

use qwill_device::batch::CHUNK_TOKENS;
use qwill_device::{Activations, GdnShape};

use super::{KeyHead, decayed, write_state};
use crate::Buffer;
use crate::fast::blocks::Block;
use crate::fast::elementwise::round_row;
use crate::fast::simd::{From, Simd, exp, gemm, gemm_transposed};

/// Rows of a triangular product that are done at once.
const ROWS: usize = 12;

/// Elements of work memory of [`chunk_body`].
pub(super) fn memory(shape: &GdnShape) -> usize {
    CHUNK_TOKENS * (2 * shape.key_dim + 2 * shape.value_dim + 4 * CHUNK_TOKENS + 3)
}

/// Kernel: one chunk of one key head's value heads; carries `base` and writes the chunk's rows of `out`.
#[inline(always)]
pub(in crate::fast) fn chunk_body<S: Simd>(
    simd: S,
    activations: Activations,
    key_head: KeyHead<'_>,
    mixed: &Buffer,
    rows: Range<usize>,
    base: &mut [f32],
    memory: &mut [f32],
    first_out: usize,
    out: &mut Block<'_>,
) {
    let (key_dim, value_dim) = (key_head.shape.key_dim, key_head.shape.value_dim);
    let count = rows.len();
    let (keys, memory) = memory.split_at_mut(count * key_dim);
    let (queries, memory) = memory.split_at_mut(count * key_dim);
    for ((key, query), row) in keys.chunks_mut(key_dim).zip(queries.chunks_mut(key_dim)).zip(rows.clone()) {
        key.copy_from_slice(key_head.key(mixed.row(row)));
        query.copy_from_slice(key_head.query(mixed.row(row)));
    }
    let (key_dots, memory) = memory.split_at_mut(count * count);
    let (query_dots, memory) = memory.split_at_mut(count * count);
    lower_dots(simd, count, key_dim, keys, keys, key_dots);
    lower_dots(simd, count, key_dim, queries, keys, query_dots);
    let (among_keys, memory) = memory.split_at_mut(count * count);
    let (among_queries, memory) = memory.split_at_mut(count * count);
    let (corrected, memory) = memory.split_at_mut(count * value_dim);
    let (outputs, memory) = memory.split_at_mut(count * value_dim);
    let (logs, memory) = memory.split_at_mut(count);
    let (decays, memory) = memory.split_at_mut(count);
    let betas = &mut memory[..count];
    for (head, base) in base.chunks_mut(key_head.state_elements()).enumerate() {
        let mut log = 0.0;
        for (i, row) in rows.clone().enumerate() {
            log += key_head.log_decay(mixed.row(row), head);
            logs[i] = log;
            betas[i] = key_head.beta(mixed.row(row), head);
        }
        exp_all(simd, logs, decays);
        weigh(simd, logs, betas, (key_dots, query_dots), (among_keys, among_queries));

        gemm(
            simd,
            (count, value_dim, key_dim),
            keys,
            key_dim,
            1,
            base,
            value_dim,
            corrected,
            value_dim,
            From::Zero,
        );
        for (i, (u, row)) in corrected.chunks_mut(value_dim).zip(rows.clone()).enumerate() {
            let value = key_head.value(mixed.row(row), head);
            u.iter_mut().zip(value).for_each(|(u, value)| *u = betas[i] * (value - decays[i] * *u));
        }
        substitute(simd, count, value_dim, among_keys, corrected);

        gemm(
            simd,
            (count, value_dim, key_dim),
            queries,
            key_dim,
            1,
            base,
            value_dim,
            outputs,
            value_dim,
            From::Zero,
        );
        for (output, decay) in outputs.chunks_mut(value_dim).zip(&*decays) {
            for value in output.iter_mut() {
                *value *= decay;
            }
        }
        for first in (0..count).step_by(ROWS) {
            let some = ROWS.min(count - first);
            let (weights, outputs) = (&among_queries[first * count..], &mut outputs[first * value_dim..]);
            let product = (some, value_dim, first + some);
            gemm(simd, product, weights, count, 1, corrected, value_dim, outputs, value_dim, From::Old);
        }
        for (i, output) in outputs.chunks(value_dim).enumerate() {
            let out = &mut out.row_mut(first_out + i)[head * value_dim..][..value_dim];
            out.copy_from_slice(output);
            round_row(activations, out);
        }
        let (end, factor) = (logs[count - 1], decays[count - 1]);
        decayed(simd, end, logs, betas);
        write_state(simd, (count, key_dim, value_dim), factor, betas, keys, corrected, base);
    }
}

/// `dots[i][j] = a_i · b_j` for j ≤ i, and a few beyond.
#[inline(always)]
fn lower_dots<S: Simd>(simd: S, count: usize, dim: usize, a: &[f32], b: &[f32], dots: &mut [f32]) {
    for first in (0..count).step_by(ROWS) {
        let rows = ROWS.min(count - first);
        let (a, dots) = (&a[first * dim..], &mut dots[first * count..]);
        gemm_transposed(simd, (rows, first + rows, dim), a, dim, b, dim, dots, count);
    }
}

#[inline(always)]
fn exp_all<S: Simd>(simd: S, from: &[f32], to: &mut [f32]) {
    for (from, to) in from.chunks(S::LANES).zip(to.chunks_mut(S::LANES)) {
        simd.store_part(to, exp(simd, simd.load_part(from)));
    }
}

/// Weighs the dot products by decay: `−β_i L_ij k_i·k_j` below the diagonal, `L_ij q_i·k_j` up to it, 0 elsewhere
/// in the block of rows.
#[inline(always)]
fn weigh<S: Simd>(
    simd: S,
    logs: &[f32],
    betas: &[f32],
    (key_dots, query_dots): (&[f32], &[f32]),
    (among_keys, among_queries): (&mut [f32], &mut [f32]),
) {
    let count = logs.len();
    for i in 0..count {
        let row = i * count..(i + 1) * count;
        let (key_dots, query_dots) = (&key_dots[row.clone()], &query_dots[row.clone()]);
        let (among_keys, among_queries) = (&mut among_keys[row.clone()], &mut among_queries[row]);
        decayed(simd, logs[i], &logs[..=i], among_queries);
        for j in 0..i {
            among_keys[j] = -betas[i] * among_queries[j] * key_dots[j];
        }
        for j in 0..=i {
            among_queries[j] *= query_dots[j];
        }
        among_queries[i + 1..].fill(0.0);
    }
}

/// `U ← (I + A)⁻¹ U` with the negated strictly lower `A`: rows of earlier blocks first, then row by row.
#[inline(always)]
fn substitute<S: Simd>(simd: S, count: usize, dim: usize, negated: &[f32], corrected: &mut [f32]) {
    for first in (0..count).step_by(ROWS) {
        let rows = ROWS.min(count - first);
        let (done, open) = corrected.split_at_mut(first * dim);
        gemm(simd, (rows, dim, first), &negated[first * count..], count, 1, done, dim, open, dim, From::Old);
        for i in 1..rows {
            let weights = &negated[(first + i) * count + first..];
            let (done, open) = open.split_at_mut(i * dim);
            gemm(simd, (1, dim, i), weights, count, 1, done, dim, open, dim, From::Old);
        }
    }
}
