//! Prefill and decode speed of a random model on the CPU, in the shape of `llama-bench`'s `pp` and `tg` tests:
//! `cargo run --release -p qwill-model --example step_speed -- [geometry] [threads] [prompt] [generate] [repeats]`.
//!
//! Weights are random int4 (embedding and head int8), activations int8, KV bf16. Prints one line per
//! repetition and the best: other work on the machine can only slow a repetition down.

use std::time::Instant;

use qwill_cpu::CpuDevice;
use qwill_cpu::fast::CpuOptions;
use qwill_device::batch::{CHUNK_TOKENS, PAGE_TOKENS};
use qwill_device::{
    Activations, Batch, Chunk, Device, Geometry, KvType, Phase, RING_TOKENS, SampleRow, Span, StateType,
};
use qwill_model::{Model, ModelOptions};
use qwill_weights::{Checkpoint, Quantize};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |at: usize, default: usize| arguments.get(at).and_then(|text| text.parse().ok()).unwrap_or(default);
    let name = arguments.first().map_or("0.8b", String::as_str);
    let geometry = Geometry::named(name).ok_or("unknown geometry")?;
    let (threads, prompt, generate, repeats) = (number(1, 2), number(2, 128), number(3, 32), number(4, 5));

    let checkpoint = Checkpoint::random(&geometry, 1, Quantize::Int4);
    let device = CpuDevice::new(CpuOptions { threads, activations: Activations::Int8, isa: None })?;
    let tokens = prompt + generate;
    let options = ModelOptions {
        quantize: Quantize::Int4,
        kv_type: KvType::Bf16,
        state_type: StateType::F32,
        pages: tokens.div_ceil(PAGE_TOKENS),
        slots: 1,
        host_granules: 0,
        max_rows: prompt,
        max_logit_rows: 1,
    };
    let start = Instant::now();
    let mut model = Model::load(device, &checkpoint, &options, &mut |_| {})?;
    println!("{name} on {}: loaded in {:.1} s", model.device().facts().name, start.elapsed().as_secs_f64());

    let (mut best_prefill, mut best_decode) = (0.0f64, 0.0f64);
    for _ in 0..repeats {
        let prefill = prompt as f64 / prefill_seconds(&mut model, prompt)?;
        let decode = generate as f64 / decode_seconds(&mut model, prompt, generate)?;
        println!("prefill({prompt}) {prefill:8.1} tok/s   decode({generate}) {decode:7.2} tok/s");
        (best_prefill, best_decode) = (best_prefill.max(prefill), best_decode.max(decode));
    }
    println!(
        "best: prefill({prompt}) {best_prefill:.1} tok/s, decode {best_decode:.2} tok/s, {threads} threads"
    );
    Ok(())
}

fn span(rows: usize, position: usize, ring_len: usize) -> Span {
    Span { first_row: 0, rows, position, slot: 0, ring_len, first_page: 0 }
}

fn pages(tokens: usize) -> Vec<u32> {
    (0..tokens.div_ceil(PAGE_TOKENS) as u32).collect()
}

fn prefill_seconds(model: &mut Model<CpuDevice>, prompt: usize) -> Result<f64, Box<dyn std::error::Error>> {
    let chunks = (0..prompt)
        .step_by(CHUNK_TOKENS)
        .map(|first_row| Chunk { span: 0, first_row, rows: CHUNK_TOKENS.min(prompt - first_row) })
        .collect();
    let batch = Batch {
        phase: Phase::Prefill,
        tokens: (0..prompt as u32).map(|n| n * 37 % 8000).collect(),
        spans: vec![span(prompt, 0, 0)],
        page_table: pages(prompt),
        chunks,
    };
    model.clear_slot(0)?;
    let start = Instant::now();
    model.forward(&batch, &[prompt - 1])?;
    Ok(start.elapsed().as_secs_f64())
}

fn decode_seconds(
    model: &mut Model<CpuDevice>,
    prompt: usize,
    generate: usize,
) -> Result<f64, Box<dyn std::error::Error>> {
    let vocab = model.geometry().vocab;
    let (mut token, mut ring_len) = (1, 0);
    let start = Instant::now();
    for position in prompt..prompt + generate {
        let batch = Batch {
            phase: Phase::Rows,
            tokens: vec![token],
            spans: vec![span(1, position, ring_len)],
            page_table: pages(position + 1),
            chunks: Vec::new(),
        };
        model.forward(&batch, &[0])?;
        token = model.sample(&[SampleRow::greedy(0, vocab)])?[0].token;
        ring_len = if ring_len == RING_TOKENS { 1 } else { ring_len + 1 };
    }
    Ok(start.elapsed().as_secs_f64())
}
