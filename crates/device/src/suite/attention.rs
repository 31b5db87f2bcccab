//! Attention over pages.

use std::rc::Rc;

use super::batches::{self, SpanPlan, Step, rows_of};
use super::outputs::{Closeness, Outputs, POISON, Tensor};
use super::rows::{activations, download, pick_rows, poisoned, smaller_companies, upload};
use super::{Bench, Failure, OpRun, Part, Random};
use crate::batch::PAGE_TOKENS;
use crate::{AttentionShape, Batch, CacheSpec, Device, GdnShape, Geometry, KvPage, KvType, Phase, StateType};

/// The layer that the op works on; layer 0 must stay as it is.
const LAYER: usize = 1;

#[derive(Debug, Clone)]
enum Kind {
    /// `q_norm`, `k_norm`.
    Prepare(Vec<f32>, Vec<f32>),
    /// Queries `[rows, query_columns]`.
    Attend(Vec<f32>),
}

#[derive(Debug, Clone)]
struct AttentionRun {
    kind: Kind,
    spec: CacheSpec,
    batch: Batch,
    /// Contents of both layers.
    pages: Rc<Vec<KvPage>>,
    projected: Vec<f32>,
}

impl AttentionRun {
    fn shape(&self) -> AttentionShape {
        self.spec.attention
    }

    fn read_pages<D: Device>(&self, device: &mut D, cache: &D::Cache) -> Result<Vec<Vec<KvPage>>, Failure> {
        let layer = |device: &mut D, layer| {
            (0..self.spec.pages)
                .map(|page| device.read_page(cache, layer, page))
                .collect::<Result<Vec<_>, _>>()
        };
        Ok((0..=LAYER).map(|index| layer(device, index)).collect::<Result<Vec<_>, _>>()?)
    }

    /// Takes the cells of the batch's rows out of the pages, row by row; the cells are then poisoned.
    fn take_written(&self, pages: &mut [KvPage]) -> (Vec<f32>, Vec<f32>) {
        let columns = self.shape().kv_columns();
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (span, _, position) in rows_of(&self.batch) {
            let (page, offset) = self.batch.place(span, position);
            let cell = offset * columns..(offset + 1) * columns;
            for (taken, part) in [(&mut keys, &mut pages[page].keys), (&mut values, &mut pages[page].values)]
            {
                taken.extend_from_slice(&part[cell.clone()]);
                part[cell.clone()].fill(POISON);
            }
        }
        (keys, values)
    }

    fn prepare<D: Device>(
        &self,
        device: &mut D,
        mut cache: D::Cache,
        norms: (&[f32], &[f32]),
    ) -> Result<Outputs, Failure> {
        let (shape, rows) = (self.shape(), self.batch.rows());
        let mut before = self.read_pages(device, &cache)?;
        let projected = upload(device, shape.projected(), &self.projected)?;
        let mut query = poisoned(device, rows, shape.query_columns())?;
        let (q_norm, k_norm) = (device.vector(norms.0)?, device.vector(norms.1)?);
        device.attention_prepare(
            &self.batch,
            LAYER,
            &shape,
            &projected,
            &q_norm,
            &k_norm,
            &mut cache,
            &mut query,
        )?;
        let queries = download(device, &query, rows, shape.query_columns())?;
        let mut after = self.read_pages(device, &cache)?;
        self.take_written(&mut before[LAYER]);
        let (keys, values) = self.take_written(&mut after[LAYER]);
        same_pages(&before, &after)?;
        Ok(Outputs::of_rows(vec![
            Tensor::new("query", shape.query_columns(), queries, Closeness::Rounded),
            Tensor::new("key", shape.kv_columns(), keys, Closeness::Stored(self.spec.kv_type)),
            Tensor::new("value", shape.kv_columns(), values, Closeness::Bits),
        ]))
    }

