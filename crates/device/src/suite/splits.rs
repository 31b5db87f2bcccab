//! Promises about one sequence over several steps: how its tokens are cut into slices and rounds, and rows that
//! were rejected on the way, leave no trace in the bits.

use std::fmt;

use super::gdn::{HostWeights, with_state_types};
use super::outputs::{Closeness, Outputs, POISON, Tensor};
use super::rows::{activations, download, poisoned, poisoned_full, upload};
use super::{Bench, Failure, Random};
use crate::batch::{CHUNK_TOKENS, MAX_ROUND_ROWS, PAGE_TOKENS};
use crate::{Batch, CacheSpec, Chunk, Device, Geometry, KvType, Phase, RING_TOKENS, Span, StateType};

/// What keys and values are stored as, in turn.
const KV_TYPES: [KvType; 4] = [KvType::Bf16, KvType::Int8, KvType::F32, KvType::Int8];

/// One GDN layer and one attention layer fed with given projections, token by token of one sequence.
struct Sequence {
    spec: CacheSpec,
    gates: HostWeights,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    /// `[tokens, projected]` of the GDN layer.
    gdn: Vec<f32>,
    /// `[tokens, projected]` of the attention layer.
    attention: Vec<f32>,
    /// Where its pages and its state are.
    pages: Vec<u32>,
    slot: usize,
}

/// One step of the sequence.
#[derive(Clone)]
struct Cut {
    phase: Phase,
    /// Rows of the sequence's own tokens.
    kept: usize,
    /// Rows after them, of other tokens, that will be rejected.
    rejected: usize,
    /// Lengths of the chunks of a prompt slice.
    chunks: Vec<usize>,
}

/// Short, since a failure lists them all: `[64, 3]` is a slice of two chunks, `3+1` a round that keeps 3 rows of 4.
impl fmt::Debug for Cut {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.phase {
            Phase::Prefill => write!(out, "{:?}", self.chunks),
            Phase::Rows => write!(out, "{}+{}", self.kept, self.rejected),
        }
    }
}

impl Cut {
    fn slice(chunks: &[usize]) -> Self {
        Self { phase: Phase::Prefill, kept: chunks.iter().sum(), rejected: 0, chunks: chunks.to_vec() }
    }
    fn round(kept: usize, rejected: usize) -> Self {
        Self { phase: Phase::Rows, kept, rejected, chunks: Vec::new() }
    }
}

/// The ring after `kept` tokens of a round that found it at `ring_len`.
fn ring_after(ring_len: usize, kept: usize) -> usize {
    ring_len % RING_TOKENS + kept
}

impl Sequence {
    fn random(
        bench_random: &mut Random,
        mode: crate::Activations,
        geometry: &Geometry,
        (kv_type, state_type): (KvType, StateType),
        tokens: usize,
    ) -> Self {
        let (attention, gdn) = (geometry.attention, geometry.gdn);
        let pages = (tokens + MAX_ROUND_ROWS).div_ceil(PAGE_TOKENS) + 2;
        let mut page_ids: Vec<u32> = (0..pages as u32).collect();
        bench_random.shuffle(&mut page_ids);
        Self {
            spec: CacheSpec {
                kv_layers: 1,
                attention,
                kv_type,
                pages,
                gdn_layers: 1,
                gdn,
                state_type,
                slots: 3,
            },
            gates: HostWeights::random(bench_random, &gdn),
            q_norm: bench_random.normals(attention.head_dim, 1.0),
            k_norm: bench_random.normals(attention.head_dim, 1.0),
            gdn: activations(bench_random, mode, tokens * gdn.projected(), 2.0),
            attention: activations(bench_random, mode, tokens * attention.projected(), 2.0),
            pages: page_ids,
            slot: bench_random.below(3),
        }
    }

    fn batch(&self, cut: &Cut, position: usize, ring_len: usize) -> Batch {
        let rows = cut.kept + cut.rejected;
        let mut chunks = Vec::new();
        for length in &cut.chunks {
            let first_row = chunks.iter().map(|chunk: &Chunk| chunk.rows).sum();
            chunks.push(Chunk { span: 0, first_row, rows: *length });
        }
        let span = Span { first_row: 0, rows, position, slot: self.slot, ring_len, first_page: 0 };
        let page_table = self.pages[..span.pages()].to_vec();
        Batch { phase: cut.phase, tokens: vec![0; rows], spans: vec![span], page_table, chunks }
    }

    /// The rows of a step: the sequence's own, then ones that look alike and are wrong.
    fn rows(all: &[f32], width: usize, position: usize, cut: &Cut) -> Vec<f32> {
        let mut rows = all[position * width..(position + cut.kept) * width].to_vec();
        let wrong = all[..cut.rejected * width].iter().map(|value| 1.0 - value);
        rows.extend(wrong);
        rows
    }

