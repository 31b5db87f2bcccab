//! The multi-token-prediction module against the reference outputs (see golden/README.md).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::{
    Golden, Sequence, argmax, assert_close, fast, gpu, json, logsumexp, reference, rows_of, tiny,
    worst_difference,
};
use qwill_device::batch::PAGE_TOKENS;
use qwill_device::{Activations, Device, KvType};
use qwill_model::{Model, MtpHidden};
use qwill_weights::Quantize;

const DRAFTS: usize = 4;
const PROMPTS: [&str; 3] = ["n65", "n128", "n700"];
const KEPT_TOP: usize = 32;

/// Prefills the trunk over a prompt; returns the logits of its last row.
fn prefill_trunk<D: Device>(model: &mut Model<D>, sequence: &mut Sequence, ids: &[u32]) -> Vec<f32> {
    model.clear_slot(1).unwrap();
    let batch = sequence.prefill_batch(ids);
    model.forward(&batch, &[ids.len() - 1]).unwrap();
    model.read_logits(1).unwrap()
}

/// Prefills trunk and MTP over a prompt whose next token is known; returns MTP's logits of every row.
fn prefill<D: Device>(
    model: &mut Model<D>,
    sequence: &mut Sequence,
    ids: &[u32],
    next: u32,
) -> Vec<Vec<f32>> {
    prefill_trunk(model, sequence, ids);
    let shifted: Vec<u32> = ids[1..].iter().copied().chain([next]).collect();
    let rows: Vec<usize> = (0..ids.len()).collect();
    sequence.mtp(model, 0, &shifted, MtpHidden::Trunk(&rows))
}

fn check_prompt<D: Device>(model: &mut Model<D>, trunk: &Golden, golden: &Golden, name: &str) {
    let ids = trunk.ints(&format!("{name}.ids"));
    let next = trunk.ints(&format!("{name}.greedy_ids"))[0];
    let mut sequence = Sequence::default();
    assert_eq!(argmax(&prefill_trunk(model, &mut sequence, ids)), next);
    let mut sequence = Sequence::default();
    let logits = prefill(model, &mut sequence, ids, next);
    let hidden = model.read_mtp_hidden(ids.len()).unwrap();
    assert_close(name, &hidden, golden.floats(&format!("{name}.out_hidden")), 3e-4);
    let (top_ids, top) =
        (golden.ints(&format!("{name}.top_ids")), golden.floats(&format!("{name}.top_logits")));
    for (row, logits) in logits.iter().enumerate() {
        let at = row * KEPT_TOP..(row + 1) * KEPT_TOP;
        let found: Vec<f32> = top_ids[at.clone()].iter().map(|id| logits[*id as usize]).collect();
        assert_close(&format!("{name} row {row}"), &found, &top[at], 3e-4);
        let lse = f64::from(golden.floats(&format!("{name}.lse"))[row]);
        assert!((logsumexp(logits) - lse).abs() < 3e-4, "{name} row {row}");
    }
    check_kv(model, &sequence, golden, name, ids.len());
    check_chain(model, &sequence, golden, name, logits.last().unwrap());
}

fn check_kv<D: Device>(
    model: &mut Model<D>,
    sequence: &Sequence,
    golden: &Golden,
    name: &str,
    tokens: usize,
) {
    let kv_layer = model.geometry().attention_layers();
    let columns = model.geometry().attention.kv_columns();
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    let (device, cache) = model.device_and_cache();
    for logical in 0..tokens.div_ceil(PAGE_TOKENS) {
        let page = device.read_page(cache, kv_layer, sequence.page(logical)).unwrap();
        keys.extend(page.keys);
        values.extend(page.values);
    }
    assert_close(name, &keys[..tokens * columns], golden.floats(&format!("{name}.k")), 3e-4);
    assert_close(name, &values[..tokens * columns], golden.floats(&format!("{name}.v")), 3e-4);
}

