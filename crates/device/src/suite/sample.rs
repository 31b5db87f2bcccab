//! Drawing tokens and log-probabilities.

use super::outputs::{Closeness, Outputs, POISON, Tensor};
use super::rows::{smaller_companies, upload_as};
use super::{Bench, Failure, OpRun, Part, Random};
use crate::{Device, Precision, SampleRow, Sampled, ScoreRow};

/// A [`SampleRow`] that owns its lists.
#[derive(Debug, Clone)]
struct HostRow {
    row: SampleRow<'static>,
    seen: Vec<(u32, u32)>,
    bias: Vec<(u32, f32)>,
    banned: Vec<u32>,
    mask: Option<Vec<u32>>,
}

impl HostRow {
    fn borrow(&self) -> SampleRow<'_> {
        let Self { row, seen, bias, banned, mask } = self;
        SampleRow { seen, bias, banned, mask: mask.as_deref(), ..row.clone() }
    }

    /// Every parameter at random, each off with some probability.
    fn random(random: &mut Random, logits_row: usize, vocab_limit: usize) -> Self {
        let token = |random: &mut Random| random.below(vocab_limit) as u32;
        let mut row = SampleRow::greedy(logits_row, vocab_limit);
        row.temperature = random.pick(&[0.0, 0.0, 0.3, 0.7, 1.0, 1.0, 2.0]).unwrap_or(1.0);
        row.top_k = random.pick(&[0, 0, 1, 2, 20, vocab_limit, vocab_limit + 5]).unwrap_or(0);
        row.top_p = random.pick(&[1.0, 1.0, 0.9, 0.5, 0.05, 0.0]).unwrap_or(1.0);
        row.min_p = random.pick(&[0.0, 0.0, 0.01, 0.3, 1.0]).unwrap_or(0.0);
        row.presence_penalty = random.pick(&[0.0, 0.0, 1.5, -1.0]).unwrap_or(0.0);
        row.frequency_penalty = random.pick(&[0.0, 0.0, 0.5, -0.5]).unwrap_or(0.0);
        row.repetition_penalty = random.pick(&[1.0, 1.0, 1.3, 0.8]).unwrap_or(1.0);
        row.seed = random.bits();
        row.position = random.below(262_144) as u64;
        row.top_logprobs = random.pick(&[None, Some(0), Some(1), Some(5), Some(20)]).unwrap_or(None);
        let mut seen: Vec<(u32, u32)> =
            (0..random.below(30)).map(|_| (token(random), random.below(4) as u32)).collect();
        seen.sort_unstable();
        seen.dedup_by_key(|(id, _)| *id);
        let bias = (0..random.below(4)).map(|_| (token(random), random.uniform(-110.0, 10.0))).collect();
        let banned = (0..random.below(4)).map(|_| token(random)).collect();
        let mask = random_mask(random, vocab_limit);
        Self { row, seen, bias, banned, mask }
    }
}

/// No mask, or one with one token, some, most or all of them; it may be longer than the limit and have bits there, or end
/// early.
fn random_mask(random: &mut Random, vocab_limit: usize) -> Option<Vec<u32>> {
    let words = vocab_limit.div_ceil(32);
    let one = random.below(vocab_limit);
    let mut mask: Vec<u32> = match random.below(6) {
        0 | 1 => return None,
        2 => vec![0; words],
        3 => vec![u32::MAX; words + random.below(2)],
        4 => (0..words).map(|_| random.bits() as u32).collect(),
        _ => (0..=one / 32).map(|_| (random.bits() & random.bits() & random.bits()) as u32).collect(),
    };
    mask[one / 32] |= 1 << (one % 32);
    Some(mask)
}

#[derive(Debug, Clone)]
enum Kind {
    Sample(Vec<HostRow>),
    Score(Vec<ScoreRow>),
}

#[derive(Debug, Clone)]
struct SampleRun {
    kind: Kind,
    vocab: usize,
    logits: Vec<f32>,
}

/// Most log-probabilities that a run of this file asks for.
const TOP: usize = 20;

fn tensors(results: &[Sampled], expected_rows: usize) -> Result<Outputs, Failure> {
    if results.len() != expected_rows {
        return Err(Failure::new(format!("{} results for {expected_rows} rows", results.len())));
    }
    let mut top_ids = Vec::new();
    let mut top_values = Vec::new();
    for result in results {
        if result.top.len() > TOP {
            return Err(Failure::new(format!(
                "{} most likely tokens, {TOP} is the most asked for",
                result.top.len()
            )));
        }
        let padding = TOP - result.top.len();
        // Ids as f32 are exact below 2^24; the padding shows how many there were.
        top_ids.extend(result.top.iter().map(|(id, _)| *id as f32).chain((0..padding).map(|_| -1.0)));
        top_values.extend(result.top.iter().map(|(_, value)| *value).chain((0..padding).map(|_| 0.0)));
    }
    let tokens = results.iter().map(|result| result.token as f32).collect();
    // Every NaN says the same: none was asked for, or there is none.
    let logprobs = results.iter().map(|result| if result.logprob.is_nan() { POISON } else { result.logprob });
    Ok(Outputs::of_rows(vec![
        Tensor::new("token", 1, tokens, Closeness::Bits),
        Tensor::new("logprob", 1, logprobs.collect(), Closeness::Exact),
        Tensor::new("top ids", TOP, top_ids, Closeness::Bits),
        Tensor::new("top logprobs", TOP, top_values, Closeness::Exact),
    ]))
}

