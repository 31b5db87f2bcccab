use std::collections::BTreeMap;

/// Up to here every number of rows has a time of its own; above, rows are counted by eights, from 32 on by
/// thirty-twos: the sizes for which rounds are recorded (`model/src/record.rs`), and those in which products take rows.
const EXACT: usize = 8;
const COARSE: usize = 32;

/// Most rows of one sequence in a round, as in the measured rounds of few sequences.
const PACKED_ROWS: usize = qwill_device::MAX_ROUND_ROWS;

/// Before anything is measured: a round of one row, microseconds, and what a further row adds to it. Optimistic, so that
/// drafts are tried and their rows' time becomes known.
const GUESSED_ROUND_US: f32 = 20_000.0;
const GUESSED_ROW_SHARE: f32 = 0.01;
/// A step of the MTP chain against a round of one row: one layer of 64 and the head.
const GUESSED_DRAFT_SHARE: f32 = 0.06;

/// Weight of a new time in the general pace, and in what is special about its size. Both in logarithms. A size that is
/// new says more about itself than about the pace, which sizes run until now have told.
const PACE_WEIGHT: f32 = 0.125;
const SIZE_WEIGHT: f32 = 0.062_5;
const NEW_SIZE_WEIGHT: f32 = 0.25;
/// Runs after which a size is half known.
const HALF_KNOWN_RUNS: f32 = 8.0;
/// One time counts at most this factor: a page fault or a stalled process says nothing about rounds.
const MOST_AT_ONCE: f32 = 2.0;

/// How long rounds take, by their rows and sequences, and steps of the MTP chain.
///
/// Measured at start with short contexts: rounds of one row a sequence, and of as few sequences as hold the rows. Between
/// these a round's time is taken to grow evenly with its sequences, each of which has a state to read. Times of real
/// rounds correct this twice: one factor for all, since contexts grow and clocks change, and one for each size.
#[derive(Debug, Clone, Default)]
pub struct StepTimes {
    /// Rounds of one row a sequence: by rows.
    one_row: Curve,
    /// Rounds of one sequence, or of as few as hold the rows: by rows.
    packed: Curve,
    /// A step of the chain: by sequences.
    draft: Curve,
    /// Logarithm of the factor for all rounds.
    pace: f32,
    /// By sequences and rows, both as sizes.
    special: BTreeMap<(usize, usize), Special>,
    /// Logarithm of the factor for all steps of the chain.
    draft_pace: f32,
}

impl StepTimes {
    /// Nothing measured.
    pub fn new() -> Self {
        Self::default()
    }

    /// Rounds worth measuring at start for a model of so many slots and rows, as sequences and rows: with these every
    /// other one can be estimated.
    pub fn to_measure(max_sequences: usize, max_rows: usize) -> Vec<(usize, usize)> {
        let mut rounds = Vec::new();
        let mut rows = 1;
        while rows <= max_rows {
            let packed = rows.div_ceil(PACKED_ROWS);
            let wanted = [packed, rows].into_iter().filter(|sequences| *sequences <= max_sequences);
            rounds.extend(wanted.map(|sequences| (sequences, rows)));
            rows = size(rows + 1);
        }
        rounds.dedup();
        rounds
    }

    /// A round measured at start. Either of one row a sequence or of several; other mixtures are for
    /// [`StepTimes::record`].
    pub fn measured(&mut self, sequences: usize, rows: usize, us: f32) {
        if sequences == rows {
            self.one_row.set(size(rows), us);
        }
        if sequences == rows.div_ceil(PACKED_ROWS) {
            self.packed.set(size(rows), us);
        }
    }

    /// A step of the chain measured at start.
    pub fn draft_measured(&mut self, sequences: usize, us: f32) {
        self.draft.set(size(sequences), us);
    }

    /// A round that was run for requests.
    pub fn record(&mut self, sequences: usize, rows: usize, us: f32) {
        let surprise = surprise(us, self.round_us(sequences, rows));
        let special = self.special.entry((size(sequences), size(rows))).or_default();
        let known = special.runs / (special.runs + HALF_KNOWN_RUNS);
        special.factor += (NEW_SIZE_WEIGHT + (SIZE_WEIGHT - NEW_SIZE_WEIGHT) * known) * surprise;
        special.runs += 1.0;
        self.pace += PACE_WEIGHT * known * surprise;
    }

    /// A step of the chain that was run for requests.
    pub fn record_draft(&mut self, sequences: usize, us: f32) {
        self.draft_pace += PACE_WEIGHT * surprise(us, self.draft_us(sequences));
    }

    /// Expected time of a round, microseconds.
    pub fn round_us(&self, sequences: usize, rows: usize) -> f32 {
        let special = self.special.get(&(size(sequences), size(rows))).map_or(0.0, |special| special.factor);
        self.at_start_us(sequences, rows) * (self.pace + special).exp()
    }

    /// Expected time of a step of the chain for so many sequences, microseconds.
    pub fn draft_us(&self, sequences: usize) -> f32 {
        let at_start = self.draft.at(size(sequences));
        let us = at_start.unwrap_or_else(|| GUESSED_DRAFT_SHARE * self.at_start_us(1, 1));
        us * self.draft_pace.exp()
    }

    /// Time of a round by what was measured at start.
    fn at_start_us(&self, sequences: usize, rows: usize) -> f32 {
        let rows = size(rows);
        match (self.packed.at(rows), self.one_row.at(rows)) {
            (Some(packed), Some(one_row)) => {
                let fewest = rows.div_ceil(PACKED_ROWS);
                let share = sequences.saturating_sub(fewest) as f32 / (rows - fewest).max(1) as f32;
                packed + (one_row - packed) * share.min(1.0)
            }
            (Some(us), None) | (None, Some(us)) => us,
            (None, None) => GUESSED_ROUND_US * (1.0 + GUESSED_ROW_SHARE * rows as f32),
        }
    }
}

