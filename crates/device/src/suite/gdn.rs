//! Gated `DeltaNet`: convolution and gates, chunks, rounds on a ring.

use std::rc::Rc;

use super::batches::{self, SpanPlan, Step};
use super::outputs::{Closeness, Outputs, POISON, Tensor};
use super::rows::{
    activations, download, pick_rows, poisoned, poisoned_full, smaller_companies, upload, upload_as,
};
use super::{Bench, Failure, OpRun, Part, Random};
use crate::batch::{CONV_RING, MAX_ROUND_ROWS};
use crate::{
    Activations, Batch, CacheSpec, Device, GdnShape, GdnState, GdnWeights, Geometry, KvType, Phase,
    Precision, RING_TOKENS, Span, StateType,
};

/// The layer that the op works on; layer 0 must stay as it is.
const LAYER: usize = 1;

/// The small weights of a layer, on the host.
#[derive(Debug, Clone)]
pub(super) struct HostWeights {
    conv: Vec<f32>,
    taps: usize,
    decay_rate: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

impl HostWeights {
    /// Decay rates from nearly 0 to −16, as trained models have.
    pub(super) fn random(random: &mut Random, shape: &GdnShape) -> Self {
        let heads = shape.value_heads;
        Self {
            conv: random.normals(shape.conv_channels() * shape.conv_width, 0.5),
            taps: shape.conv_width,
            decay_rate: (0..heads).map(|_| -random.uniform(-6.0, 2.8).exp()).collect(),
            dt_bias: random.normals(heads, 2.0),
            norm: random.normals(shape.value_dim, 1.0),
        }
    }

    pub(super) fn upload<D: Device>(&self, device: &mut D) -> Result<GdnWeights<D>, Failure> {
        Ok(GdnWeights {
            conv: device.conv_taps(&self.conv, self.taps)?,
            decay_rate: device.vector(&self.decay_rate)?,
            dt_bias: device.vector(&self.dt_bias)?,
            norm: device.vector(&self.norm)?,
        })
    }
}

#[derive(Debug, Clone)]
enum Kind {
    Prepare(Rc<HostWeights>),
    Scan,
    Layer(Rc<HostWeights>),
}

#[derive(Debug, Clone)]
struct GdnRun {
    kind: Kind,
    spec: CacheSpec,
    batch: Batch,
    /// One per slot; both layers hold them.
    states: Rc<Vec<GdnState>>,
    /// `projected` or `mixed`.
    input: Vec<f32>,
}

impl GdnRun {
    fn shape(&self) -> GdnShape {
        self.spec.gdn
    }

    fn input_columns(&self) -> usize {
        match self.kind {
            Kind::Prepare(_) | Kind::Layer(_) => self.shape().projected(),
            Kind::Scan => self.shape().mixed(),
        }
    }

    fn prepare<D: Device>(
        &self,
        device: &mut D,
        cache: &mut D::Cache,
        weights: &HostWeights,
    ) -> Result<Vec<Tensor>, Failure> {
        let (shape, rows) = (self.shape(), self.batch.rows());
        let weights = weights.upload(device)?;
        let projected = upload(device, shape.projected(), &self.input)?;
        let mut mixed = poisoned_full(device, rows, shape.mixed())?;
        device.gdn_prepare(&self.batch, LAYER, &shape, &weights, &projected, cache, &mut mixed)?;
        let values = download(device, &mixed, rows, shape.mixed())?;
        let part = |name, first, width, closeness| {
            Tensor::new(name, shape.mixed(), values.clone(), closeness).columns(first, width)
        };
        let (keys, values_at) = (shape.key_columns(), 2 * shape.key_columns());
        Ok(vec![
            part("query", 0, keys, Closeness::Rounded),
            part("key", keys, keys, Closeness::Rounded),
            part("value", values_at, shape.value_columns(), Closeness::Rounded),
            part("log_decay", shape.log_decay_column(), shape.value_heads, Closeness::Exact),
            part("beta", shape.beta_column(), shape.value_heads, Closeness::Exact),
        ])
    }

