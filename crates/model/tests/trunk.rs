//! Trunk, states, KV and greedy continuations against the reference outputs (see golden/README.md).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::{
    Golden, MAX_ROWS, Sequence, argmax, assert_close, assert_close_relative, fast, gpu, json, logsumexp,
    reference, rows_of, tiny, tiny_with_states,
};
use qwill_cuda::Activity;
use qwill_device::batch::{CONV_RING, PAGE_TOKENS};
use qwill_device::{Activations, Device, KvType, LayerKind, SampleRow, StateType};
use qwill_model::Model;
use qwill_weights::Quantize;

const PROMPTS: [&str; 13] =
    ["n1", "n2", "n3", "n4", "n5", "n7", "n63", "n64", "n65", "n128", "n130", "n218", "n700"];
const LAST_KEPT_TOP: usize = 32;
/// Of logits (about 10 in size) where states are halves.
const F16_STATES_TOLERANCE: f32 = 0.05;

/// Prefills a prompt in slices; returns the logits of every row.
fn prefill<D: Device>(
    model: &mut Model<D>,
    sequence: &mut Sequence,
    tokens: &[u32],
    slice: usize,
) -> Vec<Vec<f32>> {
    model.clear_slot(1).unwrap();
    let mut logits = Vec::new();
    for part in tokens.chunks(slice) {
        let batch = sequence.prefill_batch(part);
        let rows: Vec<usize> = (0..part.len()).collect();
        model.forward(&batch, &rows).unwrap();
        logits.extend(rows_of(&model.read_logits(part.len()).unwrap(), part.len()));
    }
    logits
}

fn check_top(what: &str, logits: &[f32], ids: &[u32], expected: &[f32], tolerance: f32) {
    let found: Vec<f32> = ids.iter().map(|id| logits[*id as usize]).collect();
    assert_close(what, &found, expected, tolerance);
}

fn check_prompt<D: Device>(model: &mut Model<D>, golden: &Golden, name: &str, slice: usize) {
    let ids = golden.ints(&format!("{name}.ids"));
    let mut sequence = Sequence::default();
    let logits = prefill(model, &mut sequence, ids, slice);
    let (top_ids, top) =
        (golden.ints(&format!("{name}.top_ids")), golden.floats(&format!("{name}.top_logits")));
    for (row, logits) in logits.iter().enumerate() {
        let at = row * LAST_KEPT_TOP..(row + 1) * LAST_KEPT_TOP;
        check_top(&format!("{name} row {row}"), logits, &top_ids[at.clone()], &top[at], 2e-4);
        let lse = golden.floats(&format!("{name}.lse"))[row];
        assert!((logsumexp(logits) - f64::from(lse)).abs() <= 2e-4, "{name} row {row} logsumexp");
    }
    assert_close(name, logits.last().unwrap(), golden.floats(&format!("{name}.last_logits")), 2e-4);
    if golden.has(&format!("{name}.logits")) {
        assert_close(name, &logits.concat(), golden.floats(&format!("{name}.logits")), 2e-4);
        check_kv_and_states(model, &sequence, golden, name, ids.len());
    }
    check_greedy(model, &mut sequence, golden, name, logits.last().unwrap());
}