    /// Runs the steps; returns the layers' outputs for every token kept, and the state at the end.
    fn run<D: Device>(&self, device: &mut D, cuts: &[Cut]) -> Result<Outputs, Failure> {
        let (gdn_shape, shape) = (self.spec.gdn, self.spec.attention);
        let gates = self.gates.upload(device)?;
        let (q_norm, k_norm) = (device.vector(&self.q_norm)?, device.vector(&self.k_norm)?);
        let mut cache = device.cache(&self.spec)?;
        device.clear_slot(&mut cache, self.slot)?;
        let (mut position, mut ring_len) = (0, 0);
        let (mut scanned, mut attended) = (Vec::new(), Vec::new());
        for cut in cuts {
            let batch = self.batch(cut, position, ring_len);
            batch.check().map_err(Failure::new)?;
            device.begin_step(&batch)?;
            let rows = batch.rows();

            let projected = Self::rows(&self.gdn, gdn_shape.projected(), position, cut);
            let projected = upload(device, gdn_shape.projected(), &projected)?;
            let mut mixed = poisoned_full(device, rows, gdn_shape.mixed())?;
            device.gdn_prepare(&batch, 0, &gdn_shape, &gates, &projected, &mut cache, &mut mixed)?;
            let mut out = poisoned(device, rows, gdn_shape.value_columns())?;
            device.gdn_scan(&batch, 0, &gdn_shape, &mixed, &mut cache, &mut out)?;
            let values = download(device, &out, rows, gdn_shape.value_columns())?;
            scanned.extend_from_slice(&values[..cut.kept * gdn_shape.value_columns()]);

            let projected = Self::rows(&self.attention, shape.projected(), position, cut);
            let projected = upload(device, shape.projected(), &projected)?;
            let mut query = poisoned(device, rows, shape.query_columns())?;
            device
                .attention_prepare(&batch, 0, &shape, &projected, &q_norm, &k_norm, &mut cache, &mut query)?;
            let mut out = poisoned(device, rows, shape.query_columns())?;
            device.attention(&batch, 0, &shape, &query, &projected, &cache, &mut out)?;
            let values = download(device, &out, rows, shape.query_columns())?;
            attended.extend_from_slice(&values[..cut.kept * shape.query_columns()]);

            position += cut.kept;
            if cut.phase == Phase::Rows {
                ring_len = ring_after(ring_len, cut.kept);
            }
        }
        let state = device.read_state(&cache, 0, self.slot)?;
        let mut ring = state.ring;
        ring[ring_len * gdn_shape.ring_entry()..].fill(POISON);
        let tensor = Tensor::new;
        let closeness = Closeness::FromState(self.spec.state_type);
        Ok(Outputs {
            rows: vec![
                tensor("gdn", gdn_shape.value_columns(), scanned, closeness),
                tensor(
                    "attention",
                    shape.query_columns(),
                    attended,
                    Closeness::FromStored(self.spec.kv_type),
                ),
            ],
            spans: vec![
                tensor("base", gdn_shape.state_elements(), state.base, closeness),
                tensor("ring", ring.len(), ring, closeness),
            ],
        })
    }
}

/// Cuts of equal meaning must give equal bits; the first must agree with the reference.
fn compare<D: Device, R: Device>(
    bench: &mut Bench<'_, D, R>,
    sequence: &Sequence,
    cuts: &[Vec<Cut>],
) -> Result<(), Failure> {
    let Some((first, others)) = cuts.split_first() else { return Ok(()) };
    let expected = sequence.run(bench.reference, first)?;
    let found = sequence.run(bench.device, first).map_err(|failure| failure.within(&format!("{first:?}")))?;
    let error = found.close_to(&expected, bench.activations, &bench.options.tolerance);
    bench.worst_error =
        bench.worst_error.max(error.map_err(|failure| failure.within(&format!("{first:?}")))?);
    bench.runs += 1;
    for cut in others {
        let other = sequence.run(bench.device, cut).map_err(|failure| failure.within(&format!("{cut:?}")))?;
        found.same_bits(&other, &format!("when cut as {cut:?}"))?;
        bench.runs += 1;
    }
    Ok(())
}

/// The geometries whose sequences are worth many steps here: the ones with narrow states.
fn narrow_geometries<D, R>(bench: &Bench<'_, D, R>) -> Vec<Geometry> {
    let narrow = bench.options.geometries.iter().filter(|geometry| geometry.gdn.value_columns() <= 1000);
    narrow.cloned().collect()
}