    fn scan<D: Device>(&self, device: &mut D, cache: &mut D::Cache) -> Result<Vec<Tensor>, Failure> {
        let (shape, rows) = (self.shape(), self.batch.rows());
        let mixed = upload_as(device, shape.mixed(), &self.input, Precision::Full)?;
        let mut out = poisoned(device, rows, shape.value_columns())?;
        device.gdn_scan(&self.batch, LAYER, &shape, &mixed, cache, &mut out)?;
        let values = download(device, &out, rows, shape.value_columns())?;
        let closeness = Closeness::FromState(self.spec.state_type);
        Ok(vec![Tensor::new("out", shape.value_columns(), values, closeness)])
    }

    fn layer<D: Device>(
        &self,
        device: &mut D,
        cache: &mut D::Cache,
        weights: &HostWeights,
    ) -> Result<Vec<Tensor>, Failure> {
        let (shape, rows) = (self.shape(), self.batch.rows());
        let weights = weights.upload(device)?;
        let projected = upload(device, shape.projected(), &self.input)?;
        let mut mixed = poisoned_full(device, rows, shape.mixed())?;
        let mut scanned = poisoned(device, rows, shape.value_columns())?;
        let mut out = poisoned(device, rows, shape.value_columns())?;
        let work = (&mut mixed, &mut scanned);
        device.gdn_layer(&self.batch, LAYER, &shape, &weights, &projected, cache, work, &mut out)?;
        let values = download(device, &out, rows, shape.value_columns())?;
        let closeness = Closeness::StateOfRounded(self.spec.state_type);
        Ok(vec![Tensor::new("out", shape.value_columns(), values, closeness)])
    }

    /// Fails where a state changed that is not the op's: other slots, layer 0.
    fn check_others<D: Device>(&self, device: &mut D, cache: &D::Cache) -> Result<(), Failure> {
        for layer in 0..=LAYER {
            for (slot, expected) in self.states.iter().enumerate() {
                let used = layer == LAYER && self.batch.spans.iter().any(|span| span.slot == slot);
                if !used && !same_state(&device.read_state(cache, layer, slot)?, expected) {
                    return Err(Failure::new(format!("layer {layer} slot {slot} changed; no row is there")));
                }
            }
        }
        Ok(())
    }

    /// Fails where a scan changed the base state without a fold, or entries that precede the step's.
    fn check_history(&self, span: &Span, after: &GdnState) -> Result<(), Failure> {
        let before = &self.states[span.slot];
        if self.batch.phase == Phase::Prefill || span.ring_len == RING_TOKENS {
            return Ok(());
        }
        let committed = span.ring_len * self.shape().ring_entry();
        if !same_bits(&before.base, &after.base) {
            return Err(Failure::new(format!("the base state of slot {} changed without a fold", span.slot)));
        }
        if !same_bits(&before.ring[..committed], &after.ring[..committed]) {
            return Err(Failure::new(format!("committed ring entries of slot {} changed", span.slot)));
        }
        Ok(())
    }