fn check_kv_and_states<D: Device>(
    model: &mut Model<D>,
    sequence: &Sequence,
    golden: &Golden,
    name: &str,
    tokens: usize,
) {
    let geometry = model.geometry().clone();
    let (mut gdn_layer, mut kv_layer) = (0, 0);
    for (layer, kind) in geometry.layers.iter().enumerate() {
        let (device, cache) = model.device_and_cache();
        match kind {
            LayerKind::Attention => {
                let columns = geometry.attention.kv_columns();
                let (mut keys, mut values) = (Vec::new(), Vec::new());
                for logical in 0..tokens.div_ceil(PAGE_TOKENS) {
                    let page = device.read_page(cache, kv_layer, sequence.page(logical)).unwrap();
                    keys.extend(page.keys);
                    values.extend(page.values);
                }
                // One kv head: token-major and head-major are the same.
                assert_eq!(geometry.attention.kv_heads, 1);
                let what = format!("{name} layer {layer}");
                assert_close(
                    &what,
                    &keys[..tokens * columns],
                    golden.floats(&format!("{name}.k.{layer}")),
                    3e-4,
                );
                let expected = golden.floats(&format!("{name}.v.{layer}"));
                assert_close(&what, &values[..tokens * columns], expected, 3e-4);
                kv_layer += 1;
            }
            LayerKind::Gdn => {
                let state = device.read_state(cache, gdn_layer, 1).unwrap();
                let what = format!("{name} state {layer}");
                assert_close_relative(&what, &state.base, golden.floats(&format!("{name}.S.{layer}")), 1e-5);
                let channels = geometry.gdn.conv_channels();
                let mut conv = vec![0.0; channels * 3];
                for back in 0..3.min(tokens) {
                    let row = (tokens - 1 - back) % CONV_RING;
                    for channel in 0..channels {
                        conv[channel * 3 + 2 - back] = state.conv[row * channels + channel];
                    }
                }
                assert_close(&what, &conv, golden.floats(&format!("{name}.conv.{layer}")), 3e-4);
                gdn_layer += 1;
            }
        }
    }
}

/// 64 steps of greedy continuation, up to the first near tie that goes the other way.
fn check_greedy<D: Device>(
    model: &mut Model<D>,
    sequence: &mut Sequence,
    golden: &Golden,
    name: &str,
    last: &[f32],
) {
    let expected = golden.ints(&format!("{name}.greedy_ids"));
    let margins = golden.floats(&format!("{name}.greedy_margin"));
    let top_ids = golden.ints(&format!("{name}.greedy_top_ids"));
    let top = golden.floats(&format!("{name}.greedy_top_logits"));
    let mut logits = last.to_vec();
    for (step, want) in expected.iter().enumerate() {
        let at = step * LAST_KEPT_TOP..(step + 1) * LAST_KEPT_TOP;
        check_top(&format!("{name} greedy {step}"), &logits, &top_ids[at.clone()], &top[at], 2e-4);
        let token = argmax(&logits);
        if token != *want {
            assert!(margins[step] < 1e-3, "{name} step {step}: {token}, expected {want}");
            assert_eq!(name, "n1", "only n1 has a near tie");
            return;
        }
        logits = sequence.decode(model, token);
    }
}

fn check_hidden<D: Device>(model: &mut Model<D>, golden: &Golden, name: &str) {
    let ids = golden.ints(&format!("{name}.ids"));
    let (rows, hidden) = (ids.len(), model.geometry().hidden);
    let expected = golden.floats(&format!("{name}.hidden"));
    let check = |model: &mut Model<D>, at: usize| {
        let found = model.read_residual(rows).unwrap();
        let expected = &expected[at * rows * hidden..(at + 1) * rows * hidden];
        assert_close_relative(&format!("{name} hidden {at}"), &found, expected, 1e-5);
    };
    let mut sequence = Sequence::default();
    let batch = sequence.prefill_batch(ids);
    model.clear_slot(1).unwrap();
    model.begin(&batch).unwrap();
    check(model, 0);
    for layer in 0..model.geometry().layers.len() {
        model.layer(&batch, layer).unwrap();
        check(model, layer + 1);
    }
    model.finish(&batch, &[]).unwrap();
    let found = model.read_hidden(rows).unwrap();
    assert_close_relative(name, &found, golden.floats(&format!("{name}.final")), 1e-5);
}

fn check_f32<D: Device>(device: D) {
    let golden = Golden::open("golden/trunk.safetensors");
    let mut model = tiny(device, Quantize::None, KvType::F32);
    for name in PROMPTS {
        check_prompt(&mut model, &golden, name, MAX_ROWS);
    }
    check_prompt(&mut model, &golden, "n130", 64);
    check_prompt(&mut model, &golden, "n700", 192);
    for name in ["n4", "n65"] {
        check_hidden(&mut model, &golden, name);
    }
}

