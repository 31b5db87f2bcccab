//! Drawing tokens from large vocabularies without sorting them.
//!
//! Same definition as the reference: mask, penalties and bias, banned ids, temperature, min-p, top-k, top-p, then the
//! argmax of `logit / temperature + gumbel`; ties go to the smaller id; logits that are no distribution draw nothing.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::OnceLock;

use qwill_device::sample::gumbel;
use qwill_device::{SampleRow, Sampled, ScoreRow};

use super::pool::Pool;
use super::scratch::Workers;
use super::simd::{self, Level, MAX_LANES, Simd, exp};
use crate::Buffer;

/// A token with its logit, and the logit over the temperature.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    token: u32,
    logit: f32,
    scaled: f32,
}

/// Likelier first: descending by scaled logit, then ascending by id; 0 and −0 are equal, NaN does not occur.
impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_logit = other.scaled.partial_cmp(&self.scaled).unwrap_or(Ordering::Equal);
        by_logit.then(self.token.cmp(&other.token))
    }
}
impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Candidate {}

/// Draws one token for every row.
pub(super) fn sample(
    (level, pool, workers): (Level, &mut Pool, &Workers),
    logits: &Buffer,
    rows: &[SampleRow<'_>],
) -> Vec<Sampled> {
    if let [row] = rows
        && row.top_logprobs.is_none()
    {
        // One sequence alone: all threads look for its token.
        let logits = below_limit(logits.row(row.logits_row), row.vocab_limit);
        if !simd::is_sound(level, logits) {
            return vec![Sampled::unsound()];
        }
        let token = workers.with_candidates(0, logits.len(), |memory, candidates| {
            draw(level, logits, row, (memory, candidates), Some(pool))
        });
        return vec![Sampled { token, logprob: f32::NAN, top: Vec::new() }];
    }
    let drawn: Vec<OnceLock<Sampled>> = rows.iter().map(|_| OnceLock::new()).collect();
    pool.run(rows.len(), &|worker, index| {
        let row = &rows[index];
        let logits = below_limit(logits.row(row.logits_row), row.vocab_limit);
        let sampled = workers.with_candidates(worker, logits.len(), |memory, candidates| {
            if !simd::is_sound(level, logits) {
                return Sampled::unsound();
            }
            let token = draw(level, logits, row, (memory, candidates), None);
            match row.top_logprobs {
                Some(top) => report(level, logits, token, top, candidates),
                None => Sampled { token, logprob: f32::NAN, top: Vec::new() },
            }
        });
        // Every piece runs once.
        let _ = drawn[index].set(sampled);
    });
    drawn.into_iter().filter_map(OnceLock::into_inner).collect()
}

/// Log-probabilities of given tokens.
pub(super) fn score(
    (level, pool, workers): (Level, &mut Pool, &Workers),
    logits: &Buffer,
    rows: &[ScoreRow],
) -> Vec<Sampled> {
    let scored: Vec<OnceLock<Sampled>> = rows.iter().map(|_| OnceLock::new()).collect();
    pool.run(rows.len(), &|worker, index| {
        let row = &rows[index];
        let logits = below_limit(logits.row(row.logits_row), row.vocab_limit);
        let sampled = workers.with_candidates(worker, 0, |_, candidates| {
            if simd::is_sound(level, logits) {
                report(level, logits, row.token, row.top_logprobs, candidates)
            } else {
                Sampled::unsound()
            }
        });
        // Every piece runs once.
        let _ = scored[index].set(sampled);
    });
    scored.into_iter().filter_map(OnceLock::into_inner).collect()
}

fn below_limit(logits: &[f32], limit: usize) -> &[f32] {
    &logits[..limit.min(logits.len())]
}

fn not_nan(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit }
}

