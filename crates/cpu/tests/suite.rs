//! The fast device against the reference: every op, every instruction set that this processor has, every numerics
//! mode, several thread counts.

use qwill_cpu::fast::{CpuDevice, CpuOptions, Isa};
use qwill_cpu::{Buffer, ReferenceDevice};
use qwill_device::suite::{self, SuiteOptions, odd_geometry};
use qwill_device::{Activations, Device, DeviceError, Geometry, Precision};

const ACTIVATIONS: [Activations; 3] = [Activations::F32, Activations::Bf16, Activations::Int8];

fn check(isa: Isa, activations: Activations, threads: usize, options: &SuiteOptions) {
    let mut device =
        CpuDevice::new(CpuOptions { threads, activations, isa: Some(isa) }).expect("an available one");
    let mut reference = ReferenceDevice::new(activations);
    let report = suite::run(&mut device, &mut reference, options);
    assert!(report.passed(), "{activations:?}\n{report}");
    println!("{activations:?} {report}");
}

/// Small shapes, where boundaries are met often, on every path and with more threads than pieces; the tiny model's, which
/// take three times as long, on the fastest path alone.
#[test]
fn small_shapes_agree_with_the_reference_on_every_path() {
    for (seed, isa) in Isa::available().into_iter().enumerate() {
        for (activations, threads) in ACTIVATIONS.into_iter().zip([1, 2, 3].into_iter().cycle().skip(seed)) {
            let tiny = Geometry::named("tiny").filter(|_| isa == Isa::best());
            let geometries = [odd_geometry()].into_iter().chain(tiny).collect();
            let options = SuiteOptions { seed: seed as u64, geometries, ..SuiteOptions::default() };
            check(isa, activations, threads, &options);
        }
    }
}

/// The widths of real models, on the fastest path.
#[test]
fn model_shapes_agree_with_the_reference_on_the_fastest_path() {
    let geometries: Vec<Geometry> = ["0.8b", "27b"].into_iter().filter_map(Geometry::named).collect();
    for (activations, threads) in ACTIVATIONS.into_iter().zip([3, 1, 2]) {
        let options = SuiteOptions { seed: 99, geometries: geometries.clone(), ..SuiteOptions::default() };
        check(Isa::best(), activations, threads, &options);
    }
}

#[test]
fn options_that_cannot_be_are_errors() {
    let without_threads = CpuOptions::new(0, Activations::F32);
    assert!(matches!(CpuDevice::new(without_threads), Err(DeviceError::Shape { .. })));
    for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_available()) {
        let message =
            CpuDevice::new(CpuOptions { threads: 1, activations: Activations::F32, isa: Some(isa) })
                .unwrap_err()
                .to_string();
        assert!(message.contains(isa.name()), "{message}");
    }
}

#[test]
fn facts_name_the_instructions_and_the_threads() {
    let device =
        CpuDevice::new(CpuOptions { threads: 2, activations: Activations::Int8, isa: Some(Isa::Scalar) });
    let facts = device.unwrap().facts();
    assert_eq!(facts.name, "cpu (scalar, 2 threads)");
    assert_eq!(facts.activations, Activations::Int8);
    assert!(facts.memory_bytes > 0);
}

/// A device may be built on one thread and used on another.
#[test]
fn a_device_moves_between_threads() {
    let mut device = CpuDevice::new(CpuOptions::new(2, Activations::F32)).unwrap();
    let work = move || {
        let weight = device.vector(&[1.0; 2048]).unwrap();
        let mut x: Buffer = device.buffer(64, 2048, Precision::Activation).unwrap();
        device.write(&mut x, &vec![2.0; 64 * 2048]).unwrap();
        let mut out = device.buffer(64, 2048, Precision::Activation).unwrap();
        device.rms_norm(64, &x, &weight, 0.0, &mut out).unwrap();
        device.read(&out, 64).unwrap()
    };
    let values = std::thread::spawn(work).join().unwrap();
    assert!(values.iter().all(|value| (value - 1.0).abs() < 1e-6));
}
