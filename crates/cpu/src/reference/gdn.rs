//! Gated `DeltaNet`: convolution and gates, the chunked form, the base-and-ring form.
//!
//! Per value head with state S `[key_dim, value_dim]` and decay `g = e^(log-decay)`, the recurrence that both
//! forms compute is `S ← g S; u = β (v − Sᵀ k̂); S ← S + k̂ uᵀ; o = Sᵀ q̂`
//! (Gated Delta Networks, Yang, Kautz and Hatamizadeh 2024).

use qwill_device::batch::CONV_RING;
use qwill_device::{Activations, Batch, GdnShape, Phase, RING_TOKENS, StateType};

use super::linear::dot;
use super::norm::{sigmoid, silu, softplus};
use crate::state::{StateLayer, round_state};
use crate::{Buffer, Cache};

/// Added to the sum of squares of a query or key head before the root.
const L2_EPS: f32 = 1e-6;

/// Weights of [`prepare`], as in `GdnWeights`.
pub(super) struct GateWeights<'a> {
    pub(super) conv: &'a [f32],
    pub(super) decay_rate: &'a [f32],
    pub(super) dt_bias: &'a [f32],
}

/// Convolution, gates and L2 norms, see `Device::gdn_prepare`. Row by row: the raw input enters the conv ring, rounded
/// to its type, then the convolution reads the ring.
pub(super) fn prepare(
    activations: Activations,
    batch: &Batch,
    shape: &GdnShape,
    weights: &GateWeights<'_>,
    projected: &Buffer,
    state: &mut StateLayer,
    mixed: &mut Buffer,
) {
    for span in &batch.spans {
        let mut ring = state.read_conv(span.slot);
        for index in 0..span.rows {
            let input = projected.row(span.first_row + index);
            let out = &mut mixed.row_mut(span.first_row + index)[..shape.mixed()];
            let raw: Vec<f32> =
                input[..shape.conv_channels()].iter().map(|x| state.state_type.round_input(*x)).collect();
            convolve(shape, weights.conv, span.position + index, &raw, &mut ring, out);
            finish_row(activations, shape, weights, input, out);
        }
        state.write_conv(span.slot, &ring);
    }
}

/// L2 norms of the convolved `q | k`, roundings, and the gates.
fn finish_row(
    activations: Activations,
    shape: &GdnShape,
    weights: &GateWeights<'_>,
    input: &[f32],
    out: &mut [f32],
) {
    for (head, values) in out[..2 * shape.key_columns()].chunks_mut(shape.key_dim).enumerate() {
        let factor = if head < shape.key_heads { 1.0 / (shape.key_dim as f32).sqrt() } else { 1.0 };
        normalise(values, factor);
    }
    for value in &mut out[..shape.conv_channels()] {
        *value = activations.round(*value);
    }
    for head in 0..shape.value_heads {
        let decay_input = input[shape.a_column() + head] + weights.dt_bias[head];
        out[shape.log_decay_column() + head] = weights.decay_rate[head] * softplus(decay_input);
        out[shape.beta_column() + head] = sigmoid(input[shape.b_column() + head]);
    }
}

/// Stores the raw input at its place in the ring and writes `silu(Σ_j taps[j] · input(position − width + 1 + j))`
/// per channel, oldest sample first; positions before 0 count as 0.
fn convolve(
    shape: &GdnShape,
    taps: &[f32],
    position: usize,
    input: &[f32],
    ring: &mut [f32],
    out: &mut [f32],
) {
    let (channels, width) = (shape.conv_channels(), shape.conv_width);
    ring[position % CONV_RING * channels..][..channels].copy_from_slice(input);
    let out = &mut out[..channels];
    out.fill(0.0);
    for (tap, age) in (0..width).rev().enumerate() {
        if age > position {
            continue;
        }
        let sample = &ring[(position - age) % CONV_RING * channels..][..channels];
        for ((sum, sample), taps) in out.iter_mut().zip(sample).zip(taps.chunks(width)) {
            *sum += taps[tap] * sample;
        }
    }
    for value in out.iter_mut() {
        *value = silu(*value);
    }
}

