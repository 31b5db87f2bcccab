//! The parts together, in a simulated server: what is measured and learned leads to nearly the best speed that any fixed
//! depth reaches, at every load, and to it again after things have changed.

use super::{Acceptance, Candidate, DepthPolicy, MAX_DRAFTS, Source, StepTimes, SyntheticAcceptance};

const MAX_ROWS: usize = 64;
/// How far from the best fixed depth a learned one may stay.
const MOST_LOSS: f64 = 0.03;

/// What is true, and what nobody knows at start.
#[derive(Clone, Copy)]
struct World {
    first_row_us: f32,
    row_us: f32,
    sequence_us: f32,
    draft_us: f32,
    /// Shares of rounds in which a draft is right with all before it.
    shares: &'static str,
    /// Contexts are long: rounds take so many times what they took at start.
    slowness: f32,
    /// Rows after each sequence's first one take so many times what they took at start, when nothing had been rejected and
    /// rings were empty.
    row_slowness: f32,
}

/// A large model on a fast card and on a slower one; per position as the 27B's module does on chats.
const FAST_CARD: World = World {
    first_row_us: 6000.0,
    row_us: 60.0,
    sequence_us: 30.0,
    draft_us: 400.0,
    shares: "0.74,0.50,0.34,0.24,0.17,0.12,0.08,0.06",
    slowness: 1.0,
    row_slowness: 1.0,
};
const SLOW_CARD: World = World {
    first_row_us: 20_000.0,
    row_us: 400.0,
    sequence_us: 150.0,
    draft_us: 1000.0,
    slowness: 1.6,
    ..FAST_CARD
};
/// A processor, on which every row costs nearly what the first one does.
const PROCESSOR: World = World {
    first_row_us: 1000.0,
    row_us: 9000.0,
    sequence_us: 10.0,
    draft_us: 900.0,
    slowness: 1.6,
    ..FAST_CARD
};

const NEVER: &str = "0";
const COPYING: &str = "0.99,0.98,0.97,0.96,0.95,0.94,0.93,0.92,0.91,0.9,0.89,0.88,0.87,0.86,0.85";

impl World {
    /// Rows count as products take them: by eights, above 32 by thirty-twos.
    fn at_start_us(self, sequences: usize, rows: usize) -> f32 {
        self.first_row_us + self.row_us * Self::counted(rows) + self.sequence_us * sequences as f32
    }

    fn counted(rows: usize) -> f32 {
        let rows = match rows {
            0..=8 => rows,
            9..=32 => rows.next_multiple_of(8),
            _ => rows.next_multiple_of(32),
        };
        rows as f32
    }

    fn round_us(self, sequences: usize, rows: usize) -> f32 {
        let further_rows = Self::counted(rows) - Self::counted(sequences);
        let more_us = (self.row_slowness - 1.0) * self.row_us * further_rows;
        self.slowness * (self.at_start_us(sequences, rows) + more_us)
    }
}

/// A server with always the same number of sequences.
struct Server {
    sequences: Vec<Acceptance>,
    acceptance: Acceptance,
    times: StepTimes,
    rounds: u64,
}

impl Server {
    fn start(world: World, sequences: usize) -> Self {
        let mut times = StepTimes::new();
        for (sequences, rows) in StepTimes::to_measure(64, MAX_ROWS) {
            times.measured(sequences, rows, world.at_start_us(sequences, rows));
        }
        for sequences in [1, 2, 4, 8, 16, 32, 64] {
            times.draft_measured(sequences, world.draft_us);
        }
        let (of_request, of_server) = (Acceptance::of_request(), Acceptance::of_server());
        Self { sequences: vec![of_request; sequences], acceptance: of_server, times, rounds: 0 }
    }

