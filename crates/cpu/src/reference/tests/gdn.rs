//! The gated delta rule in both forms against the plain recurrence in f64.

use qwill_device::batch::{CHUNK_TOKENS, MAX_ROUND_ROWS};
use qwill_device::suite::Random;
use qwill_device::{
    Activations, AttentionShape, Batch, CacheSpec, Device, GdnShape, KvType, Phase, Precision, RING_TOKENS,
    Span, StateType,
};

use super::{distance, unit};
use crate::ReferenceDevice;
use crate::reference::gdn::{HeadRing, HeadRow, chunk_head};
use crate::state::round_state;

const KEY_DIM: usize = 16;
const VALUE_DIM: usize = 24;

const SHAPE: GdnShape = GdnShape {
    key_heads: 1,
    value_heads: 1,
    key_dim: KEY_DIM,
    value_dim: VALUE_DIM,
    conv_width: 4,
    norm_eps: 1e-6,
};

/// One token's inputs of one head.
#[derive(Debug, Clone)]
struct Token {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    log_decay: f32,
    beta: f32,
}

impl Token {
    fn random(random: &mut Random, log_decay: f32) -> Self {
        let mut query = unit(random, KEY_DIM);
        for value in &mut query {
            *value /= (KEY_DIM as f32).sqrt();
        }
        Self {
            query,
            key: unit(random, KEY_DIM),
            value: random.normals(VALUE_DIM, 1.0),
            log_decay,
            beta: random.uniform(0.0, 1.0),
        }
    }

    fn row(&self) -> HeadRow<'_> {
        let Self { query, key, value, log_decay, beta } = self;
        HeadRow { query, key, value, log_decay: *log_decay, beta: *beta }
    }
}

/// Ways in which a head may forget.
const DECAYS: [fn(&mut Random) -> f32; 5] = [
    |random| -random.uniform(0.0, 0.1),
    |random| -random.uniform(0.0, 1e-6),
    |_| 0.0,
    |random| -random.uniform(20.0, 100.0),
    |random| if random.chance(0.1) { -random.uniform(5.0, 90.0) } else { -random.uniform(0.0, 0.3) },
];

fn tokens(random: &mut Random, count: usize, decay: fn(&mut Random) -> f32) -> Vec<Token> {
    (0..count)
        .map(|_| {
            let log_decay = decay(random);
            Token::random(random, log_decay)
        })
        .collect()
}

/// The recurrence as written, in the number type of `$float`: outputs, and the state is updated.
macro_rules! recurrence {
    ($name:ident, $float:ty) => {
        fn $name(tokens: &[Token], state: &mut [$float]) -> Vec<$float> {
            let mut outputs = Vec::new();
            for token in tokens {
                let decay = <$float>::from(token.log_decay).exp();
                for value in state.iter_mut() {
                    *value *= decay;
                }
                let read = |state: &[$float], x: &[f32], column: usize| -> $float {
                    x.iter()
                        .enumerate()
                        .map(|(d, x)| state[d * VALUE_DIM + column] * <$float>::from(*x))
                        .sum()
                };
                let corrected: Vec<$float> = (0..VALUE_DIM)
                    .map(|column| {
                        let predicted = read(state, &token.key, column);
                        <$float>::from(token.beta) * (<$float>::from(token.value[column]) - predicted)
                    })
                    .collect();
                for (d, key) in token.key.iter().enumerate() {
                    for (column, u) in corrected.iter().enumerate() {
                        state[d * VALUE_DIM + column] += <$float>::from(*key) * u;
                    }
                }
                outputs.extend((0..VALUE_DIM).map(|column| read(state, &token.query, column)));
            }
            outputs
        }
    };
}

recurrence!(recurrence_f64, f64);
recurrence!(recurrence_f32, f32);

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

fn rows(tokens: &[Token]) -> Vec<HeadRow<'_>> {
    tokens.iter().map(Token::row).collect()
}

/// A head's base state and ring with their length: what a slot holds between rounds.
#[derive(Debug, Clone)]
struct Slot {
    state_type: StateType,
    base: Vec<f32>,
    ring: Vec<f32>,
    len: usize,
}

