use super::{Source, StepTimes};

/// What a sequence could draft in the coming round.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Where its drafts would come from.
    pub source: Source,
    /// Chance that the first, the first two, … drafts are accepted, never ascending; as many as it may have.
    pub survival: Vec<f32>,
}

impl Candidate {
    /// A sequence that cannot draft.
    pub fn none() -> Self {
        Self { source: Source::Mtp, survival: Vec::new() }
    }

    /// Tokens that a round with all of its drafts is expected to bring.
    pub fn expected_tokens(&self) -> f32 {
        1.0 + self.survival.iter().sum::<f32>()
    }

    /// The candidate that promises more; the first one where both promise the same.
    #[must_use]
    pub fn better(self, other: Self) -> Self {
        if other.expected_tokens() > self.expected_tokens() { other } else { self }
    }

    /// Whether its drafts are links of a chain.
    fn chained(&self) -> bool {
        self.source == Source::Mtp && !self.survival.is_empty()
    }
}

/// How much more than a round without drafts one with drafts must promise: the expectations are no better than that. On an
/// H200, eight sequences of the 27B whose drafts promised 3 % and more got 8 % fewer tokens for them.
const LEAST_GAIN: f32 = 0.1;

/// Decides how many drafts every sequence of a round gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DepthPolicy {
    /// Rows of a round at most; never fewer than its sequences.
    pub max_rows: usize,
    /// Whether to decide at all; otherwise every sequence gets as many drafts as it may have, or, where they do not all
    /// fit, those with the most get fewer.
    pub adaptive: bool,
}

/// One more draft of a sequence.
#[derive(Debug, Clone, Copy)]
struct Step {
    gain: f32,
    depth: usize,
    sequence: usize,
    chained: bool,
}

impl DepthPolicy {
    /// The number of drafts of each sequence for which the round is expected to bring the most tokens per second: those
    /// of all sequences together, over the time of the round and of the MTP chain that drafts for it. Where several are
    /// as good, the one with the fewest rows; none at all where the gain is small.
    ///
    /// A draft's gain is the chance that it and all before it are accepted, which falls along a sequence, so for a
    /// given number of rows the largest gains of all sequences are the best choice. What is left is to look at every
    /// number of rows (their times jump) and every length of the chain (whose steps cost the same for one sequence and
    /// for all).
    pub fn depths(&self, candidates: &[Candidate], times: &StepTimes) -> Vec<usize> {
        let sequences = candidates.len();
        let room = self.max_rows.saturating_sub(sequences);
        if !self.adaptive {
            return as_many_as_fit(candidates, room);
        }
        let steps = steps(candidates);
        let round_us: Vec<f32> =
            (0..=room.min(steps.len())).map(|drafts| times.round_us(sequences, sequences + drafts)).collect();
        let drafting = candidates.iter().filter(|candidate| candidate.chained()).count();
        let longest_chain =
            steps.iter().filter(|step| step.chained).map(|step| step.depth).max().unwrap_or(0);

        let (mut best_rate, mut best) = (f32::MIN, (0, 0));
        for chain in 0..=longest_chain {
            let chain_us = if chain == 0 { 0.0 } else { chain as f32 * times.draft_us(drafting) };
            let gains = usable(&steps, chain).map(|step| step.gain);
            let mut tokens = sequences as f32;
            for ((drafts, us), gain) in round_us.iter().enumerate().zip(std::iter::once(0.0).chain(gains)) {
                tokens += gain;
                let handicap = if (chain, drafts) == (0, 0) { 1.0 + LEAST_GAIN } else { 1.0 };
                let rate = handicap * tokens / (us + chain_us);
                if rate > best_rate {
                    (best_rate, best) = (rate, (chain, drafts));
                }
            }
        }
        let mut depths = vec![0; sequences];
        for step in usable(&steps, best.0).take(best.1) {
            depths[step.sequence] = step.depth;
        }
        depths
    }
}

/// All drafts, cut to the largest common number with which they fit.
fn as_many_as_fit(candidates: &[Candidate], room: usize) -> Vec<usize> {
    let cut = |most: usize| candidates.iter().map(move |candidate| candidate.survival.len().min(most));
    let longest = cut(usize::MAX).max().unwrap_or(0);
    let most = (0..=longest).rev().find(|most| cut(*most).sum::<usize>() <= room).unwrap_or(0);
    cut(most).collect()
}