    /// The parts of the spans' states that mean something afterwards.
    fn state_tensors<D: Device>(&self, device: &mut D, cache: &D::Cache) -> Result<Vec<Tensor>, Failure> {
        let shape = self.shape();
        let scans = !matches!(self.kind, Kind::Prepare(_));
        let mut parts: [Vec<f32>; 4] = Default::default();
        let mut conv = Vec::new();
        for span in &self.batch.spans {
            let mut state = device.read_state(cache, LAYER, span.slot)?;
            if scans {
                self.check_history(span, &state)?;
                clear_meaningless_entries(&self.batch, span, &shape, &mut state.ring);
            }
            parts[0].extend(state.base);
            for entry in state.ring.chunks(shape.ring_entry()) {
                let (keys, rest) = entry.split_at(shape.key_columns());
                let (corrected, log_decay) = rest.split_at(shape.value_columns());
                for (part, values) in parts[1..].iter_mut().zip([keys, corrected, log_decay]) {
                    part.extend_from_slice(values);
                }
            }
            conv.extend(state.conv);
        }
        let [base, keys, corrected, log_decay] = parts;
        let state_type = self.spec.state_type;
        // A scan copies the keys and decays that it is given; a layer computes them.
        let (changed, keys_closeness, decay_closeness) = match self.kind {
            Kind::Prepare(_) => (Closeness::Bits, Closeness::Bits, Closeness::Bits),
            Kind::Scan => (Closeness::State(state_type), Closeness::Bits, Closeness::Bits),
            Kind::Layer(_) => {
                let computed = Closeness::StateOfRounded(state_type);
                (computed, computed, Closeness::Exact)
            }
        };
        let ring = |width| RING_TOKENS * width;
        Ok(vec![
            Tensor::new("base", shape.state_elements(), base, changed),
            Tensor::new("ring_key", ring(shape.key_columns()), keys, keys_closeness),
            Tensor::new("ring_u", ring(shape.value_columns()), corrected, changed),
            Tensor::new("ring_log_decay", ring(shape.value_heads), log_decay, decay_closeness),
            Tensor::new("conv", CONV_RING * shape.conv_channels(), conv, Closeness::Bits),
        ])
    }
}

/// Zeroes ring entries after a scan that no later step may read.
fn clear_meaningless_entries(batch: &Batch, span: &Span, shape: &GdnShape, ring: &mut [f32]) {
    let valid = match batch.phase {
        Phase::Prefill => 0,
        Phase::Rows => span.ring_len % RING_TOKENS + span.rows,
    };
    ring[valid * shape.ring_entry()..].fill(0.0);
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn same_state(a: &GdnState, b: &GdnState) -> bool {
    same_bits(&a.base, &b.base) && same_bits(&a.ring, &b.ring) && same_bits(&a.conv, &b.conv)
}

impl OpRun for GdnRun {
    fn describe(&self) -> String {
        format!("{:?}, {:?} states, {}", self.shape(), self.spec.state_type, batches::describe(&self.batch))
    }

    fn execute<D: Device>(&self, device: &mut D) -> Result<Outputs, Failure> {
        let mut cache = device.cache(&self.spec)?;
        for layer in 0..=LAYER {
            for (slot, state) in self.states.iter().enumerate() {
                device.write_state(&mut cache, layer, slot, state)?;
            }
        }
        device.begin_step(&self.batch)?;
        let rows = match &self.kind {
            Kind::Prepare(weights) => self.prepare(device, &mut cache, weights)?,
            Kind::Scan => self.scan(device, &mut cache)?,
            Kind::Layer(weights) => self.layer(device, &mut cache, weights)?,
        };
        self.check_others(device, &cache)?;
        Ok(Outputs { rows, spans: self.state_tensors(device, &cache)? })
    }

    fn with_less_company(&self, random: &mut Random) -> Vec<Part<Self>> {
        let companies = smaller_companies(random, self.batch.spans.len()).into_iter();
        let part = |spans: Vec<usize>| {
            let (batch, rows) = batches::only_spans(&self.batch, &spans);
            let input = pick_rows(&self.input, self.input_columns(), &rows);
            Part { run: Self { batch, input, ..self.clone() }, rows, spans }
        };
        companies.map(part).collect()
    }
}

/// States of all slots as they are stored: random where a row may read, NaN elsewhere.
fn random_states(random: &mut Random, spec: &CacheSpec, step: &Step) -> Vec<GdnState> {
    let shape = &spec.gdn;
    let state = |random: &mut Random, span: Option<&Span>| {
        let base = random.normals(shape.state_elements(), 0.2);
        let mut ring = Vec::new();
        for _ in 0..RING_TOKENS {
            for _ in 0..shape.key_heads {
                ring.extend(unit(random, shape.key_dim, 1.0));
            }
            ring.extend(random.normals(shape.value_columns(), 1.0));
            ring.extend((0..shape.value_heads).map(|_| log_decay(random)));
        }
        let mut conv = random.normals(CONV_RING * shape.conv_channels(), 1.0);
        if let Some(span) = span {
            ring[span.ring_len * shape.ring_entry()..].fill(POISON);
            for (index, sample) in conv.chunks_mut(shape.conv_channels()).enumerate() {
                let readable = (1..shape.conv_width)
                    .any(|age| age <= span.position && (span.position - age) % CONV_RING == index);
                if !readable {
                    sample.fill(POISON);
                }
            }
        }
        GdnState { base, ring, conv }.rounded(shape, spec.state_type)
    };
    let of_slot = |slot| step.batch.spans.iter().find(|span| span.slot == slot);
    (0..step.slots).map(|slot| state(random, of_slot(slot))).collect()
}

/// A random vector of the given length.
fn unit(random: &mut Random, width: usize, length: f32) -> Vec<f32> {
    let mut values = random.normals(width, 1.0);
    let norm = values.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-3);
    for value in &mut values {
        *value *= length / norm;
    }
    values
}

/// Log-decays near 0 (nothing forgotten), moderate ones, and ones that forget everything at once.
fn log_decay(random: &mut Random) -> f32 {
    match random.below(8) {
        0 => 0.0,
        1 => -random.uniform(0.0, 1e-6),
        2 => -random.uniform(5.0, 90.0),
        _ => -random.uniform(0.0, 0.5),
    }
}

/// Rows as [`Device::gdn_prepare`] leaves them.
fn random_mixed(random: &mut Random, mode: Activations, shape: &GdnShape, rows: usize) -> Vec<f32> {
    let mut mixed = Vec::with_capacity(rows * shape.mixed());
    for _ in 0..rows {
        let first = mixed.len();
        for length in [1.0 / (shape.key_dim as f32).sqrt(), 1.0] {
            for _ in 0..shape.key_heads {
                mixed.extend(unit(random, shape.key_dim, length));
            }
        }
        mixed.extend(random.normals(shape.value_columns(), 1.0));
        for value in &mut mixed[first..] {
            *value = mode.round(*value);
        }
        mixed.extend((0..shape.value_heads).map(|_| log_decay(random)));
        mixed.extend((0..shape.value_heads).map(|_| random.uniform(0.0, 1.0)));
    }
    mixed
}

fn spec(geometry: &Geometry, state_type: StateType, slots: usize) -> CacheSpec {
    CacheSpec {
        kv_layers: 0,
        attention: geometry.attention,
        kv_type: KvType::F32,
        pages: 1,
        gdn_layers: LAYER + 1,
        gdn: geometry.gdn,
        state_type,
        slots,
    }
}

/// Sets of sequences of a prompt step: chunk boundaries and the first positions, where history is missing.
fn prompt_sets(geometry: &Geometry) -> Vec<Vec<SpanPlan>> {
    let plan = |rows, position| SpanPlan { rows, position, ring_len: 0 };
    if geometry.gdn.value_columns() > 1000 {
        return vec![vec![plan(66, 0), plan(2, 129)]];
    }
    let mut sets: Vec<Vec<SpanPlan>> =
        [1, 2, 3, 16, 63, 64, 65, 130].into_iter().map(|rows| vec![plan(rows, 0), plan(rows, 64)]).collect();
    sets.push((1..=6).map(|position| plan(7 - position, position)).collect());
    sets.push(vec![plan(129, 19), plan(20, 20), plan(21, 99_999)]);
    sets
}

/// Sets of sequences of a decode round: every kind of ring, full ones included.
fn round_sets(random: &mut Random, geometry: &Geometry) -> Vec<Vec<SpanPlan>> {
    let plan = |rows, ring_len| SpanPlan { rows, position: 77 + ring_len, ring_len };
    let last = RING_TOKENS - 1;
    if geometry.gdn.value_columns() > 1000 {
        return vec![vec![plan(1, last), plan(3, 0), plan(2, RING_TOKENS)]];
    }
    let mut sets: Vec<Vec<SpanPlan>> = [1, 2, 7, 8, 9, 15, MAX_ROUND_ROWS]
        .into_iter()
        .map(|rows| vec![plan(rows, 0), plan(rows, RING_TOKENS - rows), plan(rows, RING_TOKENS)])
        .collect();
    sets.push(vec![plan(1, last), plan(1, RING_TOKENS), plan(1, 0), plan(1, 1)]);
    sets.push((0..4).map(|position| SpanPlan { rows: 3, position, ring_len: 0 }).collect());
    for _ in 0..4 {
        let any = |random: &mut Random| {
            let ring_len = random.below(RING_TOKENS);
            plan(random.between(1, MAX_ROUND_ROWS.min(RING_TOKENS - ring_len)), ring_len)
        };
        sets.push((0..random.between(1, 6)).map(|_| any(random)).collect());
    }
    sets
}

pub(super) fn prepare<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        let shape = geometry.gdn;
        let prompts = prompt_sets(geometry).into_iter().map(|set| (Phase::Prefill, set));
        let rounds = round_sets(&mut bench.random, geometry).into_iter().map(|set| (Phase::Rows, set));
        for ((phase, plans), state_type) in prompts.chain(rounds).flat_map(with_state_types) {
            let random = &mut bench.random;
            let step = batches::step(random, phase, &plans, 100);
            let spec = spec(geometry, state_type, step.slots);
            let states = Rc::new(random_states(random, &spec, &step));
            let kind = Kind::Prepare(Rc::new(HostWeights::random(random, &shape)));
            let input = activations(random, bench.activations, step.batch.rows() * shape.projected(), 3.0);
            bench.check(&GdnRun { kind, spec, batch: step.batch, states, input })?;
        }
    }
    Ok(())
}

