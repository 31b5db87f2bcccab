//! Draws equal to the reference's, token for token and bit for bit, over vocabularies that are cut into blocks.

use super::*;
use crate::fast::Isa;
use crate::fast::scratch::Scratch;
use crate::reference::{sample_row, score_row};

fn random_logits(vocab: usize, seed: u64, spread: f32) -> Vec<f32> {
    let noise = Noise::new(seed, 1);
    (0..vocab as u32).map(|token| (noise.bits(token) as f32 / 16_777_216.0 - 0.5) * spread).collect()
}

fn rows(vocab: usize) -> Vec<SampleRow<'static>> {
    let mut rows = Vec::new();
    for temperature in [0.0, 0.3, 1.0, 2.5, f32::NAN] {
        for (top_k, top_p, min_p) in [
            (0, 1.0, 0.0),
            (1, 1.0, 0.0),
            (20, 0.95, 0.0),
            (50, 1.0, 0.05),
            (0, 0.9, 0.0),
            (0, 0.0, 0.0),
            (0, 0.999, 0.0),
            (0, 1.0, 0.2),
            (0, 0.5, 1e-6),
            (vocab, 0.8, 0.0),
        ] {
            let plain = SampleRow::greedy(0, vocab - 7);
            rows.push(SampleRow { temperature, top_k, top_p, min_p, seed: 3, position: 77, ..plain });
        }
    }
    let touched = SampleRow {
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        repetition_penalty: 1.3,
        seen: &[(0, 0), (3, 2), (100, 1), (1_000_000, 4)],
        bias: &[(5, 3.0), (6, f32::NAN), (9, -100.0)],
        banned: &[1, 2, 5, 40_000],
        top_logprobs: Some(20),
        temperature: 0.8,
        ..SampleRow::greedy(0, vocab)
    };
    rows.push(touched.clone());
    rows.push(SampleRow { temperature: 0.0, ..touched.clone() });
    for mask in [&[0x1234_5678, u32::MAX, 0, 1][..], &[8]] {
        rows.push(SampleRow { mask: Some(mask), ..touched.clone() });
        rows.push(SampleRow { mask: Some(mask), temperature: 1.0, ..SampleRow::greedy(0, vocab) });
    }
    rows
}

fn same(found: &Sampled, expected: &Sampled, row: &SampleRow<'_>) {
    assert_eq!(found.token, expected.token, "{row:?}");
    assert_eq!(found.top, expected.top, "{row:?}");
    assert_eq!(found.logprob.to_bits(), expected.logprob.to_bits(), "{row:?}");
}

#[test]
fn draws_and_logprobs_equal_the_reference() {
    for (vocab, spread) in [(9, 4.0), (500, 1e-3), (5_003, 12.0), (5_003, 60.0), (40_000, 3.0)] {
        let mut logits = random_logits(vocab, vocab as u64, spread);
        logits[vocab - 1] = 99.0;
        logits[4] = f32::MIN;
        logits[7] = f32::NEG_INFINITY;
        let buffer = Buffer { cols: vocab, data: logits.clone() };
        for isa in Isa::available() {
            let mut pool = Pool::new(2).unwrap();
            let how = (Level::new(isa).unwrap(), &mut pool, &Scratch::new(2).workers);
            let rows = rows(vocab);
            for (found, row) in sample(how, &buffer, &rows).iter().zip(&rows) {
                same(found, &sample_row(&logits, row), row);
            }
            for row in rows {
                let how = (Level::new(isa).unwrap(), &mut pool, &Scratch::new(2).workers);
                let alone = sample(how, &buffer, std::slice::from_ref(&row));
                same(&alone[0], &sample_row(&logits, &row), &row);
            }
        }
    }
}

#[test]
fn many_draws_without_filters_equal_the_reference() {
    let vocab = 3_000;
    for spread in [0.0, 2.0, 20.0, 4_000.0] {
        let logits = random_logits(vocab, 11, spread);
        let buffer = Buffer { cols: vocab, data: logits.clone() };
        let draw =
            |position| SampleRow { temperature: 1.1, seed: 5, position, ..SampleRow::greedy(0, vocab) };
        let rows: Vec<SampleRow<'_>> = (0..300).map(draw).collect();
        for isa in Isa::available() {
            let how = (Level::new(isa).unwrap(), &mut Pool::new(1).unwrap(), &Scratch::new(1).workers);
            for (found, row) in sample(how, &buffer, &rows).iter().zip(&rows) {
                same(found, &sample_row(&logits, row), row);
            }
        }
    }
}

#[test]
fn scores_equal_the_reference_where_few_tokens_are_likely() {
    let mut logits = vec![f32::NEG_INFINITY; 70];
    (logits[3], logits[50], logits[20]) = (1.0, 1.0, f32::MIN);
    let buffer = Buffer { cols: 70, data: logits.clone() };
    let row = |token, top_logprobs| ScoreRow { logits_row: 0, token, vocab_limit: 70, top_logprobs };
    let rows = [row(3, 0), row(4, 5), row(69, 70), row(1000, 1)];
    for isa in Isa::available() {
        let how = (Level::new(isa).unwrap(), &mut Pool::new(2).unwrap(), &Scratch::new(2).workers);
        let found = score(how, &buffer, &rows);
        for (found, row) in found.iter().zip(&rows) {
            let expected = score_row(&logits, row);
            assert_eq!((found.token, &found.top), (expected.token, &expected.top));
            assert_eq!(found.logprob.to_bits(), expected.logprob.to_bits());
        }
    }
}

#[test]
fn logits_that_are_no_distribution_are_found_wherever_they_break() {
    for vocab in [1, 7, 16, 50, 131] {
        for isa in Isa::available() {
            let level = Level::new(isa).unwrap();
            let holds =
                |logits: &[f32], sound| assert_eq!(simd::is_sound(level, logits), sound, "{logits:?}");
            let logits = random_logits(vocab, 5, 8.0);
            holds(&logits, true);
            holds(&vec![f32::MIN; vocab], true);
            holds(&vec![f32::NEG_INFINITY; vocab], false);
            for at in 0..vocab {
                let with = |value| {
                    let mut logits = logits.clone();
                    logits[at] = value;
                    logits
                };
                for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
                    holds(&with(bad), false);
                }
                holds(&with(f32::NEG_INFINITY), vocab > 1);
                holds(&with(f32::MAX), true);
                let mut only = vec![f32::NEG_INFINITY; vocab];
                only[at] = f32::MIN;
                holds(&only, true);
            }
        }
    }
}

#[test]
fn the_hash_is_the_one_behind_the_noise() {
    for (seed, position, token) in [(0, 0, 0), (7, 123, 248_000), (u64::MAX, 1 << 40, 5)] {
        let uniform = (f64::from(Noise::new(seed, position).bits(token)) + 0.5) / 16_777_216.0;
        assert_eq!((-(-uniform.ln()).ln()) as f32, gumbel(seed, position, token));
    }
}
