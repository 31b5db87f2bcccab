//! A sequence that goes on from a stored page and state has the bits of one that was never interrupted.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::{Golden, HOST_GRANULES, Sequence, fast, gpu, reference, rows_of, tiny_with_states};
use qwill_device::{Activations, Device, KvType, StateType};
use qwill_model::{Model, ModelError};
use qwill_weights::Quantize;

/// Where the sequence is stored: a chunk's and a page's end.
const STORED_AT: usize = 64;
/// Another page than the sequence's first one.
const OTHER_PAGE: u32 = 39;

/// Prefills the rest of the tokens and verifies them again in rounds; logits of every row.
fn go_on<D: Device>(model: &mut Model<D>, sequence: &mut Sequence, tokens: &[u32]) -> Vec<Vec<f32>> {
    let batch = sequence.prefill_batch(tokens);
    let rows: Vec<usize> = (0..tokens.len()).collect();
    model.forward(&batch, &rows).unwrap();
    let mut logits = rows_of(&model.read_logits(tokens.len()).unwrap(), tokens.len());
    for round in tokens.chunks(7) {
        logits.extend(sequence.verify(model, round));
        sequence.commit(round.len());
        if sequence.ring_room() < 7 {
            break;
        }
    }
    logits
}

fn prefill<D: Device>(model: &mut Model<D>, sequence: &mut Sequence, tokens: &[u32]) {
    model.clear_slot(1).unwrap();
    let batch = sequence.prefill_batch(tokens);
    model.forward(&batch, &[]).unwrap();
}

fn check<D: Device>(
    device: D,
    kv_type: KvType,
    state_type: StateType,
    activity: impl Fn(&mut D) -> [u64; 3],
) {
    let mut model = tiny_with_states(device, Quantize::Int8, kv_type, state_type);
    let golden = Golden::open("golden/trunk.safetensors");
    let tokens = golden.ints("n130.ids");
    let (first, rest) = tokens.split_at(STORED_AT);
    let mut whole = Sequence::default();
    prefill(&mut model, &mut whole, first);
    let expected = go_on(&mut model, &mut whole, rest);

    let mut interrupted = Sequence::default();
    prefill(&mut model, &mut interrupted, first);
    let before = activity(model.device());
    let of_state: Vec<u32> = (1..).step_by(3).take(model.state_granules()).collect();
    model.store_state(1, STORED_AT, &of_state).unwrap();
    model.store_page(interrupted.page(0), 2).unwrap();
    assert_eq!(activity(model.device()), before);
    // Others take page and slot before anybody knows whether the copies are done.
    let others: Vec<u32> = tokens.iter().rev().copied().collect();
    prefill(&mut model, &mut Sequence::default(), &others);
    for _ in 0..2 {
        let mut resumed = Sequence { position: STORED_AT, ..Sequence::default() };
        resumed.pages.swap(0, 25);
        resumed.pages[0] = OTHER_PAGE;
        let before = activity(model.device());
        model.load_page(OTHER_PAGE as usize, 2).unwrap();
        model.load_state(0, STORED_AT, &of_state).unwrap();
        model.copy_slot(0, 1).unwrap();
        assert_eq!(activity(model.device()), before);
        let found = go_on(&mut model, &mut resumed, rest);
        assert!(found == expected, "{kv_type:?} KV, {state_type:?} states");
        while !model.stored().unwrap() {}
        prefill(&mut model, &mut Sequence::default(), &others);
    }
}

fn check_all<D: Device>(device: impl Fn() -> D, activity: impl Fn(&mut D) -> [u64; 3]) {
    for (kv_type, state_type) in
        [(KvType::Bf16, StateType::F16), (KvType::Int8, StateType::F32), (KvType::F32, StateType::F16)]
    {
        check(device(), kv_type, state_type, &activity);
    }
}

#[test]
fn the_reference_goes_on_from_host_memory() {
    check(reference(Activations::F32), KvType::Bf16, StateType::F16, |_| [0; 3]);
}

#[test]
fn the_processor_goes_on_from_host_memory() {
    check_all(|| fast(Activations::Int8), |_| [0; 3]);
}

/// Takes no memory, loads no code and does not wait either.
#[test]
fn the_gpu_goes_on_from_host_memory() {
    if gpu().is_none() {
        return;
    }
    check_all(
        || gpu().unwrap(),
        |device| {
            let activity = device.activity();
            [activity.allocations, activity.loads, activity.blocking_reads]
        },
    );
}

#[test]
fn what_the_store_lacks_is_an_error() {
    let mut model = tiny_with_states(fast(Activations::F32), Quantize::None, KvType::F32, StateType::F32);
    assert_eq!(model.host_granules(), HOST_GRANULES);
    let error = model.store_page(0, HOST_GRANULES as u32).unwrap_err();
    assert!(
        matches!(&error, ModelError::Device(_)) && error.to_string().contains("granule 256 of 256"),
        "{error}"
    );
    let granule = model.read_granule(3).unwrap().to_vec();
    model.write_granule(4, &granule).unwrap();
    model.write_granule(4, &granule[1..]).unwrap_err();
}
