//! Speed of the fast CPU device's ops at a model's shapes, beside the speed at which memory can be read.
//!
//! `cargo run --release -p qwill-cpu --example linear_speed -- [threads] [geometry]`
//!
//! Every figure is the shortest of many calls, each too short to be interrupted often: other programs may run at the
//! same time.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use qwill_cpu::fast::{CpuDevice, CpuOptions, Matrix};
use qwill_cpu::{Buffer, Cache};
use qwill_device::batch::{CHUNK_TOKENS, PAGE_TOKENS};
use qwill_device::matrix::MatrixElements;
use qwill_device::{
    Activations, Batch, CacheSpec, Chunk, Device, DeviceError, GROUP, GdnWeights, Geometry, KvType,
    MatrixData, Phase, Precision, SampleRow, Span, StateType, WeightFormat,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let name = arguments.next().unwrap_or_else(|| "0.8b".into());
    let geometry = Geometry::named(&name).ok_or("unknown geometry")?;
    let memory = read_speed(threads);
    println!("memory read: {:.1} GB/s on 1 thread, {memory:.1} GB/s on {threads}", read_speed(1));
    let mut speed = Speed {
        device: CpuDevice::new(CpuOptions::new(threads, Activations::Int8))?,
        geometry,
        memory,
        seed: 1,
    };
    println!("{}, {name}", speed.device.facts().name);
    speed.linears()?;
    speed.layers()?;
    speed.sampling()?;
    Ok(())
}

/// Bytes per nanosecond that `threads` threads together read from a block larger than any cache, 4 MiB at a time.
fn read_speed(threads: usize) -> f64 {
    const WORDS: usize = 512 << 10;
    let block: Vec<u64> = (0..64 * WORDS as u64).collect();
    let mut shortest = f64::INFINITY;
    for pieces in block.chunks(threads * WORDS).cycle().take(40 * block.len() / (threads * WORDS)) {
        let start = Barrier::new(threads);
        let read = |part: &[u64]| {
            start.wait();
            let begin = Instant::now();
            let mut sums = [0u64; 16];
            for words in part.as_chunks::<16>().0 {
                for (sum, word) in sums.iter_mut().zip(words) {
                    *sum = sum.wrapping_add(*word);
                }
            }
            black_box(sums);
            (begin, Instant::now())
        };
        let times: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
            let handles: Vec<_> =
                pieces.chunks(pieces.len() / threads).map(|part| scope.spawn(|| read(part))).collect();
            handles.into_iter().filter_map(|handle| handle.join().ok()).collect()
        });
        // From the first thread's begin to the last one's end.
        let begin = times.iter().map(|(begin, _)| *begin).min();
        let end = times.iter().map(|(_, end)| *end).max();
        if let (Some(begin), Some(end)) = (begin, end) {
            shortest = shortest.min(end.duration_since(begin).as_secs_f64());
        }
    }
    (threads * WORDS * 8) as f64 / shortest / 1e9
}