/// A chain of drafts from the prompt's last row: each step takes the state handed on by the one before.
fn check_chain<D: Device>(
    model: &mut Model<D>,
    sequence: &Sequence,
    golden: &Golden,
    name: &str,
    first: &[f32],
) {
    let expected = rows_of(golden.floats(&format!("{name}.draft_logits")), DRAFTS);
    let states = rows_of(golden.floats(&format!("{name}.draft_hidden")), DRAFTS);
    let mut logits = first.to_vec();
    let mut source = sequence.position - 1;
    for (step, want) in golden.ints(&format!("{name}.draft_ids")).iter().enumerate() {
        assert_close(&format!("{name} draft {step}"), &logits, &expected[step], 3e-4);
        assert_eq!(argmax(&logits), *want, "{name} draft {step}");
        let hidden = model.read_mtp_hidden(source + 1).unwrap();
        let width = states[step].len();
        assert_close(name, &hidden[source * width..], &states[step], 3e-4);
        logits =
            sequence.mtp(model, sequence.position + step, &[*want], MtpHidden::Draft(&[source])).remove(0);
        source = 0;
    }
}

/// Greedy draft-and-verify along the plain greedy continuation of a prompt: accepted drafts of each round. Verifies
/// with real rows, so that rejected rows have been through every cache; the text must still be the plain one.
fn rounds<D: Device>(model: &mut Model<D>, name: &str, ids: &[u32], greedy: &[u32]) -> Vec<usize> {
    let mut sequence = Sequence::default();
    let mut logits = prefill(model, &mut sequence, ids, greedy[0]).pop().unwrap();
    let mut source = ids.len() - 1;
    let mut known = 1; // tokens of `greedy` that are decided; the last has no trunk row yet
    let mut rounds = Vec::new();
    while known + DRAFTS <= greedy.len() {
        let mut drafts = vec![argmax(&logits)];
        while drafts.len() < DRAFTS {
            let position = sequence.position + drafts.len() - 1;
            let token = [drafts[drafts.len() - 1]];
            let row = sequence.mtp(model, position, &token, MtpHidden::Draft(&[source])).remove(0);
            drafts.push(argmax(&row));
            source = 0;
        }
        let round = verify(model, &mut sequence, greedy[known - 1], &drafts);
        rounds.push(round.next.len() - 1);
        let compared = (greedy.len() - known).min(round.next.len());
        assert_eq!(round.next[..compared], greedy[known..known + compared], "{name} round {}", rounds.len());
        known += round.next.len();
        (logits, source) = (round.mtp_logits, round.mtp_row);
    }
    rounds
}

struct Round {
    /// The token after each committed row: the accepted drafts and the trunk's own.
    next: Vec<u32>,
    /// MTP's logits over the last committed row, redone with the trunk's state, and its row.
    mtp_logits: Vec<f32>,
    mtp_row: usize,
}

/// Verifies drafts after `last` and commits what holds. Rows never cross a fold, so a round may take two steps.
fn verify<D: Device>(model: &mut Model<D>, sequence: &mut Sequence, last: u32, drafts: &[u32]) -> Round {
    let tokens: Vec<u32> = [last].iter().chain(drafts).copied().collect();
    let mut round = Round { next: Vec::new(), mtp_logits: Vec::new(), mtp_row: 0 };
    loop {
        let done = round.next.len();
        let rows = (tokens.len() - done).min(sequence.ring_room());
        let logits = sequence.verify(model, &tokens[done..done + rows]);
        let next: Vec<u32> = logits.iter().map(|row| argmax(row)).collect();
        let agree = next.iter().zip(&tokens[done + 1..]).take_while(|(next, draft)| next == draft).count();
        let keep = (agree + 1).min(rows);
        let position = sequence.position;
        sequence.commit(keep);
        let sources: Vec<usize> = (0..keep).collect();
        let redone = sequence.mtp(model, position, &next[..keep], MtpHidden::Trunk(&sources));
        round.next.extend(&next[..keep]);
        (round.mtp_logits, round.mtp_row) = (redone.into_iter().next_back().unwrap(), keep - 1);
        if agree < rows || round.next.len() == tokens.len() {
            return round;
        }
    }
}

