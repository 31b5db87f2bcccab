//! Times of the attention kernels on a GPU: `cargo run --release -p qwill-cuda --example attention_speed -- [geometry]`.
//!
//! One layer with keys and values in bf16 and int8: prompts of 2,048 rows and slices of 256 after a history, decode
//! rounds, verify rounds; the best of several, with the bytes of keys and values that a step has to read once and the
//! products that it has to do, by time.

use qwill_cuda::{CudaDevice, CudaOptions};
use qwill_device::batch::{CHUNK_TOKENS, PAGE_TOKENS};
use qwill_device::{
    Batch, CacheSpec, Chunk, Device, Geometry, KvPage, KvType, Phase, Precision, Span, StateType,
};

type Failure = Box<dyn std::error::Error>;

/// `(sequences, rows of each, position of the first row)`.
const PROMPTS: [(usize, usize, usize); 5] =
    [(1, 2048, 0), (1, 2048, 14_336), (1, 256, 0), (1, 256, 14_336), (8, 64, 512)];
const ROUNDS: [(usize, usize, usize); 12] = [
    (1, 1, 512),
    (1, 1, 8_191),
    (1, 1, 32_000),
    (1, 4, 8_191),
    (1, 8, 512),
    (1, 8, 8_191),
    (1, 8, 32_000),
    (1, 16, 8_191),
    (8, 1, 512),
    (8, 1, 4_000),
    (64, 1, 512),
    (64, 1, 2_000),
];
const MOST_PAGES: usize = 2_400;
const MOST_ROWS: usize = 2_048;
const REPEATS: usize = 10;

fn main() -> Result<(), Failure> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "27b".to_owned());
    let geometry = Geometry::named(&name).ok_or("unknown geometry")?;
    let options = CudaOptions::from_environment();
    let mut device = CudaDevice::new(&options)?;
    device.reserve(&geometry, MOST_ROWS, 64)?;
    println!("{}, {name}", device.facts().name);
    for kv_type in [KvType::Bf16, KvType::Int8] {
        let mut bench = Bench::new(&mut device, &geometry, kv_type)?;
        for (phase, steps) in [(Phase::Prefill, &PROMPTS[..]), (Phase::Rows, &ROUNDS[..])] {
            for (sequences, rows, position) in steps {
                bench.measure(phase, *sequences, *rows, *position)?;
            }
        }
    }
    Ok(())
}

/// One attention layer with full pages.
struct Bench<'a> {
    device: &'a mut CudaDevice,
    spec: CacheSpec,
    cache: <CudaDevice as Device>::Cache,
    projected: <CudaDevice as Device>::Buffer,
    query: <CudaDevice as Device>::Buffer,
    out: <CudaDevice as Device>::Buffer,
    norm: <CudaDevice as Device>::Vector,
}

impl<'a> Bench<'a> {
    fn new(device: &'a mut CudaDevice, geometry: &Geometry, kv_type: KvType) -> Result<Self, Failure> {
        let shape = geometry.attention;
        let spec = CacheSpec {
            kv_layers: 1,
            attention: shape,
            kv_type,
            pages: MOST_PAGES,
            gdn_layers: 0,
            gdn: geometry.gdn,
            state_type: StateType::F32,
            slots: 1,
        };
        let mut cache = device.cache(&spec)?;
        let values = |seed| noise(seed, PAGE_TOKENS * shape.kv_columns());
        let page = KvPage { keys: values(1), values: values(2) };
        for index in 0..MOST_PAGES {
            device.write_page(&mut cache, 0, index, &page)?;
        }
        let mut projected = device.buffer(MOST_ROWS, shape.projected(), Precision::Activation)?;
        device.write(&mut projected, &noise(3, MOST_ROWS * shape.projected()))?;
        let query = device.buffer(MOST_ROWS, shape.query_columns(), Precision::Activation)?;
        let out = device.buffer(MOST_ROWS, shape.query_columns(), Precision::Activation)?;
        let norm = device.vector(&vec![1.0; shape.head_dim])?;
        Ok(Self { device, spec, cache, projected, query, out, norm })
    }

    fn measure(
        &mut self,
        phase: Phase,
        sequences: usize,
        rows: usize,
        position: usize,
    ) -> Result<(), Failure> {
        let (shape, batch) = (self.spec.attention, batch(phase, sequences, rows, position));
        let mut best = [f64::INFINITY; 2];
        for _ in 0..REPEATS {
            self.device.begin_step(&batch)?;
            self.device.start_measuring();
            self.device.attention_prepare(
                &batch,
                0,
                &shape,
                &self.projected,
                &self.norm,
                &self.norm,
                &mut self.cache,
                &mut self.query,
            )?;
            self.device.attention(
                &batch,
                0,
                &shape,
                &self.query,
                &self.projected,
                &self.cache,
                &mut self.out,
            )?;
            let timings = self.device.stop_measuring();
            for (best, op) in best.iter_mut().zip(["attention_prepare", "attention"]) {
                *best = best.min(timings.get(op).map_or(f64::INFINITY, |timing| timing.microseconds));
            }
        }
        let [prepare_us, attention_us] = best;
        let read =
            (sequences * (position + rows)) as f64 * self.spec.page_bytes() as f64 / PAGE_TOKENS as f64;
        let seen: usize = (0..rows).map(|row| position + row + 1).sum();
        let operations = (4 * sequences * seen * shape.query_columns()) as f64;
        println!(
            "{} {phase:?} {sequences:>2} x {rows:>4} rows at {position:>6}: prepare {prepare_us:8.1} us, attention \
             {attention_us:9.1} us, {:7.1} GB/s, {:6.1} TFLOP/s",
            self.spec.kv_type.name(),
            read / attention_us / 1e3,
            operations / attention_us / 1e6,
        );
        Ok(())
    }
}

/// Numbers between −1 and 1.
fn noise(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn batch(phase: Phase, sequences: usize, rows: usize, position: usize) -> Batch {
    let pages = (position + rows).div_ceil(PAGE_TOKENS);
    let span = |index: usize| Span {
        first_row: index * rows,
        rows,
        position,
        slot: 0,
        ring_len: 0,
        first_page: index * pages,
    };
    let chunks = |index: usize| {
        (0..rows).step_by(CHUNK_TOKENS).map(move |row| Chunk {
            span: index,
            first_row: index * rows + row,
            rows: CHUNK_TOKENS.min(rows - row),
        })
    };
    Batch {
        phase,
        tokens: vec![0; sequences * rows],
        spans: (0..sequences).map(span).collect(),
        // Odd steps through the pages, so that neighbours in a sequence are none in memory.
        page_table: (0..sequences * pages).map(|page| (page * 7 % MOST_PAGES) as u32).collect(),
        chunks: if phase == Phase::Prefill { (0..sequences).flat_map(chunks).collect() } else { Vec::new() },
    }
}
