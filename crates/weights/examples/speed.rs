//! Time of making, rounding and unpacking weights on one thread:
//! `cargo run --release -p qwill-weights --example speed -- [geometry]`.

use std::time::Instant;

use qwill_device::Geometry;
use qwill_weights::{Checkpoint, Quantize, quantize_int4, quantize_int8};

fn main() {
    let name = std::env::args().nth(1).unwrap_or_else(|| "27b".to_owned());
    let Some(geometry) = Geometry::named(&name) else {
        eprintln!("no geometry {name}: one of {:?}", Geometry::NAMES);
        return;
    };
    let (rows, cols) = (geometry.intermediate, geometry.hidden);
    let matrix = "layers.0.mlp.up_proj";
    for (stored, label) in [(Quantize::Int4, "int4"), (Quantize::Int8, "int8"), (Quantize::None, "bf16")] {
        let checkpoint = Checkpoint::random(&geometry, 1, stored);
        report(&format!("random {label}"), rows * cols, || {
            checkpoint.matrix(matrix, rows, cols, Quantize::None).is_ok()
        });
    }
    let dense = Checkpoint::random(&geometry, 1, Quantize::None);
    report("random bf16, then int4", rows * cols, || {
        dense.matrix(matrix, rows, cols, Quantize::Int4).is_ok()
    });
    let values: Vec<f32> = (0..rows * cols).map(|n| (n % 977) as f32 / 977.0 - 0.4).collect();
    report("f32 to int4", rows * cols, || !quantize_int4(&values, rows, cols).0.is_empty());
    report("f32 to int8", rows * cols, || !quantize_int8(&values, rows, cols).0.is_empty());

    let checkpoint = Checkpoint::random(&geometry, 1, Quantize::Int4);
    let bytes = checkpoint.total_bytes() as f64;
    let (clock, mut made) = (Clock::start(), 0);
    for (name, rows, cols) in mlp_matrices(&geometry) {
        made += usize::from(checkpoint.matrix(&name, rows, cols, Quantize::None).is_ok());
    }
    let seconds = clock.seconds();
    println!("random {name} int4, all {made} MLP matrices of {:.1} GB: {seconds:.1} s", bytes / 1e9);
}

/// The MLP matrices of every layer: most of a model.
fn mlp_matrices(geometry: &Geometry) -> Vec<(String, usize, usize)> {
    let (hidden, intermediate) = (geometry.hidden, geometry.intermediate);
    (0..geometry.layers.len())
        .flat_map(|n| {
            [
                ("gate_proj", intermediate, hidden),
                ("up_proj", intermediate, hidden),
                ("down_proj", hidden, intermediate),
            ]
            .map(|(part, rows, cols)| (format!("layers.{n}.mlp.{part}"), rows, cols))
        })
        .collect()
}

fn report(what: &str, elements: usize, work: impl Fn() -> bool) {
    let done = work(); // once to fault the tables and pages in
    let clock = Clock::start();
    let again = work();
    let nanoseconds = clock.seconds() * 1e9 / elements as f64;
    println!("{what}: {nanoseconds:.2} ns per element{}", if done && again { "" } else { " (failed)" });
}

/// Processor time of this thread where the system tells it, so that a busy machine does not disturb; else
/// time passed.
struct Clock {
    begin: Instant,
    processor_ns: Option<u64>,
}

impl Clock {
    fn start() -> Self {
        Self { begin: Instant::now(), processor_ns: processor_ns() }
    }
    fn seconds(&self) -> f64 {
        match (self.processor_ns, processor_ns()) {
            (Some(begin), Some(end)) => (end - begin) as f64 / 1e9,
            _ => self.begin.elapsed().as_secs_f64(),
        }
    }
}

fn processor_ns() -> Option<u64> {
    std::fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok()
}
