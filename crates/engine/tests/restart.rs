//! What outlives the process on disk: the next engine begins where the last one was, with the same answers bit for bit.
#![allow(clippy::unwrap_used, reason = "a test may fail this way")]

#[allow(dead_code, reason = "every test binary uses a part of it")]
mod common;

use std::path::Path;
use std::sync::atomic::Ordering;

use common::client::{Client, Outcome};
use common::{Setup, fast, gpu, subjects};
use qwill_contract::Request;
use qwill_device::{Activations, Device, DeviceError};
use qwill_engine::DiskCacheOptions;

/// Asks everything of a new engine that has the directory, and stops it. Also says how many prompts came from disk.
fn life<D: Device>(
    setup: Setup,
    directory: Option<&Path>,
    device: impl FnOnce() -> Result<D, DeviceError> + Send + 'static,
    requests: &[Request],
) -> (Vec<Outcome>, u64) {
    let options = |directory: &Path| DiskCacheOptions {
        directory: directory.to_owned(),
        limit_bytes: 1 << 30,
        identity: [5; 32],
    };
    let (handle, thread) = setup.start_with_disk(directory.map(options), device);
    let ask = |request: &Request| Client::submit(&handle, request.clone()).unwrap().wait();
    let outcomes = requests.iter().map(ask).collect();
    let loads = handle.load().cache.disk_loads.load(Ordering::Relaxed);
    thread.stop().unwrap();
    (outcomes, loads)
}

fn check<D: Device>(setup: Setup, device: impl Fn() -> Result<D, DeviceError> + Clone + Send + 'static) {
    let directory = tempfile::tempdir().unwrap();
    let requests = subjects(2);
    let cold = Setup { prefix_cache: false, ..setup };
    let (expected, _) = life(cold, None, device.clone(), &requests);
    let (first, loads) = life(setup, Some(directory.path()), device.clone(), &requests);
    assert_eq!(loads, 0);
    let (again, loads) = life(setup, Some(directory.path()), device, &requests);
    assert!(loads > 0, "nothing was read from disk");
    for (index, expected) in expected.iter().enumerate() {
        assert!(first[index].same_answer(expected) && again[index].same_answer(expected), "request {index}");
    }
    let cached = |outcomes: &[Outcome]| outcomes.iter().map(|outcome| outcome.cached_tokens).sum::<usize>();
    println!(
        "{} tokens cached before the restart, {} after, {loads} prompts from disk",
        cached(&first),
        cached(&again)
    );
    assert!(cached(&again) > cached(&first));
}

#[test]
fn the_processor_goes_on_after_a_restart() {
    check(Setup::int8_kv(), || fast(Activations::Int8));
    check(Setup::f32(), || fast(Activations::F32));
}

#[test]
fn the_gpu_goes_on_after_a_restart() {
    let Some(open) = gpu() else { return };
    check(Setup::int8_kv(), open);
}