    fn attend<D: Device>(
        &self,
        device: &mut D,
        cache: &D::Cache,
        queries: &[f32],
    ) -> Result<Outputs, Failure> {
        let (shape, rows) = (self.shape(), self.batch.rows());
        let projected = upload(device, shape.projected(), &self.projected)?;
        let query = upload(device, shape.query_columns(), queries)?;
        let mut out = poisoned(device, rows, shape.query_columns())?;
        device.attention(&self.batch, LAYER, &shape, &query, &projected, cache, &mut out)?;
        let values = download(device, &out, rows, shape.query_columns())?;
        let out = Tensor::new("out", shape.query_columns(), values, Closeness::Weighted);
        Ok(Outputs::of_rows(vec![out]))
    }
}

/// Fails where a cell that the op must leave alone has changed.
fn same_pages(before: &[Vec<KvPage>], after: &[Vec<KvPage>]) -> Result<(), Failure> {
    for (layer, (before, after)) in before.iter().zip(after).enumerate() {
        for (page, (before, after)) in before.iter().zip(after).enumerate() {
            let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            if !same(&before.keys, &after.keys) || !same(&before.values, &after.values) {
                return Err(Failure::new(format!(
                    "layer {layer} page {page} changed outside of the step's rows"
                )));
            }
        }
    }
    Ok(())
}

impl OpRun for AttentionRun {
    fn describe(&self) -> String {
        format!("{:?}, KV {}, {}", self.shape(), self.spec.kv_type.name(), batches::describe(&self.batch))
    }

    fn execute<D: Device>(&self, device: &mut D) -> Result<Outputs, Failure> {
        let mut cache = device.cache(&self.spec)?;
        for layer in 0..=LAYER {
            for (page, content) in self.pages.iter().enumerate() {
                device.write_page(&mut cache, layer, page, content)?;
            }
        }
        device.begin_step(&self.batch)?;
        match &self.kind {
            Kind::Prepare(q_norm, k_norm) => self.prepare(device, cache, (q_norm, k_norm)),
            Kind::Attend(queries) => self.attend(device, &cache, queries),
        }
    }

    fn with_less_company(&self, random: &mut Random) -> Vec<Part<Self>> {
        let companies = smaller_companies(random, self.batch.spans.len()).into_iter();
        let part = |spans: Vec<usize>| {
            let (batch, rows) = batches::only_spans(&self.batch, &spans);
            let mut run = Self { batch, ..self.clone() };
            run.projected = pick_rows(&self.projected, self.shape().projected(), &rows);
            if let Kind::Attend(queries) = &mut run.kind {
                *queries = pick_rows(queries, self.shape().query_columns(), &rows);
            }
            Part { run, rows, spans: Vec::new() }
        };
        companies.map(part).collect()
    }
}

fn spec(attention: AttentionShape, gdn: GdnShape, kv_type: KvType, pages: usize) -> CacheSpec {
    let state_type = StateType::F32;
    CacheSpec { kv_layers: LAYER + 1, attention, kv_type, pages, gdn_layers: 0, gdn, state_type, slots: 1 }
}

/// Pages of random keys and values; `NaN` at and after each span's `from(span)`, as a recycled page may hold.
fn random_pages(
    random: &mut Random,
    shape: &AttentionShape,
    step: &Step,
    from: impl Fn(&crate::Span) -> usize,
) -> Vec<KvPage> {
    let columns = shape.kv_columns();
    let elements = PAGE_TOKENS * columns;
    let mut pages: Vec<KvPage> = (0..step.pages)
        .map(|_| KvPage { keys: random.normals(elements, 1.0), values: random.normals(elements, 1.0) })
        .collect();
    for span in &step.batch.spans {
        for position in from(span)..span.pages() * PAGE_TOKENS {
            let (page, offset) = step.batch.place(span, position);
            let cell = offset * columns..(offset + 1) * columns;
            pages[page].keys[cell.clone()].fill(POISON);
            pages[page].values[cell].fill(POISON);
        }
    }
    pages
}

