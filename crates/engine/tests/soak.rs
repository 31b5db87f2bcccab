//! Nothing is left behind, and an answer from before is still the same, after waves of requests with random
//! disconnects: a short soak always, a long one with `QWILL_SOAK_SECONDS=1800 cargo test --test soak -- --ignored`.
#![allow(clippy::unwrap_used, reason = "a test may fail this way")]

#[allow(dead_code, reason = "every test binary uses a part of it")]
mod common;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::client::{Client, assert_idle, request};
use common::company::{Dice, mate, submit, wait_for_steps};
use common::prompts::prompts;
use common::{Setup, fast, gpu, greedy, subjects};
use qwill_contract::{EngineHandle, FinishReason, Request};
use qwill_device::{Activations, Device, DeviceError};
use qwill_engine::DiskCacheOptions;

/// Room on disk: what some dozens of prompts leave.
const DISK_BYTES: u64 = 64 << 20;

/// Few pages, so that requests wait and what is kept must go.
fn tight() -> Setup {
    Setup { sequences: 8, pages: 64, ..Setup::int4() }
}

/// Some requests at random steps, a third of them cancelled.
fn wave(handle: &EngineHandle, requests: &[Request], dice: &mut Dice) {
    let clients: Vec<Client> = requests.iter().map(|request| submit(handle, request)).collect();
    for client in &clients {
        wait_for_steps(handle, dice.below(4));
        if dice.below(3) == 0 {
            client.cancel.cancel();
        }
    }
    for client in clients {
        let cancelled = client.cancel.is_cancelled();
        let outcome = client.wait();
        assert!(!outcome.failed());
        let was_cut = outcome.choices.iter().any(|choice| choice.end == Some(FinishReason::Cancelled));
        assert!(cancelled || !was_cut);
    }
    assert_idle(handle.load());
}

fn soak<D: Device>(device: impl FnOnce() -> Result<D, DeviceError> + Send + 'static) {
    let (handle, thread) = tight().start(device);
    let probe = &subjects(2)[2];
    let before = submit(&handle, probe).wait();
    let mut dice = Dice(77);
    for _ in 0..6 {
        let mates: Vec<Request> = (0..12).map(|_| mate(&mut dice)).collect();
        wave(&handle, &mates, &mut dice);
    }
    assert!(submit(&handle, probe).wait().same_answer(&before));
    assert_idle(handle.load());
    thread.stop().unwrap();
}

/// Waves of real and random text, engines that are stopped and started again, each with what the one before left on a
/// disk with little room, until the time is over.
fn soak_for_long<D: Device>(device: impl Fn() -> Result<D, DeviceError> + Clone + Send + 'static) {
    let seconds = std::env::var("QWILL_SOAK_SECONDS").map_or(60, |seconds| seconds.parse().unwrap());
    let end = Instant::now() + Duration::from_secs(seconds);
    let (prompts, probe) = (prompts(), &subjects(2)[2]);
    let mut dice = Dice(78);
    let (mut before, mut engines, mut requests, mut disk_loads) = (None, 0, 0, 0);
    let directory = tempfile::tempdir().unwrap();
    while Instant::now() < end {
        let disk = DiskCacheOptions {
            directory: directory.path().to_owned(),
            limit_bytes: DISK_BYTES,
            identity: [8; 32],
        };
        let (handle, thread) = tight().start_with_disk(Some(disk), device.clone());
        engines += 1;
        for _ in 0..10 {
            let wanted = 1 + dice.below(20);
            let text = |dice: &mut Dice| {
                let prompt = &prompts[dice.below(prompts.len())].ids;
                request(prompt, greedy(1 + dice.below(60)))
            };
            let of_wave: Vec<Request> = (0..wanted)
                .map(|_| if dice.below(3) == 0 { mate(&mut dice) } else { text(&mut dice) })
                .collect();
            wave(&handle, &of_wave, &mut dice);
            requests += wanted;
            let answer = submit(&handle, probe).wait();
            assert!(before.get_or_insert_with(|| answer.clone()).same_answer(&answer), "{answer:?}");
        }
        assert_idle(handle.load());
        disk_loads += handle.load().cache.disk_loads.load(Ordering::Relaxed);
        thread.stop().unwrap();
    }
    println!("{requests} requests to {engines} engines in {seconds} s, {disk_loads} beginnings from disk");
    let entries = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap());
    let kept_bytes: u64 = entries.map(|entry| entry.metadata().unwrap().len()).sum();
    assert!(kept_bytes <= DISK_BYTES, "{kept_bytes} bytes are left on disk");
}

#[test]
fn soak_with_random_cancels() {
    soak(|| fast(Activations::Int8));
}

#[test]
fn soak_with_random_cancels_on_the_gpu() {
    if let Some(device) = gpu() {
        soak(device);
    }
}

#[test]
#[ignore = "runs for QWILL_SOAK_SECONDS, a minute without"]
fn soak_for_as_long_as_asked() {
    soak_for_long(|| fast(Activations::Int8));
}

#[test]
#[ignore = "runs for QWILL_SOAK_SECONDS, a minute without"]
fn soak_for_as_long_as_asked_on_the_gpu() {
    if let Some(device) = gpu() {
        soak_for_long(device);
    }
}