impl Slot {
    fn new(base: &[f32]) -> Self {
        Self::of(StateType::F32, base)
    }

    fn of(state_type: StateType, base: &[f32]) -> Self {
        let mut base = base.to_vec();
        round_state(state_type, &mut base);
        Self { state_type, base, ring: vec![f32::NAN; RING_TOKENS * SHAPE.ring_entry()], len: 0 }
    }

    /// Rows a round may have now.
    fn room(&self) -> usize {
        MAX_ROUND_ROWS.min(RING_TOKENS - self.len % RING_TOKENS)
    }

    /// Runs `kept` and then `rejected`, and keeps the former; returns the kept rows' outputs.
    fn round(&mut self, kept: &[Token], rejected: &[Token]) -> Vec<f32> {
        if self.len == RING_TOKENS {
            HeadRing::new(&SHAPE, self.state_type, 0, &mut self.ring, RING_TOKENS).fold(&mut self.base);
            self.len = 0;
        }
        let mut ring = HeadRing::new(&SHAPE, self.state_type, 0, &mut self.ring, self.len);
        let outputs: Vec<f32> = kept.iter().flat_map(|token| ring.append(&self.base, &token.row())).collect();
        for token in rejected {
            ring.append(&self.base, &token.row());
        }
        self.len += kept.len();
        outputs
    }
}

#[test]
fn chunks_agree_with_the_f64_recurrence_at_every_decay() {
    for (index, decay) in DECAYS.into_iter().enumerate() {
        let mut random = Random::new(index as u64, "chunks");
        let tokens = tokens(&mut random, 300, decay);
        let start = random.normals(KEY_DIM * VALUE_DIM, 0.5);
        let mut exact = widen(&start);
        let expected = recurrence_f64(&tokens, &mut exact);

        let mut state = start.clone();
        let mut found = Vec::new();
        let mut rest = &tokens[..];
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(random.between(1, rest.len().min(CHUNK_TOKENS)));
            found.extend(chunk_head(&rows(chunk), &mut state).concat());
            rest = after;
        }
        let (outputs, states) = (distance(&found, &expected), distance(&state, &exact));
        assert!(outputs < 3e-6 && states < 3e-6, "decay {index}: outputs {outputs:e}, state {states:e}");
    }
}

#[test]
fn the_ring_is_as_accurate_as_the_stepwise_form_over_ten_thousand_tokens() {
    for (index, decay) in DECAYS.into_iter().enumerate() {
        let mut random = Random::new(index as u64, "long ring");
        let tokens = tokens(&mut random, 10_000, decay);
        let start = random.normals(KEY_DIM * VALUE_DIM, 0.5);
        let expected = recurrence_f64(&tokens, &mut widen(&start));
        let stepwise = recurrence_f32(&tokens, &mut start.clone());

        let mut slot = Slot::new(&start);
        let mut found = Vec::new();
        let mut rest = &tokens[..];
        while !rest.is_empty() {
            let (round, after) = rest.split_at(random.between(1, slot.room().min(rest.len())));
            found.extend(slot.round(round, &[]));
            rest = after;
        }
        let quarter = found.len() / 4;
        for part in 0..4 {
            let range = part * quarter..(part + 1) * quarter;
            let of_ring = distance(&found[range.clone()], &expected[range.clone()]);
            let of_steps = distance(&stepwise[range.clone()], &expected[range]);
            assert!(
                of_ring < 1.5 * of_steps + 2e-7,
                "decay {index}, quarter {part}: {of_ring:e} {of_steps:e}"
            );
        }
    }
}

