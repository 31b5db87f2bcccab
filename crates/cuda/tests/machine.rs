//! What is known and measured about a GPU, where there is one.

mod common;

use common::device;
use qwill_cuda::{CudaOptions, Nvml, PeakMemory, driver_facts};
use qwill_device::{Device, Precision};

#[test]
fn ceilings_are_possible_and_in_order() {
    let Some(device) = device(&CudaOptions::from_environment()) else { return };
    let facts = driver_facts().unwrap();
    println!("{facts:#?}");
    let ceilings = device.measure_ceilings().unwrap();
    println!("{ceilings:#?}");
    let sizes: Vec<u64> = ceilings.reads.iter().map(|rate| rate.bytes).collect();
    assert!(sizes.is_sorted_by(|a, b| a > b) && !sizes.is_empty(), "{sizes:?}");
    assert!(ceilings.reads.iter().all(|rate| rate.bytes_per_s > 0.0));
    if let Some(possible) = facts.gpus[0].memory_bytes_per_s {
        // More would mean that a cache answered, or that something was not read.
        assert!(ceilings.read_bytes_per_s() < possible, "{ceilings:?} of {possible:e}");
        assert!(ceilings.copy_bytes_per_s < possible, "{ceilings:?} of {possible:e}");
    }
    // Tensor cores, and twice as many operations on half as many bits.
    assert!(ceilings.bf16_flops_per_s > ceilings.f32_flops_per_s, "{ceilings:?}");
    assert!(ceilings.int8_flops_per_s > ceilings.bf16_flops_per_s, "{ceilings:?}");
    assert!(ceilings.launch_us > 0.0, "{ceilings:?}");
}

#[test]
fn the_peak_of_memory_is_seen_by_the_management_library() {
    const BYTES: u64 = 512 << 20;
    let Some(mut device) = device(&CudaOptions::from_environment()) else { return };
    let nvml = match Nvml::open() {
        Ok(nvml) => nvml,
        Err(error) => return println!("skipped: {error}"),
    };
    println!("{:#?}", nvml.gpus().unwrap());
    let uuid = driver_facts().unwrap().gpus[0].uuid.clone();
    let watch = PeakMemory::watch(&nvml, &uuid).unwrap();
    let before = watch.start_bytes();
    let buffer = device.buffer(1024, (BYTES / 4096) as usize, Precision::Full).unwrap();
    let peak = watch.stop().unwrap();
    drop(buffer);
    // The other test may hold more meanwhile.
    assert!(peak >= before + BYTES, "{before} bytes, then {peak}");
}