#[test]
fn the_reference_device_gives_the_golden_trunk() {
    check_f32(reference(Activations::F32));
}

#[test]
fn the_fast_device_gives_the_golden_trunk() {
    check_f32(fast(Activations::F32));
}

/// int8 keys and values, everything else in f32: what is stored, and what it does to the logits.
fn check_int8_kv<D: Device>(device: D) {
    let golden = Golden::open("golden/trunk.safetensors");
    let mut model = tiny(device, Quantize::None, KvType::Int8);
    for name in ["n65", "n130", "n700"] {
        let ids = golden.ints(&format!("{name}.ids"));
        let mut sequence = Sequence::default();
        let logits = prefill(&mut model, &mut sequence, ids, MAX_ROWS);
        let top_ids = golden.ints(&format!("{name}.top_ids"));
        let expected = golden.floats(&format!("{name}.top_logits"));
        let differences: Vec<f32> = (top_ids.iter().zip(expected).enumerate())
            .map(|(at, (id, want))| (logits[at / LAST_KEPT_TOP][*id as usize] - want).abs())
            .collect();
        let worst = differences.iter().copied().fold(0.0, f32::max);
        let mean = differences.iter().sum::<f32>() / differences.len() as f32;
        let last = logits.last().unwrap();
        let divergence = divergence(golden.floats(&format!("{name}.last_logits")), last);
        println!("{name} int8 KV: worst {worst:.4}, mean {mean:.5}, divergence {divergence:.2e} nats");
        // About twice what is measured on both devices: 0.11, 0.0063, 4.0e-4.
        assert!(worst <= 0.25 && mean <= 0.013 && divergence <= 8e-4, "{name}: {worst} {mean} {divergence}");
        if golden.has(&format!("{name}.logits")) {
            check_int8_pages(&mut model, &sequence, &golden, name, ids.len());
        }
        check_bf16_greedy(&mut model, &mut sequence, &golden, name, last.clone());
    }
}

/// The first attention layer's keys and values, which nothing quantised has touched before: half a step off at most.
fn check_int8_pages<D: Device>(
    model: &mut Model<D>,
    sequence: &Sequence,
    golden: &Golden,
    name: &str,
    tokens: usize,
) {
    let geometry = model.geometry().clone();
    let layer = geometry.layers.iter().position(|kind| *kind == LayerKind::Attention).unwrap();
    let dim = geometry.attention.kv_columns();
    assert_eq!(geometry.attention.kv_heads, 1);
    let (device, cache) = model.device_and_cache();
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for logical in 0..tokens.div_ceil(PAGE_TOKENS) {
        let page = device.read_page(cache, 0, sequence.page(logical)).unwrap();
        keys.extend(page.keys);
        values.extend(page.values);
    }
    for (part, found) in [("k", keys), ("v", values)] {
        let expected = golden.floats(&format!("{name}.{part}.{layer}"));
        for (token, (found, expected)) in found.chunks(dim).zip(expected.chunks(dim)).enumerate() {
            let step = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) / 127.0;
            // A scale in f16 is up to 2^-11 too small: 0.06 steps at the largest code.
            let allowed = 0.57 * step + 3e-4;
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() <= allowed, "{name} {part} {token}: {found}, {expected}");
            }
        }
    }
}

#[test]
fn int8_keys_and_values_stay_within_their_tolerance_on_the_reference_device() {
    check_int8_kv(reference(Activations::F32));
}

#[test]
fn int8_keys_and_values_stay_within_their_tolerance_on_the_fast_device() {
    check_int8_kv(fast(Activations::F32));
}