/// Halves in the ring are an error of 4e-4, the state's rounding after every chunk one of 1.3e-4, and the delta rule keeps
/// correcting both: they do not grow with the tokens.
#[test]
fn states_in_half_precision_do_not_drift_over_ten_thousand_tokens() {
    for (index, decay) in DECAYS.into_iter().enumerate() {
        let mut random = Random::new(index as u64, "long half");
        let tokens = tokens(&mut random, 10_000, decay);
        let start = vec![0.0; KEY_DIM * VALUE_DIM];
        let expected = recurrence_f64(&tokens, &mut widen(&start));

        let mut slot = Slot::of(StateType::F16, &start);
        let ringed: Vec<f32> = tokens.chunks(16).flat_map(|round| slot.round(round, &[])).collect();
        let mut state = start.clone();
        let mut chunked = Vec::new();
        for chunk in tokens.chunks(CHUNK_TOKENS) {
            chunked.extend(chunk_head(&rows(chunk), &mut state).concat());
            round_state(StateType::F16, &mut state);
        }
        let quarter = expected.len() / 4;
        for part in 0..4 {
            let range = part * quarter..(part + 1) * quarter;
            let of_ring = distance(&ringed[range.clone()], &expected[range.clone()]);
            let of_chunks = distance(&chunked[range.clone()], &expected[range]);
            println!("decay {index}, quarter {part}: ring {of_ring:.1e}, chunks {of_chunks:.1e}");
            assert!(of_ring < 6e-4, "decay {index}, quarter {part}: ring {of_ring:e}");
            assert!(of_chunks < 2e-4, "decay {index}, quarter {part}: chunks {of_chunks:e}");
        }
    }
}

#[test]
fn every_split_of_64_tokens_into_rounds_gives_the_same_bits() {
    for (index, decay) in DECAYS.into_iter().enumerate() {
        let mut random = Random::new(index as u64, "splits");
        let tokens = tokens(&mut random, 64, decay);
        let start = random.normals(KEY_DIM * VALUE_DIM, 0.5);
        let state_type = [StateType::F32, StateType::F16][index % 2];
        let run = |sizes: &mut dyn FnMut(usize) -> usize| {
            let mut slot = Slot::of(state_type, &start);
            let mut outputs = Vec::new();
            let mut rest = &tokens[..];
            while !rest.is_empty() {
                let (round, after) = rest.split_at(sizes(slot.room().min(rest.len())));
                outputs.extend(slot.round(round, &[]));
                rest = after;
            }
            (bits(&outputs), bits(&slot.base), bits(&slot.ring[..slot.len * SHAPE.ring_entry()]))
        };
        let expected = run(&mut |_| 1);
        for size in 2..=MAX_ROUND_ROWS {
            assert_eq!(run(&mut |room| size.min(room)), expected, "rounds of {size}");
        }
        for _ in 0..200 {
            assert_eq!(run(&mut |room| random.between(1, room)), expected, "random rounds");
        }
    }
}

#[test]
fn rejected_rows_leave_no_trace() {
    for (index, decay) in DECAYS.into_iter().enumerate() {
        let mut random = Random::new(index as u64, "rejected");
        let accepted = tokens(&mut random, 150, decay);
        let junk = tokens(&mut random, MAX_ROUND_ROWS, |random| -random.uniform(0.0, 200.0));
        let start = random.normals(KEY_DIM * VALUE_DIM, 0.5);
        let state_type = [StateType::F16, StateType::F32][index % 2];
        let mut alone = Slot::of(state_type, &start);
        let expected: Vec<f32> =
            accepted.iter().flat_map(|token| alone.round(std::slice::from_ref(token), &[])).collect();
        for _ in 0..20 {
            let mut slot = Slot::of(state_type, &start);
            let mut found = Vec::new();
            let mut rest = &accepted[..];
            while !rest.is_empty() {
                let room = slot.room();
                let (round, after) = rest.split_at(random.between(1, room.min(rest.len())));
                let rejected = random.between(0, room - round.len());
                found.extend(slot.round(round, &junk[..rejected]));
                rest = after;
            }
            assert_eq!(bits(&found), bits(&expected));
            assert_eq!((bits(&slot.base), slot.len), (bits(&alone.base), alone.len));
        }
    }
}

#[test]
fn chunks_and_ring_tell_the_same_story() {
    let mut random = Random::new(3, "both forms");
    let tokens = tokens(&mut random, 64, DECAYS[0]);
    let start = random.normals(KEY_DIM * VALUE_DIM, 0.5);
    let chunked = chunk_head(&rows(&tokens), &mut start.clone()).concat();
    let mut slot = Slot::new(&start);
    let ringed: Vec<f32> = tokens.chunks(16).flat_map(|round| slot.round(round, &[])).collect();
    assert!(distance(&ringed, &widen(&chunked)) < 1e-6);
}

