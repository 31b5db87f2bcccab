//! Draws follow the model's distribution, one at a time and with drafts, on the devices' own samplers.
//!
//! The model is a table: what follows a token depends on that token alone. So every draw has exact probabilities, and
//! a round of drafts can be drawn without computing anything.

use qwill_cpu::fast::CpuOptions;
use qwill_cpu::{CpuDevice, ReferenceDevice};
use qwill_device::sample::gumbel;
use qwill_device::{Activations, Device, Precision, SampleRow};

use crate::sequence::{EndRule, Sequence};

const VOCAB: usize = 12;
const SEQUENCES: usize = 50;
const TOKENS: usize = 4000;

/// Logits by token before; `salt` makes another table.
fn table(salt: u64) -> Vec<Vec<f32>> {
    let row = |before| (0..VOCAB).map(|token| 0.9 * gumbel(salt, before, token as u32)).collect();
    (0..VOCAB as u64).map(row).collect()
}

/// Exact probabilities after a token at temperature 1.
fn probabilities(logits: &[f32], top_k: usize, top_p: f64) -> Vec<f64> {
    let weights: Vec<f64> = logits.iter().map(|logit| f64::from(*logit).exp()).collect();
    let mut order: Vec<usize> = (0..VOCAB).collect();
    order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]));
    order.truncate(if top_k == 0 { VOCAB } else { top_k });
    let total: f64 = order.iter().map(|token| weights[*token]).sum();
    let mut mass = 0.0;
    let kept = order.iter().take_while(|token| {
        let wanted = mass < top_p * total;
        mass += weights[**token];
        wanted
    });
    let kept: Vec<usize> = kept.copied().collect();
    let total: f64 = kept.iter().map(|token| weights[*token]).sum();
    (0..VOCAB).map(|token| if kept.contains(&token) { weights[token] / total } else { 0.0 }).collect()
}

/// The tokens of all sequences, and how many drafts were accepted. Drafts are drawn with the same noise from a table
/// that is half the model's.
fn generate<D: Device>(device: &mut D, top_k: usize, top_p: f32, drafts: usize) -> (Vec<Vec<u32>>, usize) {
    let (model, other) = (table(1), table(2));
    let mut logits = device.buffer(VOCAB, VOCAB, Precision::Full).unwrap();
    device.write(&mut logits, &model.concat()).unwrap();
    let draft = |before: u32, seed: u64, position: u64| {
        let score = |token: &u32| {
            let (before, at) = (before as usize, *token as usize);
            0.5 * (model[before][at] + other[before][at]) + gumbel(seed, position, *token)
        };
        (0..VOCAB as u32).max_by(|a, b| score(a).total_cmp(&score(b))).unwrap()
    };
    let rule = EndRule { stop_ids: vec![], min_tokens: 0, new_tokens: TOKENS, vocab_limit: VOCAB };
    let sequence = |seed: u64| Sequence { pending: vec![0], position: 5, seed, ..Sequence::default() };
    let mut sequences: Vec<Sequence> = (0..SEQUENCES as u64).map(sequence).collect();
    let mut texts = vec![Vec::new(); SEQUENCES];
    let mut accepted = 0;
    while sequences.iter().any(|sequence| sequence.generated() < TOKENS) {
        let mut rows = Vec::new();
        for sequence in &mut sequences {
            let most = sequence.max_round_rows(&rule);
            let mut before = sequence.pending[0];
            for at in 0..(drafts + 1).min(most) {
                let (seed, position) = (sequence.seed, sequence.draw_position(at));
                let row = SampleRow {
                    temperature: 1.0,
                    top_k,
                    top_p,
                    seed,
                    position,
                    ..SampleRow::greedy(before as usize, VOCAB)
                };
                rows.push(row);
                before = draft(before, seed, position);
                sequence.drafts.push(before);
            }
            // The last one has no row that would verify it.
            sequence.drafts.pop();
        }
        let mut drawn = device.sample(&logits, &rows).unwrap().into_iter().map(|sampled| sampled.token);
        for (sequence, text) in sequences.iter_mut().zip(&mut texts) {
            let rows = if sequence.generated() < TOKENS { sequence.drafts.len() + 1 } else { 0 };
            let drawn: Vec<u32> = drawn.by_ref().take(rows).collect();
            let before = sequence.generated();
            sequence.accept(&drawn, &rule);
            let taken = sequence.generated() - before;
            accepted += taken.saturating_sub(1);
            text.extend(&drawn[..taken]);
        }
    }
    (texts, accepted)
}

/// The chi-square statistic of all transitions and its degrees of freedom.
fn chi_square(texts: &[Vec<u32>], top_k: usize, top_p: f64) -> (f64, usize) {
    let mut counts = vec![vec![0.0; VOCAB]; VOCAB];
    for text in texts {
        for (before, token) in [0].iter().chain(text).zip(text) {
            counts[*before as usize][*token as usize] += 1.0;
        }
    }
    let (mut statistic, mut freedom) = (0.0, 0);
    for (logits, counts) in table(1).iter().zip(&counts) {
        let visits: f64 = counts.iter().sum();
        let probabilities = probabilities(logits, top_k, top_p);
        for (count, probability) in counts.iter().zip(&probabilities) {
            if *probability > 0.0 {
                statistic += (count - visits * probability).powi(2) / (visits * probability);
            } else {
                assert_eq!(*count, 0.0, "a token that was cut");
            }
        }
        freedom += probabilities.iter().filter(|probability| **probability > 0.0).count() - 1;
    }
    (statistic, freedom)
}

/// What the statistic exceeds once in a hundred times (Wilson and Hilferty 1931; within 0.1 % here).
fn one_percent(freedom: usize) -> f64 {
    let share = 2.0 / (9.0 * freedom as f64);
    freedom as f64 * (1.0 - share + 2.326_348 * share.sqrt()).powi(3)
}

fn check<D: Device>(mut device: D) {
    for (top_k, top_p) in [(0, 1.0), (8, 0.9)] {
        let (plain, none) = generate(&mut device, top_k, top_p, 0);
        assert_eq!(none, 0);
        let draws: usize = plain.iter().map(Vec::len).sum();
        assert_eq!(draws, 200_000);
        let (statistic, freedom) = chi_square(&plain, top_k, f64::from(top_p));
        println!("top-k {top_k}, top-p {top_p}: chi-square {statistic:.1} at {freedom} degrees of freedom");
        assert!(statistic < one_percent(freedom), "{statistic} at {freedom} degrees of freedom");
        for drafts in [3, 15] {
            let (speculative, accepted) = generate(&mut device, top_k, top_p, drafts);
            assert!(speculative == plain, "{drafts} drafts change the text");
            assert!(accepted > draws / 4, "{drafts} drafts: only {accepted} accepted");
        }
    }
}

#[test]
fn draws_follow_the_distribution_with_and_without_drafts() {
    check(ReferenceDevice::new(Activations::F32));
}

#[test]
fn draws_of_the_fast_device_follow_the_distribution_with_and_without_drafts() {
    check(CpuDevice::new(CpuOptions::new(1, Activations::F32)).unwrap());
}