fn draw(
    level: Level,
    logits: &[f32],
    row: &SampleRow<'_>,
    (memory, candidates): (&mut [f32], &mut Vec<Candidate>),
    pool: Option<&mut Pool>,
) -> u32 {
    let changed =
        row.mask.is_some() || !(row.seen.is_empty() && row.bias.is_empty() && row.banned.is_empty());
    let adjusted = if changed { adjust(logits, row, memory) } else { logits };
    let best = most_likely(level, adjusted);
    let Some(best) = best else { return fallback(logits, row) };
    let scaled = best.logit / row.temperature;
    // Also true for a NaN temperature.
    let draws = row.temperature > 0.0 && scaled.is_finite();
    if !draws {
        return best.token;
    }
    let best = Candidate { scaled, ..best };
    if row.top_k == 0 && row.top_p >= 1.0 && row.min_p <= 0.0 {
        return noisiest(level, adjusted, best, row, pool);
    }
    keep_likely(level, adjusted, best, row, candidates);
    for candidate in candidates.iter_mut() {
        candidate.scaled += gumbel(row.seed, row.position, candidate.token);
    }
    candidates.iter().min().map_or(best.token, |drawn| drawn.token)
}

/// The argmax of scaled logits plus noise over the whole vocabulary, a part of it at a time.
fn noisiest(
    level: Level,
    logits: &[f32],
    best: Candidate,
    row: &SampleRow<'_>,
    pool: Option<&mut Pool>,
) -> u32 {
    /// Tokens that are worth handing over.
    const PART: usize = 16 << 10;
    let parts: Vec<OnceLock<Candidate>> = logits.chunks(PART).map(|_| OnceLock::new()).collect();
    let look = |_: usize, part: usize| {
        let first = part * PART;
        let logits = &logits[first..(first + PART).min(logits.len())];
        // Every part is looked at once.
        let _ = parts[part].set(simd::gumbel_argmax(level, logits, first, best, row));
    };
    match pool {
        Some(pool) => pool.run(parts.len(), &look),
        None => (0..parts.len()).for_each(|part| look(0, part)),
    }
    let winners = parts.iter().filter_map(OnceLock::get).copied();
    winners.min().map_or(best.token, |winner| winner.token)
}