/// What is known of one size.
#[derive(Debug, Clone, Copy, Default)]
struct Special {
    /// Logarithm of its factor.
    factor: f32,
    runs: f32,
}

/// The size that a number of rows or sequences counts as.
fn size(count: usize) -> usize {
    if count <= EXACT {
        count
    } else if count <= COARSE {
        count.next_multiple_of(EXACT)
    } else {
        count.next_multiple_of(COARSE)
    }
}

/// Logarithm of found over expected, bounded; 0 where one of them is no time.
fn surprise(found_us: f32, expected_us: f32) -> f32 {
    let ratio = found_us / expected_us;
    if ratio.is_finite() && ratio > 0.0 {
        ratio.ln().clamp(-MOST_AT_ONCE.ln(), MOST_AT_ONCE.ln())
    } else {
        0.0
    }
}

/// Times by size.
#[derive(Debug, Clone, Default)]
struct Curve {
    points: BTreeMap<usize, f32>,
}

impl Curve {
    fn set(&mut self, size: usize, us: f32) {
        self.points.insert(size, us);
    }

    /// The measured time, or on the line between its neighbours; beyond the last point in proportion to it. `None` where
    /// nothing was measured.
    fn at(&self, size: usize) -> Option<f32> {
        let below = self.points.range(..=size).next_back();
        let above = self.points.range(size..).next();
        match (below, above) {
            (Some((low, low_us)), Some((high, high_us))) => {
                let share = (size - low) as f32 / (high - low).max(1) as f32;
                Some(low_us + (high_us - low_us) * share)
            }
            (Some((low, us)), None) => Some(us * size as f32 / (*low).max(1) as f32),
            (None, above) => above.map(|(_, us)| *us),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_those_of_the_recorded_rounds() {
        let mut sizes: Vec<usize> = (1..=80).map(size).collect();
        sizes.dedup();
        assert_eq!(sizes, [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 64, 96]);
    }

    #[test]
    fn every_size_is_measured_with_few_and_with_many_sequences() {
        let rounds = StepTimes::to_measure(8, 64);
        let many: Vec<_> = (1..=8).map(|rows| (rows, rows)).collect();
        assert!(many.iter().all(|round| rounds.contains(round)));
        let few = [(1, 2), (1, 8), (1, 16), (2, 24), (2, 32), (4, 64)];
        assert!(few.iter().all(|round| rounds.contains(round)), "{rounds:?}");
        assert_eq!(rounds.len(), 8 + 7 + 4, "{rounds:?}");
        assert_eq!(StepTimes::to_measure(1, 1), [(1, 1)]);
    }

    #[test]
    fn between_few_and_many_sequences_time_grows_evenly() {
        let mut times = StepTimes::new();
        times.measured(1, 4, 100.0);
        times.measured(4, 4, 160.0);
        let found: Vec<f32> = (1..=4).map(|sequences| times.round_us(sequences, 4)).collect();
        assert_eq!(found, [100.0, 120.0, 140.0, 160.0]);
    }

    #[test]
    fn longer_contexts_slow_all_rounds_and_one_outlier_none_for_long() {
        let mut times = StepTimes::new();
        for rows in 1..=8 {
            times.measured(1, rows, 1000.0 + 10.0 * rows as f32);
        }
        times.record(1, 1, 1e9);
        assert!(times.round_us(1, 1) < 1250.0);
        (0..50).for_each(|_| times.record(1, 2, 1020.0));
        (0..100).for_each(|_| times.record(1, 2, 2.0 * 1020.0));
        assert!((times.round_us(1, 2) - 2040.0).abs() < 1.0);
        let other = times.round_us(1, 8);
        assert!(other > 1.4 * 1080.0, "a size that was not run has become slower too: {other}");
    }

    #[test]
    fn guesses_are_there_before_anything_is_measured() {
        let times = StepTimes::new();
        assert!(times.round_us(1, 2) > times.round_us(1, 1) && times.draft_us(3) > 0.0);
        let mut times = StepTimes::new();
        times.draft_measured(2, 50.0);
        times.record_draft(2, 100.0);
        let us = times.draft_us(2);
        assert!(us > 50.0 && us < 100.0, "{us}");
    }

    proptest! {
        /// Whatever is measured and recorded: times are positive numbers, and a size that is run again and again is
        /// known in the end.
        #[test]
        fn times_are_learned(
            measured in prop::collection::vec((1usize..40, 1.0f32..1e6), 0..20),
            recorded in prop::collection::vec((1usize..8, 1usize..80, prop_oneof![1.0f32..1e6, Just(f32::NAN), Just(0.0)]), 0..50),
            (sequences, drafts, us) in (1usize..8, 0usize..40, 1.0f32..1e6),
        ) {
            let mut times = StepTimes::new();
            for (rows, us) in measured {
                times.measured(rows, rows, us);
                times.measured(1, rows, us);
            }
            for (sequences, rows, us) in recorded {
                times.record(sequences, rows, us);
            }
            for (sequences, rows) in StepTimes::to_measure(8, 80) {
                let us = times.round_us(sequences, rows);
                prop_assert!(us.is_finite() && us > 0.0);
            }
            for _ in 0..400 {
                times.record(sequences, sequences + drafts, us);
            }
            let found = times.round_us(sequences, sequences + drafts);
            prop_assert!((found / us - 1.0).abs() < 0.01, "{} instead of {}", found, us);
        }
    }
}
