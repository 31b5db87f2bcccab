//! One answer: the same request gives the same tokens and the same log-probabilities, bit for bit, alone and in
//! batches of 2 to 16 with mates that come and go, whatever the size of the prompt slices, wherever its pages lie, and
//! whoever drafts how many tokens.
#![allow(clippy::unwrap_used, reason = "a test may fail this way")]

#[allow(dead_code, reason = "every test binary uses a part of it")]
mod common;

use common::client::{Client, Outcome, assert_idle};
use common::company::{Dice, mate, submit, wait_for_steps};
use common::{Setup, fast, gpu, reference, subjects};
use qwill_contract::{EngineHandle, Request, SamplingParams};
use qwill_device::{Activations, Device, DeviceError, KvType, StateType};
use qwill_engine::speculation::SpecMode;
use qwill_weights::Quantize;

/// Submits the subjects among mates, at random steps, and cancels mates at random steps.
fn in_company(handle: &EngineHandle, subjects: &[Request], dice: &mut Dice) -> Vec<Outcome> {
    let mut mates: Vec<Client> = Vec::new();
    let mut clients = Vec::new();
    for subject in subjects {
        for _ in 0..=dice.below(3) {
            mates.push(submit(handle, &mate(dice)));
        }
        clients.push(submit(handle, subject));
        wait_for_steps(handle, dice.below(6));
        if dice.below(2) == 0 {
            mates[dice.below(mates.len())].cancel.cancel();
        }
    }
    let outcomes = clients.into_iter().map(Client::wait).collect();
    for mate in mates {
        mate.cancel.cancel();
        mate.wait();
    }
    outcomes
}

/// Ways to draft, one for each size of slices: where from, at most how many, and whether only as many as pay.
const SPECULATIONS: [(SpecMode, usize, bool); 5] = [
    (SpecMode::Mtp, 15, false),
    (SpecMode::Auto, 15, true),
    (SpecMode::Lookup, 15, false),
    (SpecMode::Mtp, 2, false),
    (SpecMode::Auto, 6, false),
];

fn check<D: Device>(
    setup: Setup,
    device: impl Fn() -> Result<D, DeviceError> + Clone + Send + 'static,
    subjects: &[Request],
    slices: &[usize],
) {
    // Alone, cold and without drafts.
    let (handle, thread) = Setup { prefix_cache: false, spec: SpecMode::Off, ..setup }.start(device.clone());
    let alone: Vec<Outcome> = subjects.iter().map(|subject| submit(&handle, subject).wait()).collect();
    assert_idle(handle.load());
    for (subject, outcome) in subjects.iter().zip(&alone) {
        assert!(!outcome.failed() && outcome.processed_tokens == subject.prompt.len(), "{outcome:?}");
        // A single choice would only be compared with itself.
        for choice in (0..subject.choices).filter(|_| subject.choices > 1) {
            let seed = subject.sampling.seed.wrapping_add(choice as u64);
            let sampling = SamplingParams { seed, ..subject.sampling.clone() };
            let single = submit(&handle, &Request { choices: 1, sampling, ..subject.clone() }).wait();
            assert_eq!(
                single.choices[0], outcome.choices[choice],
                "choice {choice} is not a request of its own"
            );
        }
    }
    thread.stop().unwrap();

    for ((round, slice), speculation) in slices.iter().enumerate().zip(SPECULATIONS) {
        let (spec, draft_len, adaptive) = speculation;
        let setup = Setup { slice: *slice, spec, draft_len, adaptive, ..setup };
        let (handle, thread) = setup.start(device.clone());
        let crowded = in_company(&handle, subjects, &mut Dice(round as u64));
        for (subject, (crowded, alone)) in crowded.iter().zip(&alone).enumerate() {
            assert!(
                crowded.same_answer(alone),
                "subject {subject}, slices of {slice}, {speculation:?}:\n{crowded:?}\nalone:\n{alone:?}"
            );
        }
        assert_idle(handle.load());
        thread.stop().unwrap();
    }
}

#[test]
fn on_the_fast_device_in_f32() {
    check(Setup::f32(), || fast(Activations::F32), &subjects(2), &[64, 128, 256, 1024]);
}

#[test]
fn on_the_fast_device_in_int4_with_int8_activations() {
    check(Setup::int4(), || fast(Activations::Int8), &subjects(1), &[64, 128, 256, 1024]);
}

#[test]
fn on_the_fast_device_with_int8_keys_and_values() {
    check(Setup::int8_kv(), || fast(Activations::Int8), &subjects(2), &[64, 128, 256]);
}

#[test]
fn on_the_fast_device_with_states_in_half_precision() {
    let setup = Setup { state_type: StateType::F16, ..Setup::int4() };
    check(setup, || fast(Activations::Int8), &subjects(1), &[64, 128, 1024]);
}

#[test]
fn on_the_reference_device() {
    check(Setup::f32(), reference, &subjects(5), &[64]);
}

/// With bf16 activations, on the GPU where there is one.
fn check_on_the_gpu(quantize: Quantize, kv_type: KvType, state_type: StateType) {
    if let Some(device) = gpu() {
        let setup = Setup { kv_type, state_type, ..Setup::rounded(quantize) };
        check(setup, device, &subjects(1), &[64, 128, 256, 512, 1024]);
    }
}

#[test]
fn on_the_gpu_in_int4() {
    check_on_the_gpu(Quantize::Int4, KvType::Bf16, StateType::F16);
}

#[test]
fn on_the_gpu_in_int4_with_int8_keys_and_values() {
    check_on_the_gpu(Quantize::Int4, KvType::Int8, StateType::F16);
}

#[test]
fn on_the_gpu_in_int8() {
    check_on_the_gpu(Quantize::Int8, KvType::Bf16, StateType::F32);
}

#[test]
fn on_the_gpu_in_bf16() {
    check_on_the_gpu(Quantize::None, KvType::Bf16, StateType::F16);
}
