//! Drawing tokens and reporting log-probabilities.

use std::cmp::Ordering;

use qwill_device::sample::{gumbel, is_sound};
use qwill_device::{SampleRow, Sampled, ScoreRow};

/// A token that may be drawn, with its logit after penalties, bias and temperature.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: u32,
    logit: f32,
}

/// Draws one token from a row of logits `[vocab]`.
///
/// The order: mask, repetition penalty (positive logits divided, others multiplied), presence and frequency penalty,
/// bias, banned ids, temperature, min-p, top-k, top-p, then the argmax of `logit / temperature + gumbel`. Ties go
/// to the smaller id everywhere. Only ids below `vocab_limit` and in the mask take part. When nothing is left (all banned or
/// −∞) the largest logit among the ids that are not banned wins, or the largest of all when every id is banned. Logits that
/// are no distribution give [`Sampled::unsound`].
///
/// Probabilities for the filters are f64 softmax values; a temperature of 0, or one so small that the logits
/// overflow, is greedy.
pub fn sample_row(logits: &[f32], row: &SampleRow<'_>) -> Sampled {
    let logits = &logits[..row.vocab_limit.min(logits.len())];
    if !is_sound(logits) {
        return Sampled::unsound();
    }
    let token = draw(logits, row);
    match row.top_logprobs {
        Some(top) => report(logits, token, top),
        None => Sampled { token, logprob: f32::NAN, top: Vec::new() },
    }
}

/// Log-probability of a given token in a row of logits, and the `top_logprobs` most likely ones. A token at or
/// above the limit is no part of the distribution: its log-probability is −∞.
pub fn score_row(logits: &[f32], row: &ScoreRow) -> Sampled {
    let logits = &logits[..row.vocab_limit.min(logits.len())];
    if is_sound(logits) { report(logits, row.token, row.top_logprobs) } else { Sampled::unsound() }
}

fn draw(logits: &[f32], row: &SampleRow<'_>) -> u32 {
    let adjusted = adjust(logits, row);
    let mut candidates: Vec<Candidate> = (0..)
        .zip(&adjusted)
        .filter(|(token, logit)| **logit > f32::NEG_INFINITY && !row.banned.contains(token))
        .filter(|(token, _)| row.is_in_mask(*token))
        .map(|(token, logit)| Candidate { token, logit: *logit })
        .collect();
    let Some(best) = largest(&candidates) else { return fallback(logits, row) };
    // Also true for a NaN temperature.
    let draws = row.temperature > 0.0 && (best.logit / row.temperature).is_finite();
    if !draws {
        return best.token;
    }
    for candidate in &mut candidates {
        candidate.logit /= row.temperature;
    }
    keep_likely(&mut candidates, best.logit / row.temperature, row);
    for candidate in &mut candidates {
        candidate.logit += gumbel(row.seed, row.position, candidate.token);
    }
    largest(&candidates).map_or(best.token, |drawn| drawn.token)
}

/// Logits after penalties and bias; what is no number then (`−∞ · 0`) becomes −∞.
fn adjust(logits: &[f32], row: &SampleRow<'_>) -> Vec<f32> {
    let mut adjusted = logits.to_vec();
    for (token, occurrences) in row.seen {
        let Some(logit) = adjusted.get_mut(*token as usize) else { continue };
        let penalised =
            if *logit > 0.0 { *logit / row.repetition_penalty } else { *logit * row.repetition_penalty };
        *logit = penalised - row.frequency_penalty * *occurrences as f32;
        if *occurrences > 0 {
            *logit -= row.presence_penalty;
        }
        *logit = not_nan(*logit);
    }
    for (token, bias) in row.bias {
        if let Some(logit) = adjusted.get_mut(*token as usize) {
            *logit = not_nan(*logit + bias);
        }
    }
    adjusted
}

fn not_nan(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit }
}

/// The candidate with the largest logit, the smallest id among equals.
fn largest(candidates: &[Candidate]) -> Option<Candidate> {
    candidates.iter().copied().min_by(likelier_first)
}

/// Descending by logit, then ascending by id; 0 and −0 are equal, NaN does not occur.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "sorting passes references")]
fn likelier_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// The token when nothing may be drawn.
fn fallback(logits: &[f32], row: &SampleRow<'_>) -> u32 {
    let all = || {
        let in_mask = (0..).zip(logits).filter(|(token, _)| row.is_in_mask(*token));
        in_mask.map(|(token, logit)| Candidate { token, logit: *logit })
    };
    let allowed: Vec<Candidate> = all().filter(|candidate| !row.banned.contains(&candidate.token)).collect();
    largest(&allowed).or_else(|| largest(&all().collect::<Vec<_>>())).map_or(0, |candidate| candidate.token)
}

/// min-p, top-k and top-p in this order; at least the most likely candidate stays.
fn keep_likely(candidates: &mut Vec<Candidate>, best: f32, row: &SampleRow<'_>) {
    let relative = |candidate: &Candidate| f64::from(candidate.logit - best).exp();
    if row.min_p > 0.0 {
        let least = f64::from(row.min_p.min(1.0));
        candidates.retain(|candidate| relative(candidate) >= least);
    }
    let cuts_k = row.top_k > 0 && row.top_k < candidates.len();
    if !cuts_k && row.top_p >= 1.0 {
        return;
    }
    candidates.sort_unstable_by(likelier_first);
    if cuts_k {
        candidates.truncate(row.top_k);
    }
    if row.top_p < 1.0 {
        let masses: Vec<f64> = candidates.iter().map(relative).collect();
        let wanted = f64::from(row.top_p) * masses.iter().sum::<f64>();
        let mut reached = 0.0;
        let before = masses.iter().take_while(|mass| {
            let open = reached < wanted;
            reached += *mass;
            open
        });
        let kept = before.count().max(1);
        candidates.truncate(kept);
    }
}

/// Log-probabilities of the model's own distribution: f32 logits minus an f64 log-sum-exp, rounded to f32.
fn report(logits: &[f32], token: u32, top: usize) -> Sampled {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let difference = |logit: f32| f64::from(logit) - f64::from(largest);
    let total: f64 = logits.iter().map(|logit| difference(*logit).exp()).sum();
    let log_total = total.ln();
    let logprob = |logit: f32| (difference(logit) - log_total) as f32;
    let of_token = logits.get(token as usize).map_or(f32::NEG_INFINITY, |logit| logprob(*logit));

    let mut ranked: Vec<Candidate> = Vec::new();
    if top > 0 {
        ranked = (0..).zip(logits).map(|(token, logit)| Candidate { token, logit: *logit }).collect();
        if top < ranked.len() {
            ranked.select_nth_unstable_by(top, likelier_first);
            ranked.truncate(top);
        }
        ranked.sort_unstable_by(likelier_first);
    }
    let top = ranked.iter().map(|candidate| (candidate.token, logprob(candidate.logit))).collect();
    Sampled { token, logprob: of_token, top }
}
