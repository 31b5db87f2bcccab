//! Times of the Gated `DeltaNet` ops on a GPU: `cargo run --release -p qwill-cuda --example gdn_speed -- [geometry]`.
//!
//! Prompts of 64 to 2,048 tokens and rounds of 1 to 64 sequences, with and without a full ring, for both storages of
//! states; microseconds of one layer, the best of several passes over layers whose states do not fit the L2 together.

use qwill_cuda::{CudaBuffer, CudaCache, CudaDevice, CudaOptions};
use qwill_device::batch::{CHUNK_TOKENS, PAGE_TOKENS};
use qwill_device::{
    Batch, CacheSpec, Chunk, Device, GdnWeights, Geometry, KvType, Phase, Precision, RING_TOKENS, Span,
    StateType,
};

type Failure = Box<dyn std::error::Error>;

const LAYERS: usize = 6;
const SLOTS: usize = 64;
const MOST_ROWS: usize = 2048;
const PASSES: usize = 5;

fn main() -> Result<(), Failure> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "27b".to_owned());
    let geometry = Geometry::named(&name).ok_or("unknown geometry")?;
    let options = CudaOptions::from_environment();
    let mut device = CudaDevice::new(&options)?;
    println!("{name} on {}: us of one layer", device.facts().name);
    for state_type in [StateType::F32, StateType::F16] {
        let mut bench = Bench::new(&mut device, &geometry, state_type)?;
        for tokens in [64, 512, MOST_ROWS] {
            bench.print(&format!("prompt of {tokens}"), &prompt(tokens))?;
        }
        for (sequences, rows, ring_len) in
            [(1, 1, 16), (1, 8, 16), (1, 8, RING_TOKENS), (64, 1, 16), (64, 1, RING_TOKENS), (64, 4, 16)]
        {
            let what = format!("{sequences} x {rows} rows on a ring of {ring_len}");
            bench.print(&what, &round(sequences, rows, ring_len))?;
        }
    }
    Ok(())
}

struct Bench<'a> {
    device: &'a mut CudaDevice,
    spec: CacheSpec,
    weights: GdnWeights<CudaDevice>,
    cache: CudaCache,
    projected: CudaBuffer,
    mixed: CudaBuffer,
    out: CudaBuffer,
}

impl<'a> Bench<'a> {
    fn new(device: &'a mut CudaDevice, geometry: &Geometry, state_type: StateType) -> Result<Self, Failure> {
        let shape = geometry.gdn;
        let spec = CacheSpec {
            kv_layers: 0,
            attention: geometry.attention,
            kv_type: KvType::Bf16,
            pages: 1,
            gdn_layers: LAYERS,
            gdn: shape,
            state_type,
            slots: SLOTS,
        };
        let values = |count: usize| -> Vec<f32> {
            (0..count).map(|i| ((i * 7919 % 1009) as f32 / 504.5 - 1.0) * 1.5).collect()
        };
        let mut projected = device.buffer(MOST_ROWS, shape.projected(), Precision::Activation)?;
        device.write(&mut projected, &values(MOST_ROWS * shape.projected()))?;
        Ok(Self {
            weights: GdnWeights {
                conv: device
                    .conv_taps(&values(shape.conv_channels() * shape.conv_width), shape.conv_width)?,
                decay_rate: device.vector(&vec![-0.05; shape.value_heads])?,
                dt_bias: device.vector(&values(shape.value_heads))?,
                norm: device.vector(&vec![1.0; shape.value_dim])?,
            },
            cache: device.cache(&spec)?,
            mixed: device.buffer(MOST_ROWS, shape.mixed(), Precision::Full)?,
            out: device.buffer(MOST_ROWS, shape.value_columns(), Precision::Activation)?,
            device,
            spec,
            projected,
        })
    }

    /// Microseconds of one layer's `gdn_prepare` and `gdn_scan`.
    fn pass(&mut self, batch: &Batch) -> Result<[f64; 2], Failure> {
        let Self { device, spec, weights, cache, projected, mixed, out } = self;
        device.begin_step(batch)?;
        device.start_measuring();
        for layer in 0..LAYERS {
            device.gdn_prepare(batch, layer, &spec.gdn, weights, projected, cache, mixed)?;
            device.gdn_scan(batch, layer, &spec.gdn, mixed, cache, out)?;
        }
        let ops = device.stop_measuring();
        Ok(["gdn_prepare", "gdn_scan"].map(|name| {
            ops.iter().find(|op| *op.0 == name).map_or(f64::NAN, |op| op.1.microseconds) / LAYERS as f64
        }))
    }

    fn print(&mut self, what: &str, batch: &Batch) -> Result<(), Failure> {
        let mut best = [f64::INFINITY; 2];
        for _ in 0..PASSES {
            let found = self.pass(batch)?;
            best = [best[0].min(found[0]), best[1].min(found[1])];
        }
        let states = self.spec.state_type.name();
        println!("  {states} states, {what:<28} prepare {:>8.1}  scan {:>8.1}", best[0], best[1]);
        Ok(())
    }
}

fn prompt(tokens: usize) -> Batch {
    let chunk = |first_row| Chunk { span: 0, first_row, rows: CHUNK_TOKENS.min(tokens - first_row) };
    Batch {
        phase: Phase::Prefill,
        tokens: vec![0; tokens],
        spans: vec![Span { first_row: 0, rows: tokens, position: 0, slot: 0, ring_len: 0, first_page: 0 }],
        page_table: vec![0; tokens.div_ceil(PAGE_TOKENS)],
        chunks: (0..tokens).step_by(CHUNK_TOKENS).map(chunk).collect(),
    }
}

fn round(sequences: usize, rows: usize, ring_len: usize) -> Batch {
    let span =
        |slot: usize| Span { first_row: slot * rows, rows, position: 40, slot, ring_len, first_page: slot };
    Batch {
        phase: Phase::Rows,
        tokens: vec![0; sequences * rows],
        spans: (0..sequences).map(span).collect(),
        page_table: vec![0; sequences],
        chunks: Vec::new(),
    }
}