/// Logits after penalties and bias; ids that are banned or not in the mask are at −∞.
fn adjust<'a>(logits: &[f32], row: &SampleRow<'_>, memory: &'a mut [f32]) -> &'a [f32] {
    match row.mask {
        Some(mask) => copy_masked(logits, mask, memory),
        None => memory.copy_from_slice(logits),
    }
    for (token, occurrences) in row.seen {
        let Some(logit) = memory.get_mut(*token as usize) else { continue };
        let old = *logit;
        let penalised = if old > 0.0 { old / row.repetition_penalty } else { old * row.repetition_penalty };
        let mut new = penalised - row.frequency_penalty * *occurrences as f32;
        if *occurrences > 0 {
            new -= row.presence_penalty;
        }
        *logit = not_nan(new);
    }
    for (token, bias) in row.bias {
        if let Some(logit) = memory.get_mut(*token as usize) {
            *logit = not_nan(*logit + bias);
        }
    }
    for token in row.banned {
        if let Some(logit) = memory.get_mut(*token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    memory
}

/// Copies the logits in the mask; the others become −∞, which penalties and finite biases leave as it is.
fn copy_masked(logits: &[f32], mask: &[u32], memory: &mut [f32]) {
    memory.fill(f32::NEG_INFINITY);
    for ((from, to), word) in logits.chunks(32).zip(memory.chunks_mut(32)).zip(mask) {
        match *word {
            0 => {}
            u32::MAX => to.copy_from_slice(from),
            _ => {
                for (bit, (from, to)) in from.iter().zip(to).enumerate() {
                    if word >> bit & 1 == 1 {
                        *to = *from;
                    }
                }
            }
        }
    }
}

/// The largest logit above −∞, the smallest id among equals.
fn most_likely(level: Level, logits: &[f32]) -> Option<Candidate> {
    let largest = simd::largest(level, logits);
    if largest == f32::NEG_INFINITY {
        return None;
    }
    let found = logits.iter().position(|logit| *logit == largest)?;
    Some(Candidate { token: found as u32, logit: logits[found], scaled: logits[found] })
}

/// The token when nothing may be drawn: the largest that is not banned, else the largest of all.
fn fallback(logits: &[f32], row: &SampleRow<'_>) -> u32 {
    let all = || {
        let in_mask = (0..).zip(logits).filter(|(token, _)| row.is_in_mask(*token));
        in_mask.map(|(token, logit)| Candidate { token, logit: *logit, scaled: *logit })
    };
    let allowed = all().filter(|candidate| !row.banned.contains(&candidate.token)).min();
    allowed.or_else(|| all().min()).map_or(0, |candidate| candidate.token)
}

/// Lists the candidates that min-p, top-k and top-p leave; at least the most likely one.
fn keep_likely(
    level: Level,
    logits: &[f32],
    best: Candidate,
    row: &SampleRow<'_>,
    kept: &mut Vec<Candidate>,
) {
    let relative = |candidate: &Candidate| f64::from(candidate.scaled - best.scaled).exp();
    let (cuts_k, cuts_least) = (row.top_k > 0 && row.top_k < logits.len(), row.min_p > 0.0);
    if !cuts_k && !cuts_least {
        return keep_mass(level, logits, best, row, kept);
    }
    // Both cuts keep the likeliest, so their order does not matter.
    if cuts_k {
        top(level, logits, row.temperature, row.top_k, kept);
    } else {
        let depth = row.min_p.min(1.0).ln() - 0.01;
        above(level, logits, row.temperature, best.scaled + depth, kept);
        kept.sort_unstable();
    }
    if cuts_least {
        let least = f64::from(row.min_p.min(1.0));
        kept.retain(|candidate| relative(candidate) >= least);
    }
    if row.top_p < 1.0 {
        let wanted = f64::from(row.top_p) * kept.iter().map(relative).sum::<f64>();
        let count = count_to(kept, wanted, relative).unwrap_or(kept.len());
        kept.truncate(count);
    }
}

/// top-p over the whole vocabulary: only as many tokens are sorted as the mass needs.
fn keep_mass(level: Level, logits: &[f32], best: Candidate, row: &SampleRow<'_>, kept: &mut Vec<Candidate>) {
    let relative = |candidate: &Candidate| f64::from(candidate.scaled - best.scaled).exp();
    let mass = |logit: &f32| f64::from(*logit / row.temperature - best.scaled).exp();
    let wanted = f64::from(row.top_p) * logits.iter().map(mass).sum::<f64>();
    let mut depth = 4.0;
    loop {
        let lowest = if depth > 100.0 { f32::NEG_INFINITY } else { best.scaled - depth };
        above(level, logits, row.temperature, lowest, kept);
        kept.sort_unstable();
        if let Some(count) = count_to(kept, wanted, relative) {
            return kept.truncate(count);
        }
        if depth > 100.0 {
            return;
        }
        depth *= 2.0;
    }
}

/// How many of the sorted candidates reach the mass; `None` when all together do not.
fn count_to(sorted: &[Candidate], wanted: f64, mass: impl Fn(&Candidate) -> f64) -> Option<usize> {
    let mut reached = 0.0;
    for (index, candidate) in sorted.iter().enumerate() {
        reached += mass(candidate);
        if reached >= wanted {
            return Some(index + 1);
        }
    }
    None
}

/// Lists all candidates whose scaled logit is at least `lowest`, above −∞.
fn above(level: Level, logits: &[f32], temperature: f32, lowest: f32, found: &mut Vec<Candidate>) {
    found.clear();
    // Slightly too low: the division rounds.
    let bound = lowest * temperature - 1e-6 * (lowest * temperature).abs() - f32::MIN_POSITIVE;
    let mut next = simd::next_above(level, logits, 0, bound);
    while next < logits.len() {
        let (logit, scaled) = (logits[next], logits[next] / temperature);
        if scaled >= lowest {
            found.push(Candidate { token: next as u32, logit, scaled });
        }
        next = simd::next_above(level, logits, next + 1, bound);
    }
}

/// Lists the `count` most likely tokens above −∞, likelier first.
fn top(level: Level, logits: &[f32], temperature: f32, count: usize, found: &mut Vec<Candidate>) {
    found.clear();
    // The least likely is on top of the heap.
    let mut heap = BinaryHeap::from(std::mem::take(found));
    let mut bound = f32::NEG_INFINITY;
    let mut next = if count == 0 { logits.len() } else { simd::next_above(level, logits, 0, bound) };
    while next < logits.len() {
        let candidate =
            Candidate { token: next as u32, logit: logits[next], scaled: logits[next] / temperature };
        if heap.len() < count {
            heap.push(candidate);
        } else if let Some(mut least) = heap.peek_mut()
            && candidate < *least
        {
            *least = candidate;
        }
        if heap.len() == count {
            bound = heap.peek().map_or(bound, |least| least.logit);
        }
        next = simd::next_above(level, logits, next + 1, bound);
    }
    *found = heap.into_sorted_vec();
}

/// Log-probabilities of the model's own distribution: f32 logits minus an f64 log-sum-exp, rounded to f32.
fn report(level: Level, logits: &[f32], token: u32, count: usize, ranked: &mut Vec<Candidate>) -> Sampled {
    let largest = simd::largest(level, logits);
    let difference = |logit: f32| f64::from(logit) - f64::from(largest);
    let log_total = logits.iter().map(|logit| difference(*logit).exp()).sum::<f64>().ln();
    let logprob = |logit: f32| (difference(logit) - log_total) as f32;
    let of_token = logits.get(token as usize).map_or(f32::NEG_INFINITY, |logit| logprob(*logit));
    top(level, logits, 1.0, count, ranked);
    if ranked.len() < count.min(logits.len()) {
        // Fewer tokens above −∞ than were asked for: the others follow by id.
        let rest = (0..).zip(logits).filter(|(_, logit)| **logit == f32::NEG_INFINITY);
        let rest = rest.map(|(token, logit)| Candidate { token, logit: *logit, scaled: f32::NEG_INFINITY });
        ranked.extend(rest.take(count.min(logits.len()) - ranked.len()));
    }
    let top = ranked.iter().map(|candidate| (candidate.token, logprob(candidate.logit))).collect();
    Sampled { token, logprob: of_token, top }
}

/// Kernel: whether the values are logits of a distribution, as [`qwill_device::sample::is_sound`] says.
#[inline(always)]
pub(super) fn is_sound_body<S: Simd>(simd: S, values: &[f32]) -> bool {
    let lowest = simd.splat(f32::MIN);
    let (mut zero, mut largest) = (simd.splat(0.0), lowest);
    let whole = values.len() / S::LANES * S::LANES;
    for part in values[..whole].chunks_exact(S::LANES) {
        // A NaN in the second operand stays; a number times 0 is 0, all else is NaN, which sums keep.
        let value = simd.max(lowest, simd.load(part));
        zero = simd.mul_add(value, simd.splat(0.0), zero);
        largest = simd.max(simd.load(part), largest);
    }
    let rest = &values[whole..];
    let is_finite = |value: &f32| value.is_finite();
    let any = simd.largest(largest) > f32::MIN || values.iter().any(is_finite);
    any && simd.sum(zero) == 0.0 && rest.iter().all(|value| *value < f32::INFINITY)
}

/// Kernel: the largest value; −∞ when there is none. NaN is left out.
#[inline(always)]
pub(super) fn largest_body<S: Simd>(simd: S, values: &[f32]) -> f32 {
    let mut largest = [simd.splat(f32::NEG_INFINITY); 4];
    let whole = values.len() / (4 * S::LANES) * (4 * S::LANES);
    for block in values[..whole].chunks_exact(4 * S::LANES) {
        for (part, largest) in block.chunks_exact(S::LANES).zip(&mut largest) {
            // A NaN in the first operand leaves the second.
            *largest = simd.max(simd.load(part), *largest);
        }
    }
    let vector = simd.max(simd.max(largest[0], largest[1]), simd.max(largest[2], largest[3]));
    values[whole..].iter().fold(simd.largest(vector), |largest, value| largest.max(*value))
}

/// Kernel: the first index from `from` on whose value is above `bound`; the length when there is none.
#[inline(always)]
pub(super) fn next_above_body<S: Simd>(simd: S, values: &[f32], from: usize, bound: f32) -> usize {
    let block = 4 * S::LANES;
    let mut at = from;
    while at + block <= values.len() {
        let part = &values[at..at + block];
        let mut largest = simd.splat(f32::NEG_INFINITY);
        for part in part.chunks_exact(S::LANES) {
            largest = simd.max(simd.load(part), largest);
        }
        if simd.largest(largest) > bound
            && let Some(index) = part.iter().position(|value| *value > bound)
        {
            return at + index;
        }
        at += block;
    }
    values[at.min(values.len())..]
        .iter()
        .position(|value| *value > bound)
        .map_or(values.len(), |index| at + index)
}

/// The hash behind `gumbel`: 24 random bits of a token.
struct Noise {
    key: u64,
}

impl Noise {
    fn new(seed: u64, position: u64) -> Self {
        let key = mix(seed ^ 0x9e37_79b9_7f4a_7c15);
        Self { key: mix(key ^ position.wrapping_mul(0xd1b5_4a32_d192_ed03)) }
    }
    #[inline(always)]
    fn bits(&self, token: u32) -> u32 {
        (mix(self.key ^ u64::from(token).wrapping_mul(0x8cb9_2ba7_2f3d_8dd7)) >> 40) as u32
    }
}

#[inline(always)]
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Kernel: the argmax of `logit / temperature + gumbel` over the tokens from `first` on and the most likely one.
///
/// With `u` the uniform number behind a token's noise, `gumbel = −ln(−ln u) ≤ −ln(1 − u)`; so a token can beat
/// the best value so far only if `1 − u ≤ e^(scaled − best)`. Hash and comparison are cheap, few tokens pass.
#[inline(always)]
pub(super) fn gumbel_argmax_body<S: Simd>(
    simd: S,
    logits: &[f32],
    first: usize,
    best: Candidate,
    row: &SampleRow<'_>,
) -> Candidate {
    let noise = Noise::new(row.seed, row.position);
    let noisy = |token: u32, scaled: f32| Candidate {
        token,
        logit: scaled,
        scaled: scaled + gumbel(row.seed, row.position, token),
    };
    let mut winner = noisy(best.token, best.scaled);
    // Covers the rounding of the sum, of the noise and of the exponential.
    let slack = |value: f32| 1e-3 + 1e-6 * value.abs();
    let mut bound = winner.scaled - slack(winner.scaled);
    let temperature = simd.splat(row.temperature);
    for (block, part) in logits.chunks(S::LANES).enumerate() {
        let scaled = simd.div(simd.load_part(part), temperature);
        let chances = exp(simd, simd.sub(scaled, simd.splat(bound)));
        // The smallest 1 − u is half a step of 2^-24.
        if simd.largest(chances) < 2.9e-8 {
            continue;
        }
        let (mut scaled_lanes, mut chance_lanes) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
        simd.store(&mut scaled_lanes, scaled);
        simd.store(&mut chance_lanes, chances);
        for lane in 0..part.len() {
            let token = (first + block * S::LANES + lane) as u32;
            let rest = (16_777_216 - noise.bits(token)) as f32 - 0.5;
            let (scaled, possible) = (scaled_lanes[lane], rest <= chance_lanes[lane] * 16_777_216.0);
            if possible && scaled > f32::NEG_INFINITY {
                let candidate = noisy(token, scaled);
                if candidate < winner {
                    winner = candidate;
                    bound = winner.scaled - slack(winner.scaled);
                }
            }
        }
    }
    winner
}

#[cfg(test)]
mod tests;
