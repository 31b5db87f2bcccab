//! The GPU against the reference, every op, or those that `QWILL_SUITE_CASES` names (`attention,caches`). Without a GPU it
//! says so and passes: the machine has nothing to test.

mod common;

use common::device;
use qwill_cpu::ReferenceDevice;
use qwill_cuda::{CudaDevice, CudaOptions};
use qwill_device::suite::{self, SuiteOptions, SuiteReport, odd_geometry};
use qwill_device::{Activations, Device, Geometry, Precision};

fn check(geometry: Geometry) {
    let Some(mut device) = device(&CudaOptions::from_environment()) else { return };
    let mut reference = ReferenceDevice::new(Activations::Bf16);
    let name = geometry.name.clone();
    let options = SuiteOptions { seed: 7, geometries: vec![geometry], ..SuiteOptions::default() };
    let report = match std::env::var("QWILL_SUITE_CASES") {
        Ok(names) => SuiteReport {
            device: device.facts().name,
            seed: options.seed,
            cases: names
                .split(',')
                .map(|case| suite::run_case(case, &mut device, &mut reference, &options))
                .collect::<Option<_>>()
                .expect("names of cases"),
        },
        Err(_) => suite::run(&mut device, &mut reference, &options),
    };
    println!("{name}: {report}");
    assert!(report.passed(), "{name}: {report}");
}

#[test]
fn odd_shapes_agree_with_the_reference() {
    check(odd_geometry());
}

#[test]
fn tiny_shapes_agree_with_the_reference() {
    check(Geometry::named("tiny").unwrap());
}

#[test]
fn shapes_of_the_smallest_model_agree_with_the_reference() {
    check(Geometry::named("0.8b").unwrap());
}

#[test]
fn shapes_of_the_largest_model_agree_with_the_reference() {
    check(Geometry::named("27b").unwrap());
}

#[test]
fn an_allocation_beyond_the_budget_is_an_error_with_both_numbers() {
    let limited = CudaOptions { memory_budget_bytes: Some(3 << 30), ..CudaOptions::from_environment() };
    let Some(mut device) = device(&limited) else { return };
    let memory = device.memory();
    println!("{memory:?}");
    assert_eq!(memory.budget_bytes, 3 << 30);
    assert_eq!(device.facts().memory_bytes, memory.own_bytes());
    let gauge = device.gauge();
    let allocated_bytes = gauge.allocated_bytes();
    let message = device.buffer(1024, 1 << 20, Precision::Full).unwrap_err().to_string();
    assert!(message.contains("4294967296"), "{message}");
    device.buffer(16, 1024, Precision::Full).unwrap();
    assert_eq!(gauge.allocated_bytes(), allocated_bytes);
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let message =
        CudaDevice::new(&CudaOptions { ordinal: 99, ..CudaOptions::default() }).unwrap_err().to_string();
    assert!(message.contains("99"), "{message}");
}