/// `x ← x · rsqrt(Σx² + 1e-6) · factor`.
fn normalise(x: &mut [f32], factor: f32) {
    let scale = factor / (dot(x, x) + L2_EPS).sqrt();
    for value in x.iter_mut() {
        *value *= scale;
    }
}

/// What one value head reads of a row of the mixed buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadRow<'a> {
    pub(super) query: &'a [f32],
    pub(super) key: &'a [f32],
    pub(super) value: &'a [f32],
    pub(super) log_decay: f32,
    pub(super) beta: f32,
}

impl<'a> HeadRow<'a> {
    fn of(shape: &GdnShape, mixed: &'a [f32], head: usize) -> Self {
        let key_head = shape.key_head_of(head) * shape.key_dim;
        let values = 2 * shape.key_columns() + head * shape.value_dim;
        Self {
            query: &mixed[key_head..][..shape.key_dim],
            key: &mixed[shape.key_columns() + key_head..][..shape.key_dim],
            value: &mixed[values..][..shape.value_dim],
            log_decay: mixed[shape.log_decay_column() + head],
            beta: mixed[shape.beta_column() + head],
        }
    }
}

/// The gated delta rule of one layer, see `Device::gdn_scan`.
pub(super) fn scan(
    activations: Activations,
    batch: &Batch,
    gdn_layer: usize,
    shape: &GdnShape,
    mixed: &Buffer,
    cache: &mut Cache,
    out: &mut Buffer,
) {
    let state = &mut cache.states[gdn_layer];
    match batch.phase {
        Phase::Prefill => scan_prefill(activations, batch, shape, mixed, state, out),
        Phase::Rows => scan_rows(activations, batch, shape, mixed, state, out),
    }
}

fn scan_prefill(
    activations: Activations,
    batch: &Batch,
    shape: &GdnShape,
    mixed: &Buffer,
    state: &mut StateLayer,
    out: &mut Buffer,
) {
    let head_elements = shape.key_dim * shape.value_dim;
    for chunk in &batch.chunks {
        let slot = batch.spans[chunk.span].slot;
        let mut base = state.read_base(slot);
        for (head, base) in base.chunks_mut(head_elements).enumerate() {
            let chunk_rows = chunk.first_row..chunk.first_row + chunk.rows;
            let rows: Vec<HeadRow> =
                chunk_rows.clone().map(|row| HeadRow::of(shape, mixed.row(row), head)).collect();
            for (row, output) in chunk_rows.zip(chunk_head(&rows, base)) {
                store_rounded(activations, &output, &mut out.row_mut(row)[head * shape.value_dim..]);
            }
        }
        state.write_base(slot, &base);
    }
}

fn scan_rows(
    activations: Activations,
    batch: &Batch,
    shape: &GdnShape,
    mixed: &Buffer,
    state: &mut StateLayer,
    out: &mut Buffer,
) {
    let (head_elements, state_type) = (shape.key_dim * shape.value_dim, state.state_type);
    for span in &batch.spans {
        let (mut base, mut ring) = (state.read_base(span.slot), state.read_ring(span.slot));
        let folds = span.ring_len == RING_TOKENS;
        if folds {
            // All heads before the first append: value heads share the keys of the ring's entries.
            for (head, base) in base.chunks_mut(head_elements).enumerate() {
                HeadRing::new(shape, state_type, head, &mut ring, RING_TOKENS).fold(base);
            }
            state.write_base(span.slot, &base);
        }
        let ring_len = if folds { 0 } else { span.ring_len };
        for (head, base) in base.chunks(head_elements).enumerate() {
            let mut ring = HeadRing::new(shape, state_type, head, &mut ring, ring_len);
            for row in span.first_row..span.first_row + span.rows {
                let output = ring.append(base, &HeadRow::of(shape, mixed.row(row), head));
                store_rounded(activations, &output, &mut out.row_mut(row)[head * shape.value_dim..]);
            }
        }
        state.write_ring(span.slot, &ring);
    }
}

fn store_rounded(activations: Activations, values: &[f32], out: &mut [f32]) {
    for (slot, value) in out.iter_mut().zip(values) {
        *slot = activations.round(*value);
    }
}

