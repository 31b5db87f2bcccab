//! Perplexity over the golden windows of WikiText-2, in every numerics mode.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::{MAX_ROWS, Sequence, fast, gpu, json, logsumexp, reference, rows_of, tiny, tiny_with_states};
use qwill_device::{Activations, Device, KvType, StateType};
use qwill_model::Model;
use qwill_weights::Quantize;

struct Window {
    ids: Vec<u32>,
    nll: f64,
    nll_bf16: f64,
}

fn windows() -> Vec<Window> {
    let golden = json("golden/perplexity.json");
    let windows = golden["windows"].as_array().unwrap();
    windows
        .iter()
        .map(|window| Window {
            ids: window["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect(),
            nll: window["nll"].as_f64().unwrap(),
            nll_bf16: window["nll_bf16"].as_f64().unwrap(),
        })
        .collect()
}

/// Negative log-likelihood of all tokens but the first, in f64.
fn nll<D: Device>(model: &mut Model<D>, ids: &[u32]) -> f64 {
    assert!(ids.len() <= MAX_ROWS);
    model.clear_slot(1).unwrap();
    let batch = Sequence::default().prefill_batch(ids);
    let rows: Vec<usize> = (0..ids.len() - 1).collect();
    model.forward(&batch, &rows).unwrap();
    let logits = rows_of(&model.read_logits(rows.len()).unwrap(), rows.len());
    logits.iter().zip(&ids[1..]).map(|(row, next)| logsumexp(row) - f64::from(row[*next as usize])).sum()
}

fn perplexity<D: Device>(model: &mut Model<D>, mut check: impl FnMut(usize, &Window, f64)) -> f64 {
    let (mut total, mut scored) = (0.0, 0);
    for (index, window) in windows().iter().enumerate() {
        let found = nll(model, &window.ids);
        check(index, window, found);
        total += found;
        scored += window.ids.len() - 1;
    }
    assert_eq!(scored, 15_149);
    (total / f64::from(scored as u32)).exp()
}

fn check_f32<D: Device>(name: &str, device: D) {
    let mut model = tiny(device, Quantize::None, KvType::F32);
    let found = perplexity(&mut model, |index, window, nll| {
        assert!((nll / window.nll - 1.0).abs() < 1e-6, "window {index}: {nll}, expected {}", window.nll);
    });
    println!("{name} f32 perplexity {found:.4}");
    assert!((found - 113.684).abs() <= 0.005, "{found}");
}

/// Of a few windows: the reference takes 2.5 s for each, and the fast device, which the suite compares with it, has all.
#[test]
fn f32_likelihoods_are_the_golden_ones_on_the_reference_device() {
    let mut model = tiny(reference(Activations::F32), Quantize::None, KvType::F32);
    for (index, window) in windows().iter().enumerate().take(4) {
        let found = nll(&mut model, &window.ids);
        assert!((found / window.nll - 1.0).abs() < 1e-6, "window {index}: {found}, expected {}", window.nll);
    }
}

#[test]
fn f32_perplexity_is_the_golden_one_on_the_fast_device() {
    check_f32("fast", fast(Activations::F32));
}

/// int8 keys and values alone, everything else in f32: what they cost.
fn check_int8_kv<D: Device>(name: &str, device: D) {
    let mut model = tiny(device, Quantize::None, KvType::Int8);
    let found = perplexity(&mut model, |index, window, nll| {
        assert!((nll / window.nll - 1.0).abs() < 3e-3, "window {index}: {nll}, expected {}", window.nll);
    });
    println!("{name} int8 KV perplexity {found:.4}");
    // Measured: 113.676.
    assert!((found - 113.684).abs() <= 0.05, "{found}");
}

#[test]
fn int8_keys_and_values_hardly_change_the_perplexity() {
    check_int8_kv("fast", fast(Activations::F32));
}

/// As good as f32 states: rounding them moves a window's likelihood far less than bfloat16 activations do.
#[test]
fn perplexity_with_states_in_half_precision_is_the_golden_one() {
    let device = fast(Activations::F32);
    let mut model = tiny_with_states(device, Quantize::None, KvType::F32, StateType::F16);
    let mut worst = 0.0f64;
    let found = perplexity(&mut model, |_, window, nll| worst = worst.max((nll / window.nll - 1.0).abs()));
    println!("f16 states: perplexity {found:.4}, a window's likelihood at most {worst:.1e} off");
    assert!((found - 113.684).abs() <= 0.02 && worst < 2e-4, "{found}, {worst:e}");
}

fn check_bf16<D: Device>(name: &str, device: D) {
    let mut model = tiny(device, Quantize::None, KvType::Bf16);
    let found = perplexity(&mut model, |index, window, nll| {
        // Per window, twice the reference implementation's own distance to f32.
        assert!((nll / window.nll_bf16 - 1.0).abs() < 2e-3, "window {index}: {nll} and {}", window.nll_bf16);
    });
    println!("{name} bf16 perplexity {found:.4}");
    assert!((found - 113.70).abs() <= 0.2, "{found}");
}

#[test]
fn bfloat16_perplexity_is_within_its_tolerance() {
    check_bf16("fast", fast(Activations::Bf16));
}

#[test]
fn bfloat16_perplexity_is_within_its_tolerance_on_the_gpu() {
    if let Some(device) = gpu() {
        check_bf16("gpu", device);
    }
}

/// Perplexity over the first windows as a multiple of the golden one.
fn perplexity_ratio<D: Device>(model: &mut Model<D>, count: usize) -> f64 {
    let (mut difference, mut scored) = (0.0, 0);
    for window in windows().iter().take(count) {
        difference += nll(model, &window.ids) - window.nll;
        scored += window.ids.len() - 1;
    }
    (difference / f64::from(scored as u32)).exp()
}

/// Round-to-nearest weights cost a little; a wrong scale, group or nibble costs a lot. All 40 windows gave 1.0012, 1.0015,
/// 1.035 and 1.036.
#[test]
fn quantised_perplexity_is_close_to_f32() {
    for (quantize, activations, most) in [
        (Quantize::Int8, Activations::F32, 1.01),
        (Quantize::Int8, Activations::Int8, 1.02),
        (Quantize::Int4, Activations::F32, 1.15),
        (Quantize::Int4, Activations::Int8, 1.16),
    ] {
        let mut model = tiny(fast(activations), quantize, KvType::Bf16);
        let ratio = perplexity_ratio(&mut model, 12);
        println!("fast {quantize:?} weights, {} activations: {ratio:.4} of f32", activations.name());
        assert!((0.99..most).contains(&ratio), "{quantize:?} {activations:?}: {ratio}");
    }
}