fn check_f32<D: Device>(device: D) {
    let (trunk, golden) = (Golden::open("golden/trunk.safetensors"), Golden::open("golden/mtp.safetensors"));
    let mut model = tiny(device, Quantize::None, KvType::F32);
    for name in PROMPTS {
        check_prompt(&mut model, &trunk, &golden, name);
    }
    for (name, expected) in expected_rounds() {
        let (ids, greedy) = (trunk.ints(&format!("{name}.ids")), trunk.ints(&format!("{name}.greedy_ids")));
        assert_eq!(rounds(&mut model, &name, ids, greedy), expected, "{name}");
    }
}

/// Logits within the tolerance of bfloat16. Drafts may flip at near ties, so rounds are compared by their mean length;
/// their text is the device's own greedy one, bit for bit.
fn check_bf16<D: Device>(device: D) {
    let (trunk, golden) = (Golden::open("golden/trunk.safetensors"), Golden::open("golden/mtp.safetensors"));
    let mut model = tiny(device, Quantize::None, KvType::Bf16);
    for name in PROMPTS {
        let next = trunk.ints(&format!("{name}.greedy_ids"))[0];
        let logits = prefill(&mut model, &mut Sequence::default(), trunk.ints(&format!("{name}.ids")), next);
        let ids = golden.ints(&format!("{name}.top_ids"));
        let found: Vec<f32> =
            ids.iter().enumerate().map(|(at, id)| logits[at / KEPT_TOP][*id as usize]).collect();
        let expected = golden.floats(&format!("{name}.top_logits"));
        let mean = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).sum::<f32>() / found.len() as f32;
        println!("{name} bf16: mean {mean:.5}, worst {:.4}", worst_difference(&found, expected));
        assert_close(name, &found, expected, 0.5);
        assert!(mean <= 0.04, "{name}: mean difference {mean}");
    }
    for (name, expected) in expected_rounds() {
        let ids = trunk.ints(&format!("{name}.ids"));
        let greedy = greedy(&mut model, ids, trunk.ints(&format!("{name}.greedy_ids")).len());
        let (found, expected) = (mean(&rounds(&mut model, &name, ids, &greedy)), mean(&expected));
        println!("{name} bf16: {found:.2} drafts accepted a round, {expected:.2} in float32");
        assert!((found - expected).abs() <= 0.3, "{name}: {found} drafts a round, expected {expected}");
    }
}

/// The plain greedy continuation of a prompt.
fn greedy<D: Device>(model: &mut Model<D>, ids: &[u32], tokens: usize) -> Vec<u32> {
    let mut sequence = Sequence::default();
    let mut text = vec![argmax(&prefill_trunk(model, &mut sequence, ids))];
    while text.len() < tokens {
        text.push(argmax(&sequence.decode(model, text[text.len() - 1])));
    }
    text
}

fn mean(rounds: &[usize]) -> f64 {
    rounds.iter().sum::<usize>() as f64 / rounds.len() as f64
}

fn expected_rounds() -> Vec<(String, Vec<usize>)> {
    let meta = json("golden/mtp.json");
    let prompts = meta["prompts"].as_object().unwrap();
    prompts
        .iter()
        .map(|(name, prompt)| {
            let rounds = prompt["rounds"].as_array().unwrap();
            (name.clone(), rounds.iter().map(|n| n.as_u64().unwrap() as usize).collect())
        })
        .collect()
}

#[test]
fn mtp_rows_drafts_and_rounds_are_the_golden_ones_on_the_reference_device() {
    check_f32(reference(Activations::F32));
}

#[test]
fn mtp_rows_drafts_and_rounds_are_the_golden_ones_on_the_fast_device() {
    check_f32(fast(Activations::F32));
}

#[test]
fn bfloat16_drafts_stay_within_their_tolerance_on_the_reference_device() {
    check_bf16(reference(Activations::Bf16));
}

#[test]
fn bfloat16_drafts_stay_within_their_tolerance_on_the_fast_device() {
    check_bf16(fast(Activations::Bf16));
}

#[test]
fn bfloat16_drafts_stay_within_their_tolerance_on_the_gpu() {
    if let Some(device) = gpu() {
        check_bf16(device);
    }
}