/// All possible drafts, the most promising first; along a sequence in their order.
fn steps(candidates: &[Candidate]) -> Vec<Step> {
    let mut steps = Vec::new();
    for (sequence, candidate) in candidates.iter().enumerate() {
        let drafts = candidate.survival.iter().enumerate();
        let chained = candidate.chained();
        steps.extend(drafts.map(|(at, gain)| Step { gain: *gain, depth: at + 1, sequence, chained }));
    }
    steps.sort_by(|a, b| b.gain.total_cmp(&a.gain).then(a.depth.cmp(&b.depth)));
    steps
}

/// Those that a chain of a length reaches.
fn usable(steps: &[Step], chain: usize) -> impl Iterator<Item = &Step> {
    steps.iter().filter(move |step| !step.chained || step.depth <= chain)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Expected tokens a second of a choice, from the words.
    fn rate(candidates: &[Candidate], depths: &[usize], times: &StepTimes) -> f64 {
        let drafts: usize = depths.iter().sum();
        let gains =
            candidates.iter().zip(depths).flat_map(|(candidate, depth)| &candidate.survival[..*depth]);
        let tokens = candidates.len() as f64 + gains.map(|gain| f64::from(*gain)).sum::<f64>();
        let drafting = candidates
            .iter()
            .filter(|candidate| candidate.source == Source::Mtp && !candidate.survival.is_empty())
            .count();
        let chained = candidates.iter().zip(depths).filter(|(candidate, _)| candidate.source == Source::Mtp);
        let chain_us = match chained.map(|(_, depth)| *depth).max().unwrap_or(0) {
            0 => 0.0,
            chain => chain as f64 * f64::from(times.draft_us(drafting)),
        };
        let round_us = f64::from(times.round_us(candidates.len(), candidates.len() + drafts));
        tokens / (round_us + chain_us)
    }

    fn candidate(source: Source, shares: &[f32]) -> Candidate {
        let mut all_right = 1.0;
        let survival = shares
            .iter()
            .map(|share| {
                all_right *= share;
                all_right
            })
            .collect();
        Candidate { source, survival }
    }

    fn any_candidate(drafts: usize) -> impl Strategy<Value = Candidate> {
        let source = prop::sample::select(&Source::ALL[..]);
        (source, prop::collection::vec(0.0f32..=1.0, 0..=drafts))
            .prop_map(|(source, shares)| candidate(source, &shares))
    }

    /// Measured rounds: any times, jumps and dents included.
    fn any_times() -> impl Strategy<Value = StepTimes> {
        (
            prop::collection::vec(10.0f32..1000.0, 16),
            prop::collection::vec(10.0f32..1000.0, 16),
            1.0f32..300.0,
        )
            .prop_map(|(one_row, packed, draft)| {
                let mut times = StepTimes::new();
                for (at, (one_row_us, packed_us)) in one_row.into_iter().zip(packed).enumerate() {
                    times.measured(at + 1, at + 1, one_row_us);
                    times.measured(1, at + 1, packed_us);
                }
                times.draft_measured(1, draft);
                times
            })
    }

    fn all_depths(candidates: &[Candidate], max_rows: usize) -> Vec<Vec<usize>> {
        let mut all = vec![Vec::new()];
        for candidate in candidates {
            let longer = |depths: &Vec<usize>| {
                let depths = depths.clone();
                (0..=candidate.survival.len()).map(move |depth| [&depths[..], &[depth]].concat())
            };
            all = all.iter().flat_map(longer).collect();
        }
        let drafts_left = max_rows.saturating_sub(candidates.len());
        all.retain(|depths| depths.iter().sum::<usize>() <= drafts_left);
        all
    }

    proptest! {
        #[test]
        fn no_choice_of_depths_is_better(
            candidates in prop::collection::vec(any_candidate(4), 1..5),
            times in any_times(),
            max_rows in 1usize..16,
        ) {
            let policy = DepthPolicy { max_rows, adaptive: true };
            let chosen = policy.depths(&candidates, &times);
            prop_assert!(chosen.iter().sum::<usize>() <= max_rows.saturating_sub(candidates.len()));
            let off = vec![0; candidates.len()];
            // What it is worth to be without drafts is a little more than what it brings.
            let worth = |depths: &[usize]| {
                let handicap = if depths == off { 1.0 + f64::from(LEAST_GAIN) } else { 1.0 };
                handicap * rate(&candidates, depths, &times)
            };
            let found = worth(&chosen);
            for depths in all_depths(&candidates, max_rows).into_iter().chain([off.clone()]) {
                let other = worth(&depths);
                prop_assert!(other <= found * (1.0 + 1e-5), "{:?} gives {}, {:?} {}", depths, other, chosen, found);
            }
        }

        /// Drafts that cost nothing but rows: where every further row costs more than before, fewer are chosen.
        #[test]
        fn slower_rows_never_raise_the_number_of_drafts(
            mut candidates in prop::collection::vec(any_candidate(6), 1..4),
            first_us in 10.0f32..1000.0,
            row_us in prop::collection::vec(0.0f32..50.0, 24),
            slower_us in 0.1f32..50.0,
        ) {
            for candidate in &mut candidates {
                candidate.source = Source::ShortMatch;
            }
            let sequences = candidates.len();
            let drafts = |slower_us: f32| {
                let mut times = StepTimes::new();
                let mut us = first_us;
                for (rows, row_us) in (sequences..).zip(&row_us) {
                    times.measured(1, rows, us + slower_us * (rows - sequences) as f32);
                    us += row_us;
                }
                DepthPolicy { max_rows: 8, adaptive: true }.depths(&candidates, &times).iter().sum::<usize>()
            };
            prop_assert!(drafts(slower_us) <= drafts(0.0));
        }
    }

    /// A card that reads weights most of the time: rows cost little.
    fn card() -> StepTimes {
        let mut times = StepTimes::new();
        for (_, rows) in StepTimes::to_measure(64, 64) {
            times.measured(rows, rows, 20_000.0 + 400.0 * rows as f32);
            times.measured(rows.div_ceil(16), rows, 20_000.0 + 250.0 * rows as f32);
        }
        times.draft_measured(1, 1000.0);
        times
    }

    #[test]
    fn likely_drafts_get_rows_and_unlikely_ones_none() {
        let policy = DepthPolicy { max_rows: 64, adaptive: true };
        let copy = candidate(Source::Copy, &[0.99; 15]);
        let guess = candidate(Source::ShortMatch, &[0.005; 15]);
        assert_eq!(policy.depths(std::slice::from_ref(&copy), &card()), [15]);
        assert_eq!(policy.depths(std::slice::from_ref(&guess), &card()), [0]);
        let depths = policy.depths(&[copy.clone(), guess, Candidate::none()], &card());
        assert!(depths[0] == 15 && depths[2] == 0, "{depths:?}");
        assert!(3 + 15 + depths[1] <= 24, "rows that the copy's do not pay for: {depths:?}");
        let mtp = candidate(Source::Mtp, &[0.74, 0.68, 0.68, 0.71, 0.7, 0.7, 0.7, 0.7]);
        let depth = policy.depths(std::slice::from_ref(&mtp), &card())[0];
        assert!((2..=5).contains(&depth), "as deep as others found best on such a card: {depth}");
        assert_eq!(mtp.clone().better(copy.clone()), copy);
        assert_eq!(copy.clone().better(mtp), copy);
    }

    #[test]
    fn a_slow_chain_is_not_run_and_copies_go_on_without_it() {
        let mut times = card();
        times.draft_measured(1, 15_000.0);
        let candidates = [candidate(Source::Mtp, &[0.6; 8]), candidate(Source::Copy, &[0.99; 14])];
        assert_eq!(DepthPolicy { max_rows: 64, adaptive: true }.depths(&candidates, &times), [0, 14]);
    }

    #[test]
    fn a_full_round_has_no_drafts() {
        let copy = candidate(Source::Copy, &[0.99; 15]);
        assert_eq!(DepthPolicy { max_rows: 3, adaptive: true }.depths(&vec![copy; 3], &card()), [0, 0, 0]);
        assert_eq!(DepthPolicy { max_rows: 3, adaptive: true }.depths(&[], &card()), [0; 0]);
    }

    #[test]
    fn without_a_decision_everybody_drafts_as_much_as_fits() {
        let candidates = [4, 0, 15, 2].map(|drafts| candidate(Source::ShortMatch, &vec![0.001; drafts]));
        let depths = |max_rows| DepthPolicy { max_rows, adaptive: false }.depths(&candidates, &card());
        assert_eq!(depths(64), [4, 0, 15, 2]);
        assert_eq!(depths(4 + 12), [4, 0, 6, 2]);
        assert_eq!(depths(2), [0; 4]);
    }
}
