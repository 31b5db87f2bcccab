//! Step times of a random model on a GPU:
//! `cargo run --release -p qwill-model --example cuda_step_speed -- [geometry] [prompt] [ops]`.
//!
//! Weights are random int4 (embedding and head int8), activations bf16, KV bf16. Prints prefill of a prompt, decode
//! rounds of 1 to 64 sequences at position 512 and verify rounds of one sequence, the best of several; with `ops`
//! also the time of each op's kernels in one step of each kind.

use std::time::Instant;

use qwill_cuda::{CudaDevice, CudaOptions};
use qwill_device::batch::{CHUNK_TOKENS, PAGE_TOKENS};
use qwill_device::{Batch, Chunk, Device, Geometry, KvType, Phase, SampleRow, Span, StateType};
use qwill_model::{Model, ModelOptions};
use qwill_weights::{Checkpoint, Quantize};

type Failure = Box<dyn std::error::Error>;

const SEQUENCES: usize = 64;
const POSITION: usize = 512;
const REPEATS: usize = 12;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let name = arguments.first().map_or("27b", String::as_str);
    let prompt = arguments.get(1).map_or(Ok(2048), |text| text.parse())?;
    let with_ops = arguments.get(2).is_some_and(|text| text == "ops");
    let mut model = load(&Geometry::named(name).ok_or("unknown geometry")?, prompt)?;

    let prefill = prefill_batch(prompt);
    let seconds = best(&mut model, &prefill, 3)?;
    println!("prefill {prompt:>5}: {:9.2} ms  {:9.1} tok/s", seconds * 1e3, prompt as f64 / seconds);
    if with_ops {
        print_ops(&mut model, &prefill)?;
    }
    for (sequences, rows) in
        [(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (64, 1)]
    {
        let batch = rounds_batch(sequences, rows);
        let seconds = best(&mut model, &batch, REPEATS)?;
        let rate = sequences as f64 / seconds;
        println!("{sequences:>3} sequences x {rows:>2} rows: {:8.3} ms  {rate:8.1} rounds/s", seconds * 1e3);
        if with_ops && [(1, 1), (1, 8), (64, 1)].contains(&(sequences, rows)) {
            print_ops(&mut model, &batch)?;
        }
    }
    Ok(())
}

fn load(geometry: &Geometry, prompt: usize) -> Result<Model<CudaDevice>, Failure> {
    let mut options = CudaOptions::default();
    if let Some(directory) = std::env::var_os("QWILL_KERNEL_CACHE") {
        options.kernel_cache_directory = Some(directory.into());
    }
    let device = CudaDevice::new(&options)?;
    let checkpoint = Checkpoint::random(geometry, 1, Quantize::Int4);
    let pages_per_sequence = (POSITION + 16).div_ceil(PAGE_TOKENS);
    let model_options = ModelOptions {
        quantize: Quantize::Int4,
        kv_type: KvType::Bf16,
        state_type: StateType::F32,
        pages: (SEQUENCES * pages_per_sequence).max(prompt.div_ceil(PAGE_TOKENS)),
        slots: SEQUENCES,
        max_rows: prompt.max(SEQUENCES),
        max_logit_rows: SEQUENCES,
    };
    let start = Instant::now();
    let mut model = Model::load(device, &checkpoint, &model_options, &mut |_| {})?;
    let name = model.device().facts().name;
    println!("{} on {name}: loaded in {:.1} s", geometry.name, start.elapsed().as_secs_f64());
    for slot in 0..SEQUENCES {
        model.clear_slot(slot)?;
    }
    Ok(model)
}

fn prefill_batch(prompt: usize) -> Batch {
    let chunk = |first_row| Chunk { span: 0, first_row, rows: CHUNK_TOKENS.min(prompt - first_row) };
    Batch {
        phase: Phase::Prefill,
        tokens: (0..prompt as u32).map(|n| n * 37 % 8000).collect(),
        spans: vec![Span { first_row: 0, rows: prompt, position: 0, slot: 0, ring_len: 0, first_page: 0 }],
        page_table: (0..prompt.div_ceil(PAGE_TOKENS) as u32).collect(),
        chunks: (0..prompt).step_by(CHUNK_TOKENS).map(chunk).collect(),
    }
}

fn rounds_batch(sequences: usize, rows: usize) -> Batch {
    let pages = (POSITION + rows).div_ceil(PAGE_TOKENS);
    let span = |index: usize| Span {
        first_row: index * rows,
        rows,
        position: POSITION,
        slot: index,
        ring_len: 8,
        first_page: index * pages,
    };
    Batch {
        phase: Phase::Rows,
        tokens: (0..(sequences * rows) as u32).map(|n| n * 31 % 8000).collect(),
        spans: (0..sequences).map(span).collect(),
        page_table: (0..(sequences * pages) as u32).collect(),
        chunks: Vec::new(),
    }
}

/// One step with the greedy token of each row that a client would see.
fn step(model: &mut Model<CudaDevice>, batch: &Batch) -> Result<f64, Failure> {
    let vocab = model.geometry().vocab;
    let logit_rows: Vec<usize> = match batch.phase {
        Phase::Prefill => vec![batch.rows() - 1],
        Phase::Rows => (0..batch.rows()).collect(),
    };
    let samples: Vec<SampleRow<'_>> =
        (0..logit_rows.len()).map(|row| SampleRow::greedy(row, vocab)).collect();
    let start = Instant::now();
    model.forward(batch, &logit_rows)?;
    model.sample(&samples)?;
    Ok(start.elapsed().as_secs_f64())
}

fn best(model: &mut Model<CudaDevice>, batch: &Batch, repeats: usize) -> Result<f64, Failure> {
    let mut best = f64::INFINITY;
    for _ in 0..repeats {
        best = best.min(step(model, batch)?);
    }
    Ok(best)
}

fn print_ops(model: &mut Model<CudaDevice>, batch: &Batch) -> Result<(), Failure> {
    model.device().start_measuring();
    step(model, batch)?;
    let mut ops: Vec<_> = model.device().stop_measuring().into_iter().collect();
    ops.sort_by(|a, b| b.1.microseconds.total_cmp(&a.1.microseconds));
    let total: f64 = ops.iter().map(|(_, timing)| timing.microseconds).sum();
    println!("      kernels: {:.3} ms", total / 1e3);
    for (op, timing) in ops {
        println!("      {op:<18} {:>5} launches {:>10.1} us", timing.launches, timing.microseconds);
    }
    Ok(())
}