/// `sum[d] += factor · x[d]`.
fn add_scaled(sum: &mut [f32], factor: f32, x: &[f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += factor * x;
    }
}

/// `factor · Sᵀ x` for S `[x.len(), value_dim]`, summed in key order.
fn read_state(base: &[f32], x: &[f32], factor: f32) -> Vec<f32> {
    let value_dim = base.len() / x.len();
    let mut sum = vec![0.0; value_dim];
    for (x, state_row) in x.iter().zip(base.chunks(value_dim)) {
        add_scaled(&mut sum, *x, state_row);
    }
    for value in &mut sum {
        *value *= factor;
    }
    sum
}

/// `S ← factor · S + Σ_j weights[j] · keys[j] corrected[j]ᵀ`, summed in index order.
fn update_state(base: &mut [f32], factor: f32, writes: &[(f32, &[f32], &[f32])]) {
    let Some((_, _, first)) = writes.first() else { return };
    for (d, state_row) in base.chunks_mut(first.len()).enumerate() {
        for value in state_row.iter_mut() {
            *value *= factor;
        }
        for (weight, key, corrected) in writes {
            add_scaled(state_row, weight * key[d], corrected);
        }
    }
}

/// One chunk of one value head: returns the outputs and carries the state `[key_dim, value_dim]`.
///
/// With `G_i` the sum of the first i log-decays and `L_ij = e^(G_i − G_j)` for i ≥ j, else 0 (the difference
/// before the exponential, the mask before both: no overflow, no 0/0):
/// `A = strict_lower(diag(β) K Kᵀ ⊙ L)`; `U' = (I + A)⁻¹ diag(β) (V − diag(e^G) K S)`, which is `U − W S` of the
/// WY form with both right-hand sides solved at once by forward substitution;
/// `O = diag(e^G) Q S + (Q Kᵀ ⊙ L) U'`; `S ← e^(G_n) S + (diag(e^(G_n − G)) K)ᵀ U'`.
pub(super) fn chunk_head(rows: &[HeadRow<'_>], base: &mut [f32]) -> Vec<Vec<f32>> {
    let logs = log_sums(rows.iter().map(|row| row.log_decay));
    let mut corrected: Vec<Vec<f32>> = Vec::with_capacity(rows.len());
    for (i, row) in rows.iter().enumerate() {
        let mut predicted = read_state(base, row.key, decay(logs[i]));
        for (j, corrected) in corrected.iter().enumerate() {
            let weight = decay(logs[i] - logs[j]) * dot(rows[j].key, row.key);
            add_scaled(&mut predicted, weight, corrected);
        }
        corrected.push(row.value.iter().zip(predicted).map(|(v, p)| row.beta * (v - p)).collect());
    }
    let outputs = rows.iter().enumerate().map(|(i, row)| {
        let mut output = read_state(base, row.query, decay(logs[i]));
        for (j, corrected) in corrected.iter().enumerate().take(i + 1) {
            let weight = decay(logs[i] - logs[j]) * dot(rows[j].key, row.query);
            add_scaled(&mut output, weight, corrected);
        }
        output
    });
    let outputs = outputs.collect();
    let end = logs.last().copied().unwrap_or(0.0);
    let writes: Vec<_> = rows
        .iter()
        .zip(&logs)
        .zip(&corrected)
        .map(|((row, log), u)| (decay(end - log), row.key, &u[..]))
        .collect();
    update_state(base, decay(end), &writes);
    outputs
}

/// Sums of the first 1, 2, … log-decays, in f64: a head that forgets everything at one token (−90) and nothing at
/// the next would otherwise lose the small differences in the rounding of the large sum.
fn log_sums(log_decays: impl Iterator<Item = f32>) -> Vec<f64> {
    log_decays
        .scan(0.0, |sum, log_decay| {
            *sum += f64::from(log_decay);
            Some(*sum)
        })
        .collect()
}

/// `e^log` in f32.
fn decay(log: f64) -> f32 {
    (log as f32).exp()
}

/// One value head's view of a slot's ring: entries `k̂ of the key heads | u | log-decay of the value heads`.
///
/// The state after entry m is `G_m S_b + Σ_j (G_m/G_j) k̂_j u_jᵀ`, never formed between folds. Rows of a round see
/// earlier rows of it as stored entries, so the bits do not depend on how tokens are split into rounds, and a
/// rejected row is undone by a smaller length.
pub(super) struct HeadRing<'a> {
    /// Entries and what they are folded into are rounded to it.
    state_type: StateType,
    entries: &'a mut [f32],
    entry_elements: usize,
    key_at: usize,
    key_dim: usize,
    corrected_at: usize,
    value_dim: usize,
    log_decay_at: usize,
    /// See [`log_sums`].
    logs: Vec<f64>,
}