    /// Tokens a second over some rounds; with `fixed` of that depth, otherwise as decided.
    fn run(&mut self, world: World, rounds: u64, fixed: Option<usize>) -> f64 {
        let table: SyntheticAcceptance = world.shares.parse().unwrap();
        let (mut tokens, mut us) = (0, 0.0);
        for _ in 0..rounds {
            self.rounds += 1;
            let most = fixed.unwrap_or(MAX_DRAFTS);
            let candidate = |own: &Acceptance| Candidate {
                source: Source::Mtp,
                survival: own.survival(Source::Mtp, most, &self.acceptance),
            };
            let candidates: Vec<Candidate> = self.sequences.iter().map(candidate).collect();
            let policy = DepthPolicy { max_rows: MAX_ROWS, adaptive: fixed.is_none() };
            let depths = policy.depths(&candidates, &self.times);
            let rows = depths.len() + depths.iter().sum::<usize>();
            let round_us = world.round_us(depths.len(), rows);
            self.times.record(depths.len(), rows, round_us);
            us += f64::from(round_us + world.draft_us * depths.iter().copied().max().unwrap_or(0) as f32);
            for ((seed, own), depth) in (0..).zip(&mut self.sequences).zip(depths) {
                let accepted = table.accepted(seed, self.rounds, depth);
                own.record(Source::Mtp, depth, accepted);
                self.acceptance.record(Source::Mtp, depth, accepted);
                tokens += 1 + accepted;
            }
        }
        tokens as f64 / us * 1e6
    }
}

/// Enough rounds for a speed that is right to a per cent or so.
fn rounds(sequences: usize) -> u64 {
    (6000 / sequences as u64).clamp(500, 3000)
}

/// The best speed of a fixed depth.
fn best_fixed(world: World, sequences: usize) -> f64 {
    let speed = |depth| Server::start(world, sequences).run(world, rounds(sequences), Some(depth));
    [0, 1, 2, 3, 4, 5, 7, 11, MAX_DRAFTS].map(speed).into_iter().fold(0.0, f64::max)
}

/// A new server is nearly as fast as with the best fixed depth, once it has had some rounds to learn from.
fn assert_learned(world: World, sequences: usize, learning_rounds: u64, name: &str) {
    let best = best_fixed(world, sequences);
    let mut server = Server::start(world, sequences);
    server.run(world, learning_rounds, None);
    let learned = server.run(world, rounds(sequences), None);
    assert!(
        learned > best * (1.0 - MOST_LOSS),
        "{name}, {sequences} sequences: {learned:.1} tokens/s, the best fixed depth {best:.1}"
    );
}

#[test]
fn learned_depths_are_as_good_as_the_best_fixed_one_at_every_load() {
    for (name, world) in [("fast card", FAST_CARD), ("slow card", SLOW_CARD), ("processor", PROCESSOR)] {
        for shares in [FAST_CARD.shares, NEVER, COPYING] {
            for sequences in [1, 2, 4, 8, 16, 64] {
                let world = World { shares, ..world };
                assert_learned(world, sequences, 200, &format!("{name}, shares {shares}"));
            }
        }
    }
}

/// On an H200, 32 rows of eight sequences took 19.5 ms against 7.5 ms of eight rows.
#[test]
fn rounds_that_take_longer_than_at_start_are_left_alone() {
    for row_slowness in [0.5, 2.0, 4.0, 6.0, 8.0] {
        for sequences in [1, 2, 4, 8, 16, 64] {
            let world = World { row_slowness, ..FAST_CARD };
            assert_learned(world, sequences, 500, &format!("rows {row_slowness} times as slow"));
        }
    }
}

#[test]
fn drafts_that_become_right_are_noticed() {
    for sequences in [1, 8] {
        let wrong = World { shares: NEVER, ..SLOW_CARD };
        let copying = World { shares: COPYING, ..SLOW_CARD };
        let mut server = Server::start(wrong, sequences);
        server.run(wrong, 2000, None);
        server.run(copying, 300, None);
        let (learned, best) = (server.run(copying, 500, None), best_fixed(copying, sequences));
        assert!(learned > 0.9 * best, "{sequences} sequences: {learned:.1} tokens/s, the best {best:.1}");
    }
}
