//! The gated delta rule: how a layer's spans and heads are shared out, and the base-and-ring form.
//!
//! One piece of work is a key head of a span with the value heads that read it.

mod chunk;
mod stored;

use qwill_device::{Activations, Batch, GdnShape, Phase, RING_TOKENS, Span, StateType};

pub(super) use chunk::chunk_body;
use stored::{StoredBlock, StoredBlocks};

use super::blocks::{Block, Blocks};
use super::elementwise::round_row;
use super::pool::Pool;
use super::scratch::Workers;
use super::simd::{self, From, Level, MAX_LANES, Simd, exp, gemm, gemm_transposed};
use crate::Buffer;
use crate::state::{StateLayer, round_state};

/// A key head and its value heads, with the columns of a row of the mixed buffer that they read.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyHead<'a> {
    pub(super) shape: &'a GdnShape,
    pub(super) index: usize,
}

impl KeyHead<'_> {
    /// Value heads of the key head.
    pub(super) fn value_heads(&self) -> usize {
        self.shape.value_heads / self.shape.key_heads
    }
    /// Elements of one value head's state.
    pub(super) fn state_elements(&self) -> usize {
        self.shape.key_dim * self.shape.value_dim
    }
    pub(super) fn query<'r>(&self, mixed: &'r [f32]) -> &'r [f32] {
        &mixed[self.index * self.shape.key_dim..][..self.shape.key_dim]
    }
    pub(super) fn key<'r>(&self, mixed: &'r [f32]) -> &'r [f32] {
        &mixed[self.shape.key_columns() + self.index * self.shape.key_dim..][..self.shape.key_dim]
    }
    pub(super) fn value<'r>(&self, mixed: &'r [f32], head: usize) -> &'r [f32] {
        let column =
            2 * self.shape.key_columns() + (self.index * self.value_heads() + head) * self.shape.value_dim;
        &mixed[column..][..self.shape.value_dim]
    }
    pub(super) fn log_decay(&self, mixed: &[f32], head: usize) -> f32 {
        mixed[self.shape.log_decay_column() + self.index * self.value_heads() + head]
    }
    pub(super) fn beta(&self, mixed: &[f32], head: usize) -> f32 {
        mixed[self.shape.beta_column() + self.index * self.value_heads() + head]
    }
}

/// See `Device::gdn_scan`. No two spans share a slot.
pub(super) fn scan(
    (level, pool, workers): (Level, &mut Pool, &Workers),
    activations: Activations,
    batch: &Batch,
    shape: &GdnShape,
    mixed: &Buffer,
    state: &mut StateLayer,
    out: &mut Buffer,
) {
    let key_heads = shape.key_heads;
    let group = shape.value_heads / key_heads;
    let slots = state.slots();
    let state_type = state.state_type;
    let columns = |width: usize| (0..=key_heads).map(move |head| head * width);
    let group_state = group * shape.key_dim * shape.value_dim;
    let base_rows = (0..=slots * key_heads).collect();
    let bases = StoredBlocks::new(&mut state.base, group_state, base_rows, vec![0, group_state]);
    let vector_columns = columns(shape.key_dim)
        .chain(columns(group * shape.value_dim).skip(1).map(|column| column + shape.key_columns()));
    let ring_rows = || (0..=slots).map(|slot| slot * RING_TOKENS).collect();
    let ring_entry = shape.key_columns() + shape.value_columns();
    let rings = StoredBlocks::new(&mut state.ring, ring_entry, ring_rows(), vector_columns.collect());
    let log_columns = columns(group).collect();
    let log_decays = Blocks::new(&mut state.log_decays, shape.value_heads, ring_rows(), log_columns);
    let out_rows = batch.spans.iter().map(|span| span.first_row).chain([batch.rows()]).collect();
    let out_cols = out.cols;
    let outs = Blocks::new(&mut out.data, out_cols, out_rows, columns(group * shape.value_dim).collect());
    pool.run(batch.spans.len() * key_heads, &|worker, piece| {
        let (index, head) = (piece / key_heads, piece % key_heads);
        let span = &batch.spans[index];
        let key_head = KeyHead { shape, index: head };
        let mut out = outs.take(index, head);
        let mut stored = bases.take(span.slot * key_heads + head, 0);
        workers.with(worker, memory(shape), |memory| {
            let (wide, memory) = memory.split_at_mut(group_state);
            let base = stored.open(wide);
            match batch.phase {
                Phase::Prefill => {
                    for chunk in batch.chunks.iter().filter(|chunk| chunk.span == index) {
                        let rows = chunk.first_row..chunk.first_row + chunk.rows;
                        let first_out = chunk.first_row - span.first_row;
                        simd::gdn_chunk(
                            level,
                            activations,
                            key_head,
                            mixed,
                            rows,
                            base,
                            memory,
                            first_out,
                            &mut out,
                        );
                        round_state(state_type, base);
                    }
                }
                Phase::Rows => {
                    let ring = |part: usize| rings.take(span.slot, part * key_heads + head);
                    let log_decays = log_decays.take(span.slot, head);
                    let mut ring = Ring { state_type, keys: ring(0), corrected: ring(1), log_decays };
                    simd::gdn_rows(
                        level,
                        activations,
                        key_head,
                        mixed,
                        span,
                        base,
                        &mut ring,
                        memory,
                        &mut out,
                    );
                }
            }
            if batch.phase == Phase::Prefill || span.ring_len == RING_TOKENS {
                stored.close(wide);
            }
        });
    });
}