/// Something to run, once with every storage of states.
pub(super) fn with_state_types<T: Clone>(what: T) -> [(T, StateType); 2] {
    [(what.clone(), StateType::F32), (what, StateType::F16)]
}

fn scan<D: Device, R: Device>(
    bench: &mut Bench<'_, D, R>,
    geometry: &Geometry,
    phase: Phase,
    (plans, state_type): (&[SpanPlan], StateType),
    value_scale: f32,
) -> Result<(), Failure> {
    let random = &mut bench.random;
    let step = batches::step(random, phase, plans, 100);
    let spec = spec(geometry, state_type, step.slots);
    let states = Rc::new(random_states(random, &spec, &step));
    let mut input = random_mixed(random, bench.activations, &geometry.gdn, step.batch.rows());
    let values = 2 * geometry.gdn.key_columns()..geometry.gdn.conv_channels();
    for row in input.chunks_mut(geometry.gdn.mixed()) {
        row[values.clone()].iter_mut().for_each(|value| *value *= value_scale);
    }
    bench.check(&GdnRun { kind: Kind::Scan, spec, batch: step.batch, states, input })
}

/// A power of two that takes values beyond the largest half: they must saturate, not become infinite.
const HUGE: f32 = 1_048_576.0;

pub(super) fn scan_prefill<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        for (plans, state_type) in prompt_sets(geometry).into_iter().flat_map(with_state_types) {
            scan(bench, geometry, Phase::Prefill, (&plans, state_type), 1.0)?;
        }
        let plans = [SpanPlan { rows: 70, position: 0, ring_len: 0 }];
        scan(bench, geometry, Phase::Prefill, (&plans, StateType::F16), HUGE)?;
    }
    Ok(())
}