/// Sets of sequences for a step: page boundaries, one row and many, positions from 0 to `far` and beyond.
fn span_sets(random: &mut Random, phase: Phase, geometry: &Geometry, far: usize) -> Vec<Vec<SpanPlan>> {
    let plan = |rows, position| SpanPlan { rows, position, ring_len: 0 };
    let wide = geometry.attention.query_columns() > 600;
    match phase {
        Phase::Prefill if wide => vec![vec![plan(17, 0), plan(9, 60), plan(3, 700)]],
        Phase::Rows if wide => vec![vec![plan(1, 63), plan(4, 64), plan(16, 250), plan(2, 0)]],
        Phase::Prefill => {
            let random_set = (0..5).map(|_| plan(random.between(1, 90), random.below(200))).collect();
            let mut sets: Vec<Vec<SpanPlan>> =
                [1, 2, 63, 64, 65, 130].into_iter().map(|rows| vec![plan(rows, 0), plan(rows, 61)]).collect();
            sets.extend([vec![plan(1, 63), plan(65, 64), plan(64, 65), plan(7, 128)], random_set]);
            sets.push(vec![plan(2, far + 1), plan(70, 1_020)]);
            sets
        }
        Phase::Rows => {
            let edges = [0, 1, 62, 63, 64, 65, 127, 128, 255, 1023].into_iter();
            let mut sets = vec![edges.map(|position| plan(1, position)).collect()];
            sets.push([1, 2, 7, 8, 9, 15, 16].into_iter().map(|rows| plan(rows, 64 - rows / 2)).collect());
            sets.push((0..8).map(|_| plan(random.between(1, 16), random.below(400))).collect());
            sets.push(vec![plan(16, far), plan(1, far / 64 * 64 - 1), plan(3, 0)]);
            sets
        }
    }
}

/// Calls `run` with every geometry, KV type, phase and set of sequences.
fn each<D: Device, R: Device>(
    bench: &mut Bench<'_, D, R>,
    far: fn(&AttentionShape) -> usize,
    run: impl Fn(&mut Bench<'_, D, R>, &Geometry, KvType, Step) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        for kv_type in KvType::ALL {
            for phase in [Phase::Prefill, Phase::Rows] {
                for plans in span_sets(&mut bench.random, phase, geometry, far(&geometry.attention)) {
                    let step = batches::step(&mut bench.random, phase, &plans, 100);
                    run(bench, geometry, kv_type, step)?;
                }
            }
        }
    }
    Ok(())
}

pub(super) fn prepare<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    each(
        bench,
        |_| 100_000,
        |bench, geometry, kv_type, step| {
            let shape = geometry.attention;
            let (rows, random) = (step.batch.rows(), &mut bench.random);
            let pages = Rc::new(random_pages(random, &shape, &step, |span| span.position));
            let kind =
                Kind::Prepare(random.normals(shape.head_dim, 1.0), random.normals(shape.head_dim, 1.0));
            let projected = activations(random, bench.activations, rows * shape.projected(), 2.0);
            let spec = spec(shape, geometry.gdn, kv_type, step.pages);
            bench.check(&AttentionRun { kind, spec, batch: step.batch, pages, projected })
        },
    )
}

pub(super) fn attention<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    // Long contexts with narrow heads only: the reference reads every position for every row.
    let far = |shape: &AttentionShape| if shape.head_dim < 64 { 50_000 } else { 2_500 };
    each(bench, far, |bench, geometry, kv_type, step| {
        let shape = geometry.attention;
        let (rows, random) = (step.batch.rows(), &mut bench.random);
        let pages = Rc::new(random_pages(random, &shape, &step, |span| span.position + span.rows));
        // From nearly uniform weights to nearly one-hot ones.
        let sharpness = random.pick(&[0.1, 1.0, 6.0]).unwrap_or(1.0);
        let kind =
            Kind::Attend(activations(random, bench.activations, rows * shape.query_columns(), sharpness));
        let projected = activations(random, bench.activations, rows * shape.projected(), 2.0);
        let spec = spec(shape, geometry.gdn, kv_type, step.pages);
        bench.check(&AttentionRun { kind, spec, batch: step.batch, pages, projected })
    })
}