/// States in half precision: rounded after every chunk and fold. Prompts and 64 greedy steps, two folds among them.
fn check_f16_states<D: Device>(name: &str, device: D) {
    let golden = Golden::open("golden/trunk.safetensors");
    let mut model = tiny_with_states(device, Quantize::None, KvType::F32, StateType::F16);
    let mut worst = 0.0f32;
    for prompt in ["n65", "n130", "n700"] {
        let mut sequence = Sequence::default();
        let logits = prefill(&mut model, &mut sequence, golden.ints(&format!("{prompt}.ids")), 192);
        let mut last = logits.last().unwrap().clone();
        let margins = golden.floats(&format!("{prompt}.greedy_margin"));
        let top_ids = golden.ints(&format!("{prompt}.greedy_top_ids"));
        let top = golden.floats(&format!("{prompt}.greedy_top_logits"));
        for (step, want) in golden.ints(&format!("{prompt}.greedy_ids")).iter().enumerate() {
            for at in step * LAST_KEPT_TOP..(step + 1) * LAST_KEPT_TOP {
                worst = worst.max((last[top_ids[at] as usize] - top[at]).abs());
            }
            if margins[step] > 2.0 * F16_STATES_TOLERANCE {
                assert_eq!(argmax(&last), *want, "{prompt} greedy {step}");
            }
            last = sequence.decode(&mut model, *want);
        }
    }
    println!("{name}, f16 states: logits at most {worst:.1e} off");
    assert!(worst <= F16_STATES_TOLERANCE, "{name}: {worst}");
}

#[test]
fn states_in_half_precision_stay_within_their_tolerance() {
    check_f16_states("reference", reference(Activations::F32));
    check_f16_states("fast", fast(Activations::F32));
}

/// KL divergence of two rows of logits, nats.
fn divergence(from: &[f32], to: &[f32]) -> f64 {
    let (from_lse, to_lse) = (logsumexp(from), logsumexp(to));
    from.iter()
        .zip(to)
        .map(|(p, q)| {
            let log_p = f64::from(*p) - from_lse;
            log_p.exp() * (log_p - (f64::from(*q) - to_lse))
        })
        .sum()
}

fn check_bf16<D: Device>(device: D, kv_type: KvType, state_type: StateType) {
    let golden = Golden::open("golden/trunk.safetensors");
    // Codes add what they add in f32, see `check_int8_kv`.
    let most_divergence = if kv_type == KvType::Int8 { 1.2e-3 } else { 5e-4 };
    let mut model = tiny_with_states(device, Quantize::None, kv_type, state_type);
    for name in ["n65", "n130", "n700"] {
        let ids = golden.ints(&format!("{name}.ids"));
        let mut sequence = Sequence::default();
        let logits = prefill(&mut model, &mut sequence, ids, MAX_ROWS);
        let top_ids = golden.ints(&format!("{name}.top_ids"));
        // Two yardsticks: the exact model, and the reference implementation's own bfloat16.
        for kind in ["top_logits", "bf16_at_top"] {
            let expected = golden.floats(&format!("{name}.{kind}"));
            let differences: Vec<f32> = top_ids
                .iter()
                .zip(expected)
                .enumerate()
                .map(|(at, (id, want))| (logits[at / LAST_KEPT_TOP][*id as usize] - want).abs())
                .collect();
            let worst = differences.iter().copied().fold(0.0, f32::max);
            let mean = differences.iter().sum::<f32>() / differences.len() as f32;
            println!("{name} bf16 against {kind}: worst {worst:.4}, mean {mean:.5}");
            assert!(worst <= 0.5 && mean <= 0.04, "{name} against {kind}: worst {worst}, mean {mean}");
        }
        let last = logits.last().unwrap();
        let exact = golden.floats(&format!("{name}.last_logits"));
        assert_close(name, last, exact, 0.5);
        assert_close(name, last, golden.floats(&format!("{name}.bf16_last_logits")), 0.5);
        assert!(divergence(exact, last) <= most_divergence, "{name}: divergence {}", divergence(exact, last));
        if golden.has(&format!("{name}.logits")) {
            let exact = rows_of(golden.floats(&format!("{name}.logits")), ids.len());
            let mean =
                exact.iter().zip(&logits).map(|(p, q)| divergence(p, q)).sum::<f64>() / ids.len() as f64;
            println!("{name} bf16: mean divergence {mean:.2e} nats");
            assert!(mean <= most_divergence, "{name}: mean divergence {mean}");
        }
        check_bf16_greedy(&mut model, &mut sequence, &golden, name, last.clone());
    }
}