pub(super) fn scan_rows<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        for (plans, state_type) in
            round_sets(&mut bench.random, geometry).into_iter().flat_map(with_state_types)
        {
            scan(bench, geometry, Phase::Rows, (&plans, state_type), 1.0)?;
        }
        let plans = [SpanPlan { rows: 3, position: 40, ring_len: RING_TOKENS }];
        scan(bench, geometry, Phase::Rows, (&plans, StateType::F16), HUGE)?;
    }
    Ok(())
}

/// Whole layers, of rounds and, with fewer cases, of prompts.
pub(super) fn layer<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        let shape = geometry.gdn;
        let prompts = prompt_sets(geometry).into_iter().take(2).map(|set| (Phase::Prefill, set));
        let rounds = round_sets(&mut bench.random, geometry).into_iter().map(|set| (Phase::Rows, set));
        for ((phase, plans), state_type) in rounds.chain(prompts).flat_map(with_state_types) {
            let random = &mut bench.random;
            let step = batches::step(random, phase, &plans, 100);
            let spec = spec(geometry, state_type, step.slots);
            let states = Rc::new(random_states(random, &spec, &step));
            let kind = Kind::Layer(Rc::new(HostWeights::random(random, &shape)));
            let input = activations(random, bench.activations, step.batch.rows() * shape.projected(), 3.0);
            bench.check(&GdnRun { kind, spec, batch: step.batch, states, input })?;
        }
    }
    Ok(())
}