impl OpRun for SampleRun {
    fn describe(&self) -> String {
        match &self.kind {
            Kind::Sample(rows) => format!("vocabulary {}, {rows:?}", self.vocab),
            Kind::Score(rows) => format!("vocabulary {}, {rows:?}", self.vocab),
        }
    }

    fn execute<D: Device>(&self, device: &mut D) -> Result<Outputs, Failure> {
        let logits = upload_as(device, self.vocab, &self.logits, Precision::Full)?;
        match &self.kind {
            Kind::Sample(rows) => {
                let borrowed: Vec<SampleRow<'_>> = rows.iter().map(HostRow::borrow).collect();
                tensors(&device.sample(&logits, &borrowed)?, rows.len())
            }
            Kind::Score(rows) => tensors(&device.score(&logits, rows)?, rows.len()),
        }
    }

    fn with_less_company(&self, random: &mut Random) -> Vec<Part<Self>> {
        let count = match &self.kind {
            Kind::Sample(rows) => rows.len(),
            Kind::Score(rows) => rows.len(),
        };
        let part = |rows: Vec<usize>| {
            let kind = match &self.kind {
                Kind::Sample(all) => Kind::Sample(rows.iter().map(|row| all[*row].clone()).collect()),
                Kind::Score(all) => Kind::Score(rows.iter().map(|row| all[*row]).collect()),
            };
            Part { run: Self { kind, ..self.clone() }, rows, spans: Vec::new() }
        };
        smaller_companies(random, count).into_iter().map(part).collect()
    }
}

/// Rows of logits: spread ones, flat ones, ones with many equal values, ones where many tokens cannot come, and between
/// them ones that are no distribution: with a NaN or a +∞ somewhere, or without a number.
fn random_logits(random: &mut Random, rows: usize, vocab: usize, limit: usize) -> Vec<f32> {
    let mut logits = Vec::with_capacity(rows * vocab);
    for index in 0..rows {
        let mut row = random.normals(vocab, 4.0);
        // In companies of many every kind is there.
        match if rows > 8 { index % 8 } else { random.below(12) } {
            0 => row = row.into_iter().map(f32::round).collect(),
            1 => row = row.into_iter().map(|logit| 0.01 * logit).collect(),
            2 => {
                for _ in 0..vocab / 4 {
                    row[random.below(vocab)] = f32::NEG_INFINITY;
                }
            }
            3 => row[random.below(limit)] = f32::NAN,
            4 => row[limit - 1] = f32::INFINITY,
            5 => row.fill(random.pick(&[f32::NAN, f32::NEG_INFINITY]).unwrap_or(f32::NAN)),
            _ => {}
        }
        // The padding rows of a head are not zero: the largest logits of all, and never to be drawn. Nor do they make a
        // row unsound.
        for logit in &mut row[limit..] {
            *logit = random.pick(&[*logit + 100.0, f32::NAN, f32::INFINITY]).unwrap_or(f32::NAN);
        }
        logits.extend(row);
    }
    logits
}

const VOCABULARIES: [(usize, usize); 5] = [(1, 1), (16, 15), (64, 64), (517, 500), (8192, 8183)];

pub(super) fn sample<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for (vocab, limit) in VOCABULARIES {
        for rows in [1, 2, 9, 33] {
            let logits = random_logits(&mut bench.random, rows, vocab, limit);
            let mut order: Vec<usize> = (0..rows).collect();
            bench.random.shuffle(&mut order);
            let mut host_rows: Vec<HostRow> =
                order.iter().map(|row| HostRow::random(&mut bench.random, *row, limit)).collect();
            // Nothing left to draw: all banned, of all tokens and of those in a mask.
            host_rows[0].banned = (0..limit as u32).collect();
            host_rows[0].mask = None;
            if let Some(second) = host_rows.get_mut(1) {
                second.banned = (0..limit as u32).collect();
            }
            bench.check(&SampleRun { kind: Kind::Sample(host_rows), vocab, logits })?;
        }
    }
    Ok(())
}

pub(super) fn score<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for (vocab, limit) in VOCABULARIES {
        for rows in [1, 2, 17] {
            let logits = random_logits(&mut bench.random, rows, vocab, limit);
            let row = |random: &mut Random| ScoreRow {
                logits_row: random.below(rows),
                token: random.below(vocab) as u32,
                vocab_limit: limit,
                top_logprobs: random.below(TOP + 1),
            };
            let score_rows = (0..rows + 3).map(|_| row(&mut bench.random)).collect();
            bench.check(&SampleRun { kind: Kind::Score(score_rows), vocab, logits })?;
        }
    }
    Ok(())
}