/// The heads of a layer share keys and ring entries: each must still see its own recurrence, across folds.
#[test]
fn heads_that_share_keys_do_not_disturb_each_other() {
    let shape = GdnShape { key_heads: 2, value_heads: 6, ..SHAPE };
    let mut random = Random::new(4, "shared keys");
    let total = 3 * RING_TOKENS + 5;
    let mixed = random_mixed(&mut random, &shape, total);
    let mut device = ReferenceDevice::new(Activations::F32);
    let mut cache = device.cache(&cache_spec(shape)).unwrap();
    let mut found = vec![Vec::new(); shape.value_heads];
    let (mut position, mut ring_len) = (0, 0);
    while position < total {
        let room = MAX_ROUND_ROWS.min(RING_TOKENS - ring_len % RING_TOKENS).min(total - position);
        let rows = random.between(1, room);
        let mut input = device.buffer(rows, shape.mixed(), Precision::Full).unwrap();
        let mut out = device.buffer(rows, shape.value_columns(), Precision::Activation).unwrap();
        device.write(&mut input, &mixed[position * shape.mixed()..][..rows * shape.mixed()]).unwrap();
        let span = Span { first_row: 0, rows, position, slot: 0, ring_len, first_page: 0 };
        let page_table = vec![0; span.pages()];
        let batch = Batch {
            phase: Phase::Rows,
            tokens: vec![0; rows],
            spans: vec![span],
            page_table,
            chunks: vec![],
        };
        device.gdn_scan(&batch, 0, &shape, &input, &mut cache, &mut out).unwrap();
        for row in 0..rows {
            for (head, values) in out.row(row).chunks(VALUE_DIM).enumerate() {
                found[head].extend_from_slice(values);
            }
        }
        position += rows;
        ring_len = ring_len % RING_TOKENS + rows;
    }
    for (head, found) in found.iter().enumerate() {
        let of_head = |row: &[f32]| {
            let key_head = head / 3 * KEY_DIM;
            Token {
                query: row[key_head..][..KEY_DIM].to_vec(),
                key: row[2 * KEY_DIM + key_head..][..KEY_DIM].to_vec(),
                value: row[4 * KEY_DIM + head * VALUE_DIM..][..VALUE_DIM].to_vec(),
                log_decay: row[4 * KEY_DIM + 6 * VALUE_DIM + head],
                beta: row[4 * KEY_DIM + 6 * VALUE_DIM + 6 + head],
            }
        };
        let tokens: Vec<Token> = mixed.chunks(shape.mixed()).map(of_head).collect();
        let error = distance(found, &recurrence_f64(&tokens, &mut [0.0; KEY_DIM * VALUE_DIM]));
        assert!(error < 2e-6, "head {head}: {error:e}");
    }
}

/// Rows `q̂ | k̂ | v | log-decay | β` of two key heads and six value heads.
fn random_mixed(random: &mut Random, shape: &GdnShape, rows: usize) -> Vec<f32> {
    let mut mixed = Vec::new();
    for _ in 0..rows {
        for _ in 0..2 * shape.key_heads {
            mixed.extend(unit(random, KEY_DIM));
        }
        mixed.extend(random.normals(shape.value_columns(), 1.0));
        mixed.extend((0..shape.value_heads).map(|_| -random.uniform(0.0, 0.2)));
        mixed.extend((0..shape.value_heads).map(|_| random.uniform(0.0, 1.0)));
    }
    mixed
}

fn cache_spec(gdn: GdnShape) -> CacheSpec {
    let attention = AttentionShape {
        query_heads: 1,
        kv_heads: 1,
        head_dim: 2,
        rope_dims: 2,
        rope_theta: 1e4,
        norm_eps: 1e-6,
    };
    CacheSpec {
        kv_layers: 0,
        attention,
        kv_type: KvType::F32,
        pages: 1,
        gdn_layers: 1,
        gdn,
        state_type: StateType::F32,
        slots: 1,
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
