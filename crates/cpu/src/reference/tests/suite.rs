//! The suite passes a right device and catches wrong ones.

use qwill_device::Activations;
use qwill_device::suite::{self, SuiteOptions};

use super::broken::{BrokenDevice, Fault};
use crate::ReferenceDevice;

#[test]
fn the_reference_passes_its_own_suite_without_any_error() {
    for activations in [Activations::F32, Activations::Bf16, Activations::Int8] {
        let mut options = SuiteOptions { seed: 7 + activations as u64, ..SuiteOptions::default() };
        if activations != Activations::F32 {
            options.geometries.truncate(2);
        }
        let mut device = ReferenceDevice::new(activations);
        let mut reference = ReferenceDevice::new(activations);
        let report = suite::run(&mut device, &mut reference, &options);
        println!("{report}");
        assert!(report.passed(), "{report}");
        assert_eq!(report.cases.len(), suite::cases().len());
        for case in &report.cases {
            assert!(case.runs > 0, "{} ran nothing", case.name);
            assert_eq!(case.worst_error, 0.0, "{} differs from itself", case.name);
        }
    }
}

/// Every fault makes the case named with it fail, and the message says with which parameters.
#[test]
fn the_suite_finds_every_planted_fault() {
    let options = SuiteOptions::default();
    for (fault, case) in Fault::ALL {
        let mut device = BrokenDevice::new(Activations::F32, fault);
        let mut reference = ReferenceDevice::new(Activations::F32);
        let report = suite::run_case(case, &mut device, &mut reference, &options).unwrap();
        let failure = report.failure.unwrap_or_else(|| panic!("{fault:?} passed {case}"));
        println!("{fault:?}: {failure}");
        assert!(failure.to_string().len() > 40, "{fault:?}: {failure}");
    }
}

/// Some of the keys then fall to the other side when they are rounded to bf16.
#[test]
fn keys_an_ulp_off_are_no_fault() {
    for case in ["attention_prepare", "prefill_slices", "round_splits", "rejected_rows"] {
        for seed in 0..4 {
            let mut options = SuiteOptions { seed, ..SuiteOptions::default() };
            options.geometries.truncate(2);
            let mut device = BrokenDevice::new(Activations::F32, Fault::KeysAnUlpOff);
            let mut reference = ReferenceDevice::new(Activations::F32);
            let report = suite::run_case(case, &mut device, &mut reference, &options).unwrap();
            assert!(report.failure.is_none(), "{case}: {:?}", report.failure);
            assert!(report.worst_error > 0.0, "{case} saw no difference");
        }
    }
}

#[test]
fn a_report_shows_the_failed_case_with_its_seed() {
    let (fault, case) = Fault::ALL[0];
    let mut device = BrokenDevice::new(Activations::F32, fault);
    let mut reference = ReferenceDevice::new(Activations::F32);
    let odd = vec![suite::odd_geometry()];
    let options = SuiteOptions { seed: 4242, geometries: odd, ..SuiteOptions::default() };
    let report = suite::run(&mut device, &mut reference, &options);
    assert!(!report.passed());
    let text = report.to_string();
    assert!(text.contains("FAILED, seed 4242") && text.contains(case), "{text}");
}

#[test]
fn an_unknown_case_is_no_case() {
    let mut device = ReferenceDevice::new(Activations::F32);
    let mut reference = device.clone();
    assert!(suite::run_case("no such op", &mut device, &mut reference, &SuiteOptions::default()).is_none());
}