/// Feeds the reference's tokens and compares the choice wherever the margin is wide.
fn check_bf16_greedy<D: Device>(
    model: &mut Model<D>,
    sequence: &mut Sequence,
    golden: &Golden,
    name: &str,
    mut logits: Vec<f32>,
) {
    let margins = golden.floats(&format!("{name}.greedy_margin"));
    for (step, want) in golden.ints(&format!("{name}.greedy_ids")).iter().enumerate() {
        if margins[step] > 0.5 {
            assert_eq!(argmax(&logits), *want, "{name} bf16 greedy {step}");
        }
        logits = sequence.decode(model, *want);
    }
}

#[test]
fn bfloat16_stays_within_its_tolerance_on_the_reference_device() {
    check_bf16(reference(Activations::Bf16), KvType::Bf16, StateType::F32);
}

#[test]
fn bfloat16_stays_within_its_tolerance_on_the_fast_device() {
    check_bf16(fast(Activations::Bf16), KvType::Bf16, StateType::F16);
}

#[test]
fn bfloat16_with_int8_keys_and_values_stays_within_its_tolerance_on_the_fast_device() {
    check_bf16(fast(Activations::Bf16), KvType::Int8, StateType::F32);
}

#[test]
fn bfloat16_stays_within_its_tolerance_on_the_gpu() {
    for state_type in [StateType::F32, StateType::F16] {
        if let Some(device) = gpu() {
            check_bf16(device, KvType::Bf16, state_type);
        }
    }
}

#[test]
fn bfloat16_with_int8_keys_and_values_stays_within_its_tolerance_on_the_gpu() {
    if let Some(device) = gpu() {
        check_bf16(device, KvType::Int8, StateType::F32);
    }
}

/// The rows of a verify give the bits of plain steps, alone or beside another sequence.
#[test]
fn a_verify_on_the_gpu_has_the_bits_of_plain_steps() {
    let Some(device) = gpu() else { return };
    let golden = Golden::open("golden/trunk.safetensors");
    let mut model = tiny(device, Quantize::Int4, KvType::Bf16);
    let tokens = golden.ints("n65.greedy_ids");
    let mut plain = Sequence::default();
    prefill(&mut model, &mut plain, golden.ints("n65.ids"), MAX_ROWS);
    let steps: Vec<Vec<f32>> = tokens[..48].iter().map(|token| plain.decode(&mut model, *token)).collect();
    let mut rounds = Sequence::default();
    prefill(&mut model, &mut rounds, golden.ints("n65.ids"), MAX_ROWS);
    let mut done = 0;
    for width in [3, 1, 7, 16, 5, 16] {
        let width = width.min(rounds.ring_room()).min(48 - done);
        let logits = rounds.verify(&mut model, &tokens[done..done + width]);
        for (row, logits) in logits.iter().enumerate() {
            assert!(*logits == steps[done + row], "step {} in a round of {width}", done + row);
        }
        rounds.commit(width);
        done += width;
    }
    assert_eq!(done, 48);
}

