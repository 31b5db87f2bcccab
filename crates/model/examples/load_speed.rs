//! How long weights take to a device, and the most memory of the host on the way:
//! `cargo run --release -p qwill-model --example load_speed -- DEVICE SOURCE [quantize]`.
//!
//! `DEVICE` is `cuda`, `cpu`, or `none`, which only reads, rounds or makes the weights. `SOURCE` is a geometry, for
//! random weights in int4, or a checkpoint's directory. `quantize` is `none` (the default), `int8` or `int4`.

use std::path::Path;
use std::time::Instant;

use qwill_cpu::CpuDevice;
use qwill_cpu::fast::CpuOptions;
use qwill_cuda::{CudaDevice, CudaOptions};
use qwill_device::{Activations, Device, Geometry, KvType, StateType};
use qwill_model::{Model, ModelOptions};
use qwill_weights::{Block, Checkpoint, Quantize, StreamOptions, WeightsError, stream};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, source, rest @ ..] = arguments.as_slice() else {
        return Err("arguments: cuda|cpu|none GEOMETRY|DIRECTORY [none|int8|int4]".into());
    };
    let quantize = match rest.first().map_or("none", String::as_str) {
        "none" => Quantize::None,
        "int8" => Quantize::Int8,
        "int4" => Quantize::Int4,
        other => return Err(format!("no rounding {other}").into()),
    };
    let opened = Instant::now();
    let checkpoint = match Geometry::named(source) {
        Some(geometry) => Checkpoint::random(&geometry, 1, Quantize::Int4),
        None => Checkpoint::open(Path::new(source))?,
    };
    println!("{source}: opened in {:.3} s", opened.elapsed().as_secs_f64());
    match device.as_str() {
        "cuda" => {
            let options = CudaOptions::from_environment();
            load(CudaDevice::new(&options)?, &checkpoint, quantize)
        }
        "cpu" => {
            let threads = std::thread::available_parallelism()?.into();
            let options = CpuOptions { threads, activations: Activations::Int8, isa: None };
            load(CpuDevice::new(options)?, &checkpoint, quantize)
        }
        "none" => {
            let (start, mut bytes) = (Instant::now(), 0);
            let mut place = |block: Block<'_>| -> Result<(), WeightsError> {
                bytes += block.data.format().matrix_bytes(block.data.rows, block.data.cols);
                Ok(())
            };
            stream(&checkpoint, &checkpoint.matrices(), quantize, StreamOptions::default(), &mut place)?;
            report("none", bytes, start);
            Ok(())
        }
        other => Err(format!("no device {other}").into()),
    }
}

fn load<D: Device>(device: D, checkpoint: &Checkpoint, quantize: Quantize) -> Result<(), Failure> {
    let name = device.facts().name;
    let options = ModelOptions {
        quantize,
        kv_type: KvType::Bf16,
        state_type: StateType::F32,
        pages: 16,
        slots: 1,
        host_granules: 0,
        max_rows: 64,
        max_logit_rows: 8,
    };
    let (start, mut bytes) = (Instant::now(), 0);
    let model = Model::load(device, checkpoint, &options, &mut |progress| bytes = progress.bytes)?;
    report(&name, bytes, start);
    drop(model);
    Ok(())
}

fn report(device: &str, bytes: u64, start: Instant) {
    let (seconds, gigabytes) = (start.elapsed().as_secs_f64(), bytes as f64 / 1e9);
    println!("{device}: {gigabytes:.2} GB in {seconds:.2} s, {:.2} GB/s", gigabytes / seconds);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    for line in status.lines().filter(|line| line.starts_with("VmHWM") || line.starts_with("VmRSS")) {
        println!("{line}");
    }
}