/// The shortest of several runs, in seconds.
fn best(tries: usize, mut run: impl FnMut()) -> f64 {
    (0..tries)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

struct Speed {
    device: CpuDevice,
    geometry: Geometry,
    memory: f64,
    seed: u64,
}

impl Speed {
    fn bits(&mut self) -> u32 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 33) as u32
    }

    fn values(&mut self, len: usize, size: f32) -> Vec<f32> {
        (0..len).map(|_| (self.bits() as f32 / (1u32 << 30) as f32 - 1.0) * size).collect()
    }

    fn matrix(&mut self, format: WeightFormat, rows: usize, cols: usize) -> Result<Matrix, DeviceError> {
        let scales = vec![0x1400u16; rows * cols.div_ceil(GROUP)];
        let bytes: Vec<u8> = (0..rows * cols).map(|_| self.bits() as u8).collect();
        let codes: Vec<i8> = bytes.iter().map(|byte| *byte as i8).collect();
        let brain: Vec<u16> = bytes.iter().map(|byte| 0x3c00 + u16::from(*byte)).collect();
        let elements = match format {
            WeightFormat::Int4 => {
                MatrixElements::Int4 { packed: &bytes[..rows * cols.div_ceil(2)], scales: &scales }
            }
            WeightFormat::Int8 => MatrixElements::Int8 { codes: &codes, scales: &scales },
            _ => MatrixElements::Bf16(&brain),
        };
        self.device.matrix(&MatrixData { rows, cols, elements })
    }

    fn filled(&mut self, rows: usize, cols: usize, size: f32) -> Result<Buffer, DeviceError> {
        let values = self.values(rows * cols, size);
        let mut buffer = self.device.buffer(rows, cols, Precision::Activation)?;
        self.device.write(&mut buffer, &values)?;
        Ok(buffer)
    }

    fn linears(&mut self) -> Result<(), DeviceError> {
        let shapes = [
            (WeightFormat::Int4, 2 * self.geometry.intermediate, self.geometry.hidden),
            (WeightFormat::Int4, self.geometry.hidden, self.geometry.intermediate),
            (WeightFormat::Int8, self.geometry.hidden, self.geometry.intermediate),
            (WeightFormat::Int8, self.geometry.vocab, self.geometry.hidden),
            (WeightFormat::Bf16, 2 * self.geometry.intermediate, self.geometry.hidden),
        ];
        for (format, outputs, inputs) in shapes {
            // Enough copies that no cache holds them all.
            let bytes = format.matrix_bytes(outputs, inputs);
            let copies = (256_000_000 / bytes).clamp(1, 64) as usize;
            let matrices: Vec<Matrix> =
                (0..copies).map(|_| self.matrix(format, outputs, inputs)).collect::<Result<_, _>>()?;
            for rows in [1usize, 2, 4, 16, 128] {
                if rows > 4 && outputs > 100_000 {
                    continue;
                }
                let x = self.filled(rows, inputs, 1.0)?;
                let mut out = self.device.buffer(rows, outputs, Precision::Activation)?;
                let mut failed = Ok(());
                let tries = 10 * copies.div_ceil(rows);
                let seconds = matrices.iter().cycle().take(tries).map(|matrix| {
                    best(1, || failed = failed.clone().and(self.device.linear(rows, &x, matrix, &mut out)))
                });
                let seconds = seconds.fold(f64::INFINITY, f64::min);
                failed?;
                let rate = bytes as f64 / seconds / 1e9;
                println!(
                    "{:>5} [{outputs:>6} x {inputs:>5}] rows {rows:>3}: {:>8.1} us {rate:>6.1} GB/s ({:>3.0} % of memory) {:>7.1} GMAC/s",
                    format.name(),
                    seconds * 1e6,
                    100.0 * rate / self.memory,
                    (rows * outputs * inputs) as f64 / seconds / 1e9
                );
            }
        }
        Ok(())
    }

    /// A batch of one sequence.
    fn batch(phase: Phase, position: usize, rows: usize) -> Batch {
        let span = Span { first_row: 0, rows, position, slot: 0, ring_len: 0, first_page: 0 };
        let page_table = (0..span.pages() as u32).collect();
        let chunk = |first_row| Chunk { span: 0, first_row, rows: CHUNK_TOKENS.min(rows - first_row) };
        let chunks = match phase {
            Phase::Prefill => (0..rows).step_by(CHUNK_TOKENS).map(chunk).collect(),
            Phase::Rows => Vec::new(),
        };
        Batch { phase, tokens: vec![1; rows], spans: vec![span], page_table, chunks }
    }

    fn layers(&mut self) -> Result<(), DeviceError> {
        for (phase, position, rows) in
            [(Phase::Rows, 128, 1), (Phase::Rows, 4096, 1), (Phase::Rows, 128, 8), (Phase::Prefill, 0, 128)]
        {
            let batch = Self::batch(phase, position, rows);
            println!("{phase:?}, {rows} rows at position {position}:");
            let spec = CacheSpec {
                kv_layers: 1,
                attention: self.geometry.attention,
                kv_type: KvType::Bf16,
                pages: batch.page_table.len(),
                gdn_layers: self.geometry.gdn_layers(),
                gdn: self.geometry.gdn,
                state_type: StateType::F32,
                slots: 1,
            };
            let mut cache = self.device.cache(&spec)?;
            let total = self.gdn_layers(&batch, &mut cache)? + self.attention_layers(&batch, &mut cache)?;
            println!("  all layers' ops without products: {:.2} ms", total * 1e3);
        }
        Ok(())
    }

    fn report(name: &str, layers: usize, seconds: f64) -> f64 {
        println!("  {name:<18} {:>9.1} us x {layers}", seconds * 1e6);
        seconds * layers as f64
    }

    fn gdn_layers(&mut self, batch: &Batch, cache: &mut Cache) -> Result<f64, DeviceError> {
        let (shape, layers, rows) = (self.geometry.gdn, self.geometry.gdn_layers(), batch.rows());
        let projected = self.filled(rows, shape.projected(), 2.0)?;
        let mut mixed = self.device.buffer(rows, shape.mixed(), Precision::Full)?;
        let mut scanned = self.device.buffer(rows, shape.value_columns(), Precision::Activation)?;
        let mut gated = self.device.buffer(rows, shape.value_columns(), Precision::Activation)?;
        let conv = self.values(shape.conv_channels() * shape.conv_width, 0.5);
        let weights = GdnWeights {
            conv: self.device.conv_taps(&conv, shape.conv_width)?,
            decay_rate: self.device.vector(&vec![-0.1; shape.value_heads])?,
            dt_bias: self.device.vector(&vec![0.5; shape.value_heads])?,
            norm: self.device.vector(&vec![1.0; shape.value_dim])?,
        };
        let mut failed = Ok(());
        let device = &mut self.device;
        let mut layer = (0..layers).cycle();
        let mut next = || layer.next().unwrap_or(0);
        let prepare = best(20 * layers, || {
            let done = device.gdn_prepare(batch, next(), &shape, &weights, &projected, cache, &mut mixed);
            failed = failed.clone().and(done);
        });
        let scan = best(20 * layers, || {
            failed = failed.clone().and(device.gdn_scan(batch, next(), &shape, &mixed, cache, &mut scanned));
        });
        let gate = best(20 * layers, || {
            let done = device.gated_norm(rows, &shape, &scanned, &projected, &weights.norm, &mut gated);
            failed = failed.clone().and(done);
        });
        failed?;
        let sum = Self::report("gdn_prepare", layers, prepare) + Self::report("gdn_scan", layers, scan);
        Ok(sum + Self::report("gated_norm", layers, gate))
    }

    fn attention_layers(&mut self, batch: &Batch, cache: &mut Cache) -> Result<f64, DeviceError> {
        let (shape, layers, rows) = (self.geometry.attention, self.geometry.attention_layers(), batch.rows());
        let width = self.geometry.intermediate;
        let projected = self.filled(rows, shape.projected(), 2.0)?;
        let gate_up = self.filled(rows, 2 * width, 2.0)?;
        let mut query = self.device.buffer(rows, shape.query_columns(), Precision::Activation)?;
        let mut out = self.device.buffer(rows, shape.query_columns(), Precision::Activation)?;
        let mut swiglu = self.device.buffer(rows, width, Precision::Activation)?;
        let norm = self.device.vector(&vec![1.0; shape.head_dim])?;
        let mut failed = Ok(());
        let device = &mut self.device;
        // Keys and values of the positions before.
        for first in (0..batch.spans[0].position).step_by(PAGE_TOKENS) {
            let before = Self::batch(Phase::Prefill, first, PAGE_TOKENS.min(rows));
            device.attention_prepare(&before, 0, &shape, &projected, &norm, &norm, cache, &mut query)?;
        }
        let prepare = best(100, || {
            let done =
                device.attention_prepare(batch, 0, &shape, &projected, &norm, &norm, cache, &mut query);
            failed = failed.clone().and(done);
        });
        let attend = best(100, || {
            let done = device.attention(batch, 0, &shape, &query, &projected, cache, &mut out);
            failed = failed.clone().and(done);
        });
        let all = self.geometry.layers.len();
        let gate =
            best(100, || failed = failed.clone().and(device.swiglu(rows, width, &gate_up, &mut swiglu)));
        failed?;
        let sum =
            Self::report("attention_prepare", layers, prepare) + Self::report("attention", layers, attend);
        Ok(sum + Self::report("swiglu", all, gate))
    }

    fn sampling(&mut self) -> Result<(), DeviceError> {
        let vocab = self.geometry.vocab;
        let logits = self.filled(1, vocab, 8.0)?;
        let greedy = SampleRow::greedy(0, vocab);
        let drawn = SampleRow { temperature: 1.0, ..greedy.clone() };
        let rows = [
            ("greedy", greedy.clone()),
            ("temperature 1", drawn.clone()),
            ("top-k 20, top-p .95", SampleRow { top_k: 20, top_p: 0.95, ..drawn.clone() }),
            ("top-p .95", SampleRow { top_p: 0.95, ..drawn }),
            ("5 logprobs", SampleRow { top_logprobs: Some(5), ..greedy }),
        ];
        for (name, row) in rows {
            let mut failed = Ok(Vec::new());
            let rows = [row];
            let seconds = best(50, || failed = self.device.sample(&logits, &rows));
            failed?;
            println!("sample {name:<20} {:>8.1} us", seconds * 1e6);
        }
        Ok(())
    }
}