/// Rounds of one and of several rows: replayed, and op by op (a device that measures its ops does not replay).
#[test]
fn a_replayed_round_on_the_gpu_has_the_bits_of_its_ops() {
    let Some(device) = gpu() else { return };
    let golden = Golden::open("golden/trunk.safetensors");
    let mut model = tiny(device, Quantize::Int4, KvType::Bf16);
    let tokens = golden.ints("n65.greedy_ids");
    let mut run = |measured: bool| {
        if measured {
            model.device().start_measuring();
        }
        let before = model.device().activity();
        let mut sequence = Sequence::default();
        let mut logits = prefill(&mut model, &mut sequence, golden.ints("n65.ids"), MAX_ROWS);
        let mut done = 0;
        // The ring is full before the last one, which folds it.
        for width in [1, 2, 5, 8, 1, 11, 3, 1, 4] {
            logits.extend(sequence.verify(&mut model, &tokens[done..done + width]));
            sequence.commit(width);
            done += width;
        }
        let replays = model.device().activity().replays - before.replays;
        model.device().stop_measuring();
        (logits, replays)
    };
    let (by_op, none) = run(true);
    let (replayed, rounds) = run(false);
    assert_eq!((none, rounds), (0, 9));
    assert!(by_op == replayed);
}

/// Prompts, rounds of every size up to the slots' and sampling, all after the model was loaded.
#[test]
fn steps_on_the_gpu_take_no_memory_load_no_code_and_never_block_on_a_copy() {
    let Some(device) = gpu() else { return };
    let golden = Golden::open("golden/trunk.safetensors");
    let mut model = tiny(device, Quantize::Int8, KvType::Int8);
    let vocab = model.geometry().vocab;
    let loaded = model.device().activity();
    let mut sequence = Sequence::default();
    model.clear_slot(1).unwrap();
    let prompt = sequence.prefill_batch(golden.ints("n130.ids"));
    model.forward(&prompt, &[prompt.rows() - 1]).unwrap();
    let mut token = model.sample(&[SampleRow::greedy(0, vocab)]).unwrap()[0].token;
    for _ in 0..40 {
        let batch = sequence.round_batch(&[token]);
        model.forward(&batch, &[0]).unwrap();
        sequence.commit(1);
        let row =
            SampleRow { temperature: 0.8, top_p: 0.9, top_logprobs: Some(5), ..SampleRow::greedy(0, vocab) };
        token = model.sample(&[row]).unwrap()[0].token;
    }
    let served = model.device().activity();
    assert_eq!(served.replays - loaded.replays, 40);
    let kept = |activity: Activity| (activity.allocations, activity.loads, activity.blocking_reads);
    assert_eq!(kept(served), kept(loaded));
}

/// Greedy answers to chat prompts, stopping at a stop token.
fn check_behaviour<D: Device>(device: D) {
    let text = std::fs::read_to_string(common::repository("golden/behaviour.jsonl")).unwrap();
    let stops: Vec<u64> = json("models/tiny/generation_config.json")["eos_token_id"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap())
        .collect();
    let mut model = tiny(device, Quantize::None, KvType::F32);
    for line in text.lines() {
        let case: serde_json::Value = serde_json::from_str(line).unwrap();
        let numbers = |key: &str| -> Vec<u32> {
            case[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let mut sequence = Sequence::default();
        let mut logits = prefill(&mut model, &mut sequence, &numbers("prompt_ids"), MAX_ROWS).pop().unwrap();
        let (expected, mut found) = (numbers("ids"), Vec::new());
        while found.len() < expected.len() {
            let token = argmax(&logits);
            found.push(token);
            if stops.contains(&u64::from(token)) {
                break;
            }
            logits = sequence.decode(&mut model, token);
        }
        let margins = case["margins"].as_array().unwrap();
        let near_tie =
            margins.iter().position(|margin| margin.as_f64().unwrap() < 1e-3).unwrap_or(expected.len());
        let compared = near_tie.min(expected.len());
        assert_eq!(found[..compared.min(found.len())], expected[..compared], "{}", case["question"]);
    }
}

#[test]
fn chat_answers_are_the_golden_ones_on_the_reference_device() {
    check_behaviour(reference(Activations::F32));
}

#[test]
fn chat_answers_are_the_golden_ones_on_the_fast_device() {
    check_behaviour(fast(Activations::F32));
}
