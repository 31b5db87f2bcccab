//! The sampler's rules one by one.

use qwill_device::{SampleRow, ScoreRow};

use crate::reference::{sample_row, score_row};

fn row(vocab: usize) -> SampleRow<'static> {
    SampleRow { temperature: 1.0, ..SampleRow::greedy(0, vocab) }
}

/// How often each token is drawn over positions `0..draws`.
fn counts(logits: &[f32], row: &SampleRow<'_>, draws: u64) -> Vec<u64> {
    let mut counts = vec![0; logits.len()];
    for position in 0..draws {
        counts[sample_row(logits, &SampleRow { position, ..row.clone() }).token as usize] += 1;
    }
    counts
}

/// Tokens that are ever drawn.
fn drawn(logits: &[f32], row: &SampleRow<'_>) -> Vec<u32> {
    let counts = counts(logits, row, 4000);
    (0..).zip(counts).filter(|(_, count)| *count > 0).map(|(token, _)| token).collect()
}

/// The 0.99 quantile of the chi-square distribution with 15 degrees of freedom, as tabulated.
const CHI_SQUARE_15_99: f64 = 30.578;

fn chi_square(counts: &[u64], weights: &[f64]) -> f64 {
    let (draws, total) = (counts.iter().sum::<u64>() as f64, weights.iter().sum::<f64>());
    let term = |(count, weight): (&u64, &f64)| {
        let expected = draws * weight / total;
        (*count as f64 - expected).powi(2) / expected
    };
    counts.iter().zip(weights).map(term).sum()
}

#[test]
fn draws_follow_the_softmax() {
    let logits: Vec<f32> = (0..16).map(|i| ((i * 7 % 16) as f32) / 5.0 - 1.0).collect();
    for (temperature, seed) in [(1.0, 11), (0.6, 12), (1.7, 13)] {
        let row = SampleRow { temperature, seed, ..row(16) };
        let weights: Vec<f64> = logits.iter().map(|logit| f64::from(logit / temperature).exp()).collect();
        let statistic = chi_square(&counts(&logits, &row, 200_000), &weights);
        assert!(statistic < CHI_SQUARE_15_99, "temperature {temperature}: {statistic}");
        // The statistic is sharp enough to see another temperature.
        let other: Vec<f64> =
            logits.iter().map(|logit| f64::from(logit / (temperature * 1.05)).exp()).collect();
        assert!(chi_square(&counts(&logits, &row, 200_000), &other) > CHI_SQUARE_15_99);
    }
}

#[test]
fn greedy_takes_the_smallest_of_equal_ids_and_stays_below_the_limit() {
    let logits = [1.0, 3.0, 3.0, -1.0, 9.0];
    assert_eq!(sample_row(&logits, &SampleRow::greedy(0, 4)).token, 1);
    assert_eq!(sample_row(&logits, &SampleRow::greedy(0, 5)).token, 4);
    assert_eq!(sample_row(&[0.0, -0.0, -1.0], &SampleRow::greedy(0, 3)).token, 0);
    assert_eq!(sample_row(&[-0.0, 0.0, -1.0], &SampleRow::greedy(0, 3)).token, 0);
    for temperature in [f32::MIN_POSITIVE / 4.0, -1.0, f32::NAN] {
        assert_eq!(sample_row(&logits, &SampleRow { temperature, ..row(4) }).token, 1, "{temperature}");
    }
}

#[test]
fn a_draw_depends_on_seed_and_position_only() {
    let logits: Vec<f32> = (0..64).map(|i| (i % 3) as f32).collect();
    let draw = |seed, position, logits_row| {
        sample_row(&logits, &SampleRow { seed, position, logits_row, ..row(64) }).token
    };
    assert_eq!(draw(1, 5, 0), draw(1, 5, 3));
    let differing = |count: &dyn Fn(u64) -> bool| (0..200).filter(|i| count(*i)).count();
    assert!(differing(&|i| draw(1, i, 0) != draw(2, i, 0)) > 150);
    assert!(differing(&|i| draw(i, 1, 0) != draw(i, 2, 0)) > 150);
}