/// Random chunk lengths that sum to `tokens`.
fn random_chunks(random: &mut Random, tokens: usize) -> Vec<usize> {
    let mut chunks = Vec::new();
    let mut left = tokens;
    while left > 0 {
        let most = left.min(CHUNK_TOKENS);
        let length = if random.chance(0.6) { most } else { random.between(1, most) };
        chunks.push(length);
        left -= length;
    }
    chunks
}

/// The chunks in slices of random size.
fn random_slices(random: &mut Random, chunks: &[usize]) -> Vec<Cut> {
    let mut slices = Vec::new();
    let mut rest = chunks;
    while !rest.is_empty() {
        let (slice, after) = rest.split_at(random.between(1, rest.len().min(3)));
        slices.push(Cut::slice(slice));
        rest = after;
    }
    slices
}

pub(super) fn prefill_slices<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in narrow_geometries(bench) {
        let lengths = [2, 65, 128, 300].into_iter().zip(KV_TYPES).flat_map(with_state_types);
        for ((tokens, kv_type), state_type) in lengths {
            let (random, types) = (&mut bench.random, (kv_type, state_type));
            let sequence = Sequence::random(random, bench.activations, &geometry, types, tokens);
            let chunks = random_chunks(&mut bench.random, tokens);
            let one_each = chunks.iter().map(|chunk| Cut::slice(&[*chunk])).collect();
            let mut cuts = vec![vec![Cut::slice(&chunks)], one_each];
            cuts.extend((0..2).map(|_| random_slices(&mut bench.random, &chunks)));
            compare(bench, &sequence, &cuts)?;
        }
    }
    Ok(())
}

/// Rounds for `tokens` tokens: as many kept rows as `kept` says and as many rejected ones as `rejected` says, within
/// what the ring and a round allow.
fn rounds(
    tokens: usize,
    mut kept: impl FnMut(usize) -> usize,
    mut rejected: impl FnMut(usize) -> usize,
) -> Vec<Cut> {
    let (mut cuts, mut done, mut ring_len) = (Vec::new(), 0, 0);
    while done < tokens {
        let room = MAX_ROUND_ROWS.min(RING_TOKENS - ring_len % RING_TOKENS);
        let keep = kept(room.min(tokens - done));
        cuts.push(Cut::round(keep, rejected(room - keep)));
        done += keep;
        ring_len = ring_after(ring_len, keep);
    }
    cuts
}

/// A prompt, then rounds.
fn after_prompt(prompt: usize, rounds: Vec<Cut>) -> Vec<Cut> {
    let mut cuts: Vec<Cut> = if prompt > 0 { vec![Cut::slice(&[prompt])] } else { Vec::new() };
    cuts.extend(rounds);
    cuts
}

pub(super) fn round_splits<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in narrow_geometries(bench) {
        let prompts = [0, 1, 63, 64].into_iter().zip(KV_TYPES).flat_map(with_state_types);
        for ((prompt, kv_type), state_type) in prompts {
            let tokens = 2 * RING_TOKENS + 7;
            let (random, types, all) = (&mut bench.random, (kv_type, state_type), prompt + tokens);
            let sequence = Sequence::random(random, bench.activations, &geometry, types, all);
            let mut cuts = vec![rounds(tokens, |_| 1, |_| 0), rounds(tokens, |most| most, |_| 0)];
            for _ in 0..3 {
                cuts.push(rounds(tokens, |most| bench.random.between(1, most), |_| 0));
            }
            let cuts: Vec<_> = cuts.into_iter().map(|rounds| after_prompt(prompt, rounds)).collect();
            compare(bench, &sequence, &cuts)?;
        }
    }
    Ok(())
}

pub(super) fn rejected_rows<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in narrow_geometries(bench) {
        let prompts = [0, 2, 60].into_iter().zip(KV_TYPES).flat_map(with_state_types);
        for ((prompt, kv_type), state_type) in prompts {
            let tokens = 2 * RING_TOKENS + 20;
            let (random, types, all) = (&mut bench.random, (kv_type, state_type), prompt + tokens);
            let sequence = Sequence::random(random, bench.activations, &geometry, types, all);
            let mut cuts = vec![rounds(tokens, |_| 1, |_| 0), rounds(tokens, |_| 1, |room| room)];
            for _ in 0..3 {
                let mut choices = bench.random.clone();
                bench.random.bits();
                let kept = |most| bench.random.between(1, most);
                cuts.push(rounds(tokens, kept, |room| choices.between(0, room)));
            }
            let cuts: Vec<_> = cuts.into_iter().map(|rounds| after_prompt(prompt, rounds)).collect();
            compare(bench, &sequence, &cuts)?;
        }
    }
    Ok(())
}
