//! Times of drawing tokens on a GPU: `cargo run --release -p qwill-cuda --example sample_speed -- [vocabulary]`.
//!
//! Microseconds of a call, from its parameters' upload to its results on the host: the best of several, for 1, 8 and 64
//! rows whose logits look like a language model's (a few likely tokens, a long tail).

use std::fmt::Write;
use std::time::Instant;

use qwill_cuda::{CudaDevice, CudaOptions};
use qwill_device::{Device, Precision, SampleRow};

type Failure = Box<dyn std::error::Error>;

const MOST_ROWS: usize = 64;
const PASSES: usize = 20;

fn main() -> Result<(), Failure> {
    let vocab: usize = std::env::args().nth(1).map_or(Ok(248_320), |text| text.parse())?;
    let mut device = CudaDevice::new(&CudaOptions::from_environment())?;
    let mut logits = device.buffer(MOST_ROWS, vocab, Precision::Full)?;
    device.write(&mut logits, &tailed(MOST_ROWS * vocab))?;
    let seen: Vec<(u32, u32)> = (0..4000).map(|index| (index * 53 % vocab as u32, index % 3)).collect();
    let bias: Vec<(u32, f32)> = (0..300).map(|index| (index * 701 % vocab as u32, -1.0)).collect();
    let greedy = SampleRow::greedy(0, vocab);
    let usual = SampleRow { temperature: 1.0, top_k: 20, top_p: 0.95, ..greedy.clone() };
    let cases = [
        ("greedy", greedy.clone()),
        ("T 1, top-k 20, top-p 0.95", usual.clone()),
        ("the same, 20 log-probabilities", SampleRow { top_logprobs: Some(20), ..usual.clone() }),
        (
            "the same, 4,000 penalties, 300 biases",
            SampleRow { presence_penalty: 1.5, seen: &seen, bias: &bias, ..usual.clone() },
        ),
        ("T 1, min-p 0.05", SampleRow { temperature: 1.0, min_p: 0.05, ..greedy.clone() }),
        ("T 1, top-p 0.95", SampleRow { temperature: 1.0, top_p: 0.95, ..greedy.clone() }),
        ("T 1", SampleRow { temperature: 1.0, ..greedy.clone() }),
    ];
    println!("vocabulary {vocab} on {}: us a call", device.facts().name);
    println!("{:40} {:>8} {:>8} {:>8}", "", "1 row", "8 rows", "64 rows");
    for (name, row) in cases {
        let mut times = String::new();
        for rows in [1, 8, MOST_ROWS] {
            let rows: Vec<SampleRow<'_>> =
                (0..rows).map(|index| SampleRow { logits_row: index, ..row.clone() }).collect();
            let mut best_us = f64::INFINITY;
            for _ in 0..PASSES {
                let started = Instant::now();
                device.sample(&logits, &rows)?;
                best_us = best_us.min(started.elapsed().as_secs_f64() * 1e6);
            }
            write!(times, " {best_us:>8.1}")?;
        }
        println!("{name:40}{times}");
    }
    Ok(())
}

/// Sums of dice around 0 with a spread of 2.5, every 5,000th of them 12 higher.
fn tailed(count: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut dice = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 16_777_216.0 - 0.5
    };
    (0..count)
        .map(|index| {
            let spread: f32 = (0..4).map(|_| dice()).sum::<f32>() * 4.3;
            if index % 5000 == 17 { spread + 12.0 } else { spread }
        })
        .collect()
}