/// A slot's ring as one key head sees it: its own columns of all entries.
pub(super) struct Ring<'a> {
    /// What the base state and the ring's vectors are rounded to.
    state_type: StateType,
    /// `[RING_TOKENS, key_dim]`.
    keys: StoredBlock<'a>,
    /// `[RING_TOKENS, value heads · value_dim]`.
    corrected: StoredBlock<'a>,
    /// `[RING_TOKENS, value heads]`.
    log_decays: Block<'a>,
}

/// Elements of work memory of a piece: its base states widened, then that of either phase.
pub(super) fn memory(shape: &GdnShape) -> usize {
    let base = shape.value_heads / shape.key_heads.max(1) * shape.key_dim * shape.value_dim;
    base + rows_memory(shape).max(chunk::memory(shape))
}

/// Elements of work memory of [`rows_body`].
fn rows_memory(shape: &GdnShape) -> usize {
    let (entries, rows) = (RING_TOKENS, qwill_device::MAX_ROUND_ROWS);
    let vectors = entries * (shape.key_dim + shape.value_dim) + 2 * rows * (shape.key_dim + shape.value_dim);
    vectors + 2 * rows * entries + 2 * entries
}

/// Kernel: rows of one span against base state and ring, see `Device::gdn_scan`.
///
/// The ring's entries are gathered first, so that everything after is products of small dense matrices; each sum runs
/// over the entries in index order, whatever round they came from.
#[inline(always)]
pub(super) fn rows_body<S: Simd>(
    simd: S,
    activations: Activations,
    key_head: KeyHead<'_>,
    mixed: &Buffer,
    span: &Span,
    base: &mut [f32],
    ring: &mut Ring<'_>,
    memory: &mut [f32],
    out: &mut Block<'_>,
) {
    let (key_dim, value_dim) = (key_head.shape.key_dim, key_head.shape.value_dim);
    let (keys, memory) = memory.split_at_mut(RING_TOKENS * key_dim);
    let (corrected, memory) = memory.split_at_mut(RING_TOKENS * value_dim);
    let (logs, memory) = memory.split_at_mut(RING_TOKENS);
    for (entry, key) in keys.chunks_mut(key_dim).enumerate().take(span.ring_len) {
        ring.keys.load(entry, 0, key);
    }
    let folds = span.ring_len == RING_TOKENS;
    if folds {
        for (head, base) in base.chunks_mut(key_head.state_elements()).enumerate() {
            gather(ring, head, RING_TOKENS, value_dim, corrected, logs);
            fold(simd, (key_dim, value_dim), keys, corrected, logs, base);
            round_state(ring.state_type, base);
        }
    }
    let committed = if folds { 0 } else { span.ring_len };
    let entries = committed + span.rows;
    // Keys, then queries of the rows, `[2 · rows, key_dim]`; keys also enter the ring.
    let (inputs, memory) = memory.split_at_mut(2 * span.rows * key_dim);
    for row in 0..span.rows {
        let mixed = mixed.row(span.first_row + row);
        inputs[(span.rows + row) * key_dim..][..key_dim].copy_from_slice(key_head.query(mixed));
        let key = &mut inputs[row * key_dim..][..key_dim];
        key.copy_from_slice(key_head.key(mixed));
        round_state(ring.state_type, key);
        keys[(committed + row) * key_dim..][..key_dim].copy_from_slice(key);
        ring.keys.store(committed + row, 0, key);
    }
    let (dots, memory) = memory.split_at_mut(2 * span.rows * RING_TOKENS);
    gemm_transposed(
        simd,
        (2 * span.rows, entries, key_dim),
        inputs,
        key_dim,
        keys,
        key_dim,
        dots,
        RING_TOKENS,
    );
    let (read, memory) = memory.split_at_mut(2 * span.rows * value_dim);
    let weights = &mut memory[..RING_TOKENS];
    for (head, base) in base.chunks(key_head.state_elements()).enumerate() {
        gather(ring, head, committed, value_dim, corrected, logs);
        // What the base state answers to every key and query.
        let product = (2 * span.rows, value_dim, key_dim);
        gemm(simd, product, inputs, key_dim, 1, base, value_dim, read, value_dim, From::Zero);
        let (predicted, answers) = read.split_at_mut(span.rows * value_dim);
        for row in 0..span.rows {
            let mixed = mixed.row(span.first_row + row);
            let entry = committed + row;
            let log_decay = key_head.log_decay(mixed, head);
            let log = if entry == 0 { 0.0 } else { logs[entry - 1] } + log_decay;
            logs[entry] = log;
            ring.log_decays.row_mut(entry)[head] = log_decay;

            let predicted = &mut predicted[row * value_dim..][..value_dim];
            let dots_of = |part: usize| &dots[(part * span.rows + row) * RING_TOKENS..];
            read_ring(simd, entry, (log, logs), dots_of(0), corrected, weights, predicted);
            let u = &mut corrected[entry * value_dim..][..value_dim];
            let beta = key_head.beta(mixed, head);
            for ((u, value), predicted) in u.iter_mut().zip(key_head.value(mixed, head)).zip(&*predicted) {
                *u = beta * (value - predicted);
            }
            round_state(ring.state_type, u);
            ring.corrected.store(entry, head * value_dim, u);

            let answer = &mut answers[row * value_dim..][..value_dim];
            read_ring(simd, entry + 1, (log, logs), dots_of(1), corrected, weights, answer);
            let out = &mut out.row_mut(row)[head * value_dim..][..value_dim];
            out.copy_from_slice(answer);
            round_row(activations, out);
        }
    }
}