#[test]
fn top_k_keeps_the_smaller_id_of_equal_logits() {
    let logits = [0.0, 1.0, 2.0, 1.0, 1.0];
    assert_eq!(drawn(&logits, &SampleRow { top_k: 2, ..row(5) }), [1, 2]);
    assert_eq!(drawn(&logits, &SampleRow { top_k: 1, ..row(5) }), [2]);
    assert_eq!(drawn(&logits, &SampleRow { top_k: 99, ..row(5) }), [0, 1, 2, 3, 4]);
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_the_mass() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits = [0.125f32.ln(), 0.5f32.ln(), 0.25f32.ln(), 0.125f32.ln()];
    let kept = |top_p| drawn(&logits, &SampleRow { top_p, ..row(4) });
    assert_eq!(kept(0.0), [1]);
    assert_eq!(kept(0.45), [1]);
    assert_eq!(kept(0.55), [1, 2]);
    assert_eq!(kept(0.8), [0, 1, 2]);
    assert_eq!(kept(0.95), [0, 1, 2, 3]);
    // After top-k, the mass is that of what is left: 2/3 and 1/3.
    assert_eq!(drawn(&logits, &SampleRow { top_p: 0.6, top_k: 2, ..row(4) }), [1]);
    assert_eq!(drawn(&logits, &SampleRow { top_p: 0.7, top_k: 2, ..row(4) }), [1, 2]);
}

#[test]
fn min_p_is_relative_to_the_most_likely_and_comes_after_the_temperature() {
    let logits = [0.0, -1.0, -2.0, -3.0];
    assert_eq!(drawn(&logits, &SampleRow { min_p: 0.3, ..row(4) }), [0, 1]);
    assert_eq!(drawn(&logits, &SampleRow { min_p: 0.3, temperature: 2.0, ..row(4) }), [0, 1, 2]);
    assert_eq!(drawn(&logits, &SampleRow { min_p: 1.0, ..row(4) }), [0]);
}

#[test]
fn penalties_hit_what_was_seen() {
    let greedy = |logits: &[f32], row: SampleRow<'_>| sample_row(logits, &row).token;
    let base = || SampleRow::greedy(0, 3);
    let logits = [2.0, 1.9, -5.0];
    // Prompt-only tokens feel the repetition penalty, not the other two.
    assert_eq!(greedy(&logits, SampleRow { seen: &[(0, 0)], repetition_penalty: 1.2, ..base() }), 1);
    assert_eq!(greedy(&logits, SampleRow { seen: &[(0, 0)], presence_penalty: 1.0, ..base() }), 0);
    assert_eq!(greedy(&logits, SampleRow { seen: &[(0, 0)], frequency_penalty: 1.0, ..base() }), 0);
    assert_eq!(greedy(&logits, SampleRow { seen: &[(0, 1)], presence_penalty: 0.2, ..base() }), 1);
    // Frequency counts, presence does not.
    let often = |presence_penalty, frequency_penalty| {
        greedy(&logits, SampleRow { seen: &[(0, 3), (1, 1)], presence_penalty, frequency_penalty, ..base() })
    };
    assert_eq!(often(1.0, 0.0), 0);
    assert_eq!(often(0.0, 0.1), 1);
    // A negative logit grows more negative.
    let negative = [-1.0, -1.1, -9.0];
    assert_eq!(greedy(&negative, SampleRow { seen: &[(0, 1)], repetition_penalty: 1.5, ..base() }), 1);
}

#[test]
fn bias_and_bans_decide_and_something_is_always_drawn() {
    let logits = [5.0, 4.0, 3.0];
    let greedy = |row: SampleRow<'_>| sample_row(&logits, &row).token;
    let base = || SampleRow::greedy(0, 3);
    assert_eq!(greedy(SampleRow { bias: &[(2, 10.0)], ..base() }), 2);
    assert_eq!(greedy(SampleRow { bias: &[(0, -100.0), (7, 50.0)], ..base() }), 1);
    assert_eq!(greedy(SampleRow { banned: &[0], ..base() }), 1);
    assert_eq!(greedy(SampleRow { banned: &[0, 1], bias: &[(2, f32::NEG_INFINITY)], ..base() }), 2);
    assert_eq!(greedy(SampleRow { banned: &[0, 1, 2], ..base() }), 0);
    assert_eq!(greedy(SampleRow { banned: &[0, 1, 2], temperature: 1.0, ..base() }), 0);
    assert_eq!(drawn(&logits, &SampleRow { banned: &[0], ..row(3) }), [1, 2]);
}