impl<'a> HeadRing<'a> {
    /// A view of `len` entries of the slot's ring.
    pub(super) fn new(
        shape: &GdnShape,
        state_type: StateType,
        head: usize,
        entries: &'a mut [f32],
        len: usize,
    ) -> Self {
        let (entry_elements, values_end) = (shape.ring_entry(), shape.key_columns() + shape.value_columns());
        let log_decay_at = values_end + head;
        let logs = log_sums((0..len).map(|j| entries[j * entry_elements + log_decay_at]));
        Self {
            state_type,
            entries,
            entry_elements,
            key_at: shape.key_head_of(head) * shape.key_dim,
            key_dim: shape.key_dim,
            corrected_at: shape.key_columns() + head * shape.value_dim,
            value_dim: shape.value_dim,
            log_decay_at,
            logs,
        }
    }

    fn key(&self, j: usize) -> &[f32] {
        &self.entries[j * self.entry_elements + self.key_at..][..self.key_dim]
    }

    fn corrected(&self, j: usize) -> &[f32] {
        &self.entries[j * self.entry_elements + self.corrected_at..][..self.value_dim]
    }

    /// `sum += Σ_{j < len} (G/G_j) (k̂_j · x) u_j` with `G = e^log`, in index order.
    fn read(&self, x: &[f32], log: f64, sum: &mut [f32]) {
        for (j, entry_log) in self.logs.iter().enumerate() {
            let weight = decay(log - entry_log) * dot(self.key(j), x);
            add_scaled(sum, weight, self.corrected(j));
        }
    }

    /// Appends the next row as entry t and returns its output:
    /// `pred = G_t S_bᵀ k̂_t + Σ_{j<t} (G_t/G_j)(k̂_j·k̂_t) u_j`, `u_t = β_t (v_t − pred)`,
    /// `o_t = G_t S_bᵀ q̂_t + Σ_{j≤t} (G_t/G_j)(k̂_j·q̂_t) u_j`.
    pub(super) fn append(&mut self, base: &[f32], row: &HeadRow<'_>) -> Vec<f32> {
        let log = self.logs.last().copied().unwrap_or(0.0) + f64::from(row.log_decay);
        let mut key = row.key.to_vec();
        round_state(self.state_type, &mut key);
        let mut predicted = read_state(base, &key, decay(log));
        self.read(&key, log, &mut predicted);

        let entry = &mut self.entries[self.logs.len() * self.entry_elements..][..self.entry_elements];
        entry[self.key_at..][..self.key_dim].copy_from_slice(&key);
        let corrected = entry[self.corrected_at..][..self.value_dim].iter_mut();
        for ((u, value), predicted) in corrected.zip(row.value).zip(&predicted) {
            *u = self.state_type.round(row.beta * (value - predicted));
        }
        entry[self.log_decay_at] = row.log_decay;
        self.logs.push(log);

        let mut output = read_state(base, row.query, decay(log));
        self.read(row.query, log, &mut output);
        output
    }

    /// `S_b ← G_R S_b + Σ_j (G_R/G_j) k̂_j u_jᵀ` over all entries; the ring is then empty.
    pub(super) fn fold(self, base: &mut [f32]) {
        let end = self.logs.last().copied().unwrap_or(0.0);
        let writes: Vec<_> = self
            .logs
            .iter()
            .enumerate()
            .map(|(j, log)| (decay(end - log), self.key(j), self.corrected(j)))
            .collect();
        update_state(base, decay(end), &writes);
        round_state(self.state_type, base);
    }
}