/// Copies one value head's first entries out of the ring; `logs` become running sums.
fn gather(
    ring: &mut Ring<'_>,
    head: usize,
    entries: usize,
    dim: usize,
    corrected: &mut [f32],
    logs: &mut [f32],
) {
    let mut sum = 0.0;
    for entry in 0..entries {
        ring.corrected.load(entry, head * dim, &mut corrected[entry * dim..][..dim]);
        sum += ring.log_decays.row_mut(entry)[head];
        logs[entry] = sum;
    }
}

/// `sum ← e^log · sum + Σ_{j < entries} e^(log − logs[j]) · dots[j] · corrected[j]`.
#[inline(always)]
fn read_ring<S: Simd>(
    simd: S,
    entries: usize,
    (log, logs): (f32, &[f32]),
    dots: &[f32],
    corrected: &[f32],
    weights: &mut [f32],
    sum: &mut [f32],
) {
    let dim = sum.len();
    let decay = simd.splat(exp_one(simd, log));
    for part in sum.chunks_mut(S::LANES) {
        simd.store_part(part, simd.mul(simd.load_part(part), decay));
    }
    decayed(simd, log, &logs[..entries], weights);
    weights.iter_mut().zip(&dots[..entries]).for_each(|(weight, dot)| *weight *= dot);
    gemm(simd, (1, dim, entries), weights, RING_TOKENS, 1, corrected, dim, sum, dim, From::Old);
}

/// `weights[j] = e^(log − logs[j])`.
#[inline(always)]
pub(super) fn decayed<S: Simd>(simd: S, log: f32, logs: &[f32], weights: &mut [f32]) {
    for (logs, weights) in logs.chunks(S::LANES).zip(weights.chunks_mut(S::LANES)) {
        let value = exp(simd, simd.sub(simd.splat(log), simd.load_part(logs)));
        let len = logs.len();
        simd.store_part(&mut weights[..len], value);
    }
}

/// `e^x` of one value by the vectors' own arithmetic.
#[inline(always)]
pub(super) fn exp_one<S: Simd>(simd: S, x: f32) -> f32 {
    let mut lanes = [0.0; MAX_LANES];
    simd.store(&mut lanes, exp(simd, simd.splat(x)));
    lanes[0]
}

/// `S ← e^(G_R) S + Σ_j e^(G_R − G_j) k̂_j u_jᵀ` over the whole ring; scales `corrected` by the way.
#[inline(always)]
fn fold<S: Simd>(
    simd: S,
    (key_dim, value_dim): (usize, usize),
    keys: &[f32],
    corrected: &mut [f32],
    logs: &[f32],
    base: &mut [f32],
) {
    let end = logs[RING_TOKENS - 1];
    let mut weights = [0.0; RING_TOKENS];
    decayed(simd, end, logs, &mut weights);
    write_state(simd, (RING_TOKENS, key_dim, value_dim), exp_one(simd, end), &weights, keys, corrected, base);
}

/// `S ← factor · S + Σ_j weights[j] · k_j u_jᵀ` in index order; scales the `u` by the weights.
#[inline(always)]
pub(super) fn write_state<S: Simd>(
    simd: S,
    (entries, key_dim, value_dim): (usize, usize, usize),
    factor: f32,
    weights: &[f32],
    keys: &[f32],
    corrected: &mut [f32],
    base: &mut [f32],
) {
    for (u, weight) in corrected.chunks_mut(value_dim).zip(weights).take(entries) {
        for value in u.iter_mut() {
            *value *= weight;
        }
    }
    for value in base.iter_mut() {
        *value *= factor;
    }
    let product = (key_dim, value_dim, entries);
    gemm(simd, product, keys, 1, key_dim, corrected, value_dim, base, value_dim, From::Old);
}