#[test]
fn nothing_outside_the_mask_is_ever_drawn() {
    let logits = [5.0, 1.0, 2.0, f32::NEG_INFINITY];
    assert_eq!(drawn(&logits, &SampleRow { mask: Some(&[0b1110]), ..row(4) }), [1, 2]);
    assert_eq!(drawn(&logits, &SampleRow { mask: Some(&[0b0010]), bias: &[(0, 99.0)], ..row(4) }), [1]);
    let all_banned = SampleRow { mask: Some(&[0b0110]), banned: &[0, 1, 2, 3], ..row(4) };
    assert_eq!(drawn(&logits, &all_banned), [2], "the mask counts more than banned ids");
    assert_eq!(drawn(&logits, &SampleRow { mask: Some(&[0b1000]), ..row(4) }), [3], "not even for one at −∞");
    let reported = sample_row(&logits, &SampleRow { mask: Some(&[0b0010]), top_logprobs: Some(1), ..row(4) });
    assert_eq!((reported.token, reported.top[0].0), (1, 0), "log-probabilities know no mask");
}

#[test]
fn logits_that_are_no_distribution_draw_nothing() {
    let (nan, infinite, never) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let unsound: [&[f32]; 7] = [
        &[nan, 1.0, never, 0.5],
        &[0.0, infinite, 1.0, 0.0],
        &[nan; 4],
        &[never; 4],
        &[infinite; 4],
        &[1.0, 2.0, 3.0, -nan],
        &[],
    ];
    let score = ScoreRow { logits_row: 0, token: 1, vocab_limit: 4, top_logprobs: 2 };
    for logits in unsound {
        for row in [
            SampleRow::greedy(0, 4),
            row(4),
            SampleRow { top_k: 3, top_p: 0.99, min_p: 0.01, top_logprobs: Some(2), ..row(4) },
            // Not even where the token in question may not be drawn.
            SampleRow { mask: Some(&[0b0010]), banned: &[0, 3], ..row(4) },
        ] {
            let drawn = sample_row(logits, &row);
            assert!(
                !drawn.is_sound() && drawn.logprob.is_nan() && drawn.top.is_empty(),
                "{logits:?} {drawn:?}"
            );
        }
        assert!(!score_row(logits, &score).is_sound(), "{logits:?}");
    }
    // What lies behind the limit does not count, nor do tokens that cannot come.
    let sound = [never, 1.0, f32::MIN, 0.5, nan, infinite];
    assert_eq!(drawn(&sound, &row(4)), [1, 3]);
    assert!(score_row(&sound, &score).is_sound());
    let reported = sample_row(&sound, &SampleRow { top_logprobs: Some(4), ..row(4) });
    assert_eq!(reported.top[3], (0, never));
}

#[test]
fn log_probabilities_are_of_the_raw_distribution_below_the_limit() {
    let logits = [1.0, 2.0, 2.0, -3.0, 50.0];
    let total: f64 = logits[..4].iter().map(|logit| f64::from(*logit).exp()).sum();
    let expected = |token: usize| (f64::from(logits[token]) - total.ln()) as f32;
    let sampled = sample_row(
        &logits,
        &SampleRow { top_logprobs: Some(9), bias: &[(3, 99.0)], temperature: 0.1, ..row(4) },
    );
    assert_eq!(sampled.token, 3);
    assert!((sampled.logprob - expected(3)).abs() < 1e-6);
    let ids: Vec<u32> = sampled.top.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, [1, 2, 0, 3]);
    for (id, logprob) in &sampled.top {
        assert!((logprob - expected(*id as usize)).abs() < 1e-6, "{id}");
    }
    assert!(sample_row(&logits, &row(4)).logprob.is_nan());
    assert!(sample_row(&logits, &SampleRow { top_logprobs: Some(0), ..row(4) }).top.is_empty());

    let score =
        |token| score_row(&logits, &ScoreRow { logits_row: 0, token, vocab_limit: 4, top_logprobs: 1 });
    assert!((score(0).logprob - expected(0)).abs() < 1e-6);
    assert_eq!(score(0).top.first().map(|(id, _)| *id), Some(1));
    assert_eq!(score(4).logprob, f32::NEG_INFINITY);
    assert_eq!(score(4_000_000).logprob, f32::NEG_INFINITY);
}
