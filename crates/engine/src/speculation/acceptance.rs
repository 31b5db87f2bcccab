use std::array;

use super::MAX_DRAFTS;

/// Where a draft came from, as far as it says how likely the draft is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The MTP module.
    Mtp,
    /// Tokens after a match of fewer than 6.
    ShortMatch,
    /// Tokens after a match of 6 to 15.
    LongMatch,
    /// Tokens after a match of 16 and more: most likely a copy under way.
    Copy,
    /// Tokens that a guide leaves hardly any choice about.
    Forced,
}

impl Source {
    /// All sources.
    pub const ALL: [Self; 5] = [Self::Mtp, Self::ShortMatch, Self::LongMatch, Self::Copy, Self::Forced];

    /// Of a lookup, by the length of its match.
    pub fn of_match(matched: usize) -> Self {
        match matched {
            0..6 => Self::ShortMatch,
            6..16 => Self::LongMatch,
            _ => Self::Copy,
        }
    }

    /// Name used in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mtp => "mtp",
            Self::ShortMatch => "lookup_short",
            Self::LongMatch => "lookup_long",
            Self::Copy => "lookup_copy",
            Self::Forced => "forced",
        }
    }

    /// Share of drafts, after right ones, that are right before anything is known. MTP: the 27B's own module on chats,
    /// 0.74, 0.68, 0.68, 0.71 by position. Matches: measured on real text, 0.5 in prose to 0.75 in code after 2 to 11
    /// tokens, 0.82 to 0.93 after 12 and more, above 0.94 in rewritten passages.
    fn first_guess(self) -> f32 {
        match self {
            Self::Mtp => 0.7,
            Self::ShortMatch => 0.5,
            Self::LongMatch => 0.75,
            Self::Copy => 0.9,
            Self::Forced => 0.95,
        }
    }
}

/// Drafts that were tried and drafts that were right, both fading.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    tried: f32,
    right: f32,
}

/// How often drafts are right, by source and place in the chain.
///
/// A draft counts where all before it were right; otherwise its worth was never found out. What was seen fades with
/// every round, also where nothing new is seen, so that an estimate returns to what is expected beforehand: a source
/// that was given up is tried again after a while, the sooner the less it had been tried.
#[derive(Debug, Clone)]
pub struct Acceptance {
    tallies: [[Tally; MAX_DRAFTS]; Source::ALL.len()],
    /// What is left of a round's weight after the next one.
    keep: f32,
}

/// Rounds after which an observation counts half: for a request about a paragraph of text, ...
const REQUEST_HALF_LIFE_ROUNDS: f32 = 64.0;
/// ... and for all requests of a server some minutes of one stream.
const SERVER_HALF_LIFE_ROUNDS: f32 = 4096.0;
/// Observations that the expectation beforehand is worth.
const PRIOR_TRIES: f32 = 4.0;

impl Acceptance {
    /// Of one sequence, or of the requests of one kind.
    pub fn of_request() -> Self {
        Self::fading(REQUEST_HALF_LIFE_ROUNDS)
    }

    /// Of everything that a server does: what a request can expect before its first round.
    pub fn of_server() -> Self {
        Self::fading(SERVER_HALF_LIFE_ROUNDS)
    }

    fn fading(half_life_rounds: f32) -> Self {
        let tallies = [[Tally::default(); MAX_DRAFTS]; Source::ALL.len()];
        Self { tallies, keep: 0.5f32.powf(half_life_rounds.recip()) }
    }

    /// Notes a sequence's round: the first `accepted` of `drafted` drafts were right. A round without drafts counts too.
    pub fn record(&mut self, source: Source, drafted: usize, accepted: usize) {
        let keep = self.keep;
        for tally in self.tallies.iter_mut().flatten() {
            tally.tried *= keep;
            tally.right *= keep;
        }
        let seen = drafted.min(accepted + 1).min(MAX_DRAFTS);
        for (place, tally) in self.tallies[source as usize].iter_mut().enumerate().take(seen) {
            tally.tried += 1.0;
            tally.right += if place < accepted { 1.0 } else { 0.0 };
        }
    }

    /// Chance that the first, the first two, … drafts are right, for `drafts` of them; never ascending. `server` is
    /// what is expected beforehand.
    pub fn survival(&self, source: Source, drafts: usize, server: &Self) -> Vec<f32> {
        let expected = server.shares(source, [source.first_guess(); MAX_DRAFTS]);
        let shares = self.shares(source, expected).into_iter().take(drafts);
        let mut all_right = 1.0;
        shares
            .map(|share| {
                all_right *= share;
                all_right
            })
            .collect()
    }

    /// Share of right drafts at each place, where all before it were right. What is not known of a place is expected to
    /// be as much better or worse than elsewhere as at the place before, since drafts of a copy are right at all
    /// places: otherwise nobody would try the far ones, of which several cost as much as one.
    fn shares(&self, source: Source, expected: [f32; MAX_DRAFTS]) -> [f32; MAX_DRAFTS] {
        let tallies = &self.tallies[source as usize];
        let mut better = 0.0;
        array::from_fn(|place| {
            let Tally { tried, right } = tallies[place];
            let prior = (expected[place] + better).clamp(0.0, 1.0);
            let share = (right + PRIOR_TRIES * prior) / (tried + PRIOR_TRIES);
            better = share - expected[place];
            share
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_source() -> impl Strategy<Value = Source> {
        prop::sample::select(&Source::ALL[..])
    }

    proptest! {
        #[test]
        fn chances_are_chances_whatever_was_seen(
            rounds in prop::collection::vec((any_source(), 0usize..=MAX_DRAFTS, 0usize..=MAX_DRAFTS), 0..200),
            asked in any_source(),
            drafts in 0usize..=MAX_DRAFTS,
        ) {
            let (mut request, mut server) = (Acceptance::of_request(), Acceptance::of_server());
            for (source, drafted, accepted) in rounds {
                request.record(source, drafted, accepted.min(drafted));
                server.record(source, drafted, accepted.min(drafted));
            }
            let survival = request.survival(asked, drafts, &server);
            prop_assert_eq!(survival.len(), drafts);
            let mut before = 1.0;
            for chance in survival {
                prop_assert!((0.0..=before).contains(&chance), "{} after {}", chance, before);
                before = chance;
            }
        }
    }

    #[test]
    fn what_is_seen_often_enough_is_believed() {
        let server = Acceptance::of_server();
        let mut request = Acceptance::of_request();
        for round in 0..400 {
            // Three of four first drafts, two of three second ones after those.
            let accepted = [0, 1, 2, 2][round % 4];
            request.record(Source::Mtp, 2, accepted);
        }
        let survival = request.survival(Source::Mtp, 3, &server);
        assert!((survival[0] - 0.75).abs() < 0.02 && (survival[1] - 0.5).abs() < 0.02, "{survival:?}");
        let untried = survival[2] / survival[1];
        assert!(
            (untried - survival[1] / survival[0]).abs() < 1e-6,
            "never tried, so as the one before: {untried}"
        );
        let other = request.survival(Source::Copy, 1, &server)[0];
        assert!((other - Source::Copy.first_guess()).abs() < 1e-6, "another source: {other}");
    }

    #[test]
    fn a_new_request_expects_what_the_server_has_seen() {
        let mut server = Acceptance::of_server();
        (0..1000).for_each(|_| server.record(Source::ShortMatch, 1, 0));
        let survival = Acceptance::of_request().survival(Source::ShortMatch, 1, &server);
        assert!(survival[0] < 0.01, "{survival:?}");
    }

    #[test]
    fn what_is_no_longer_tried_is_forgotten() {
        let server = Acceptance::of_server();
        let mut request = Acceptance::of_request();
        (0..100).for_each(|_| request.record(Source::Mtp, 4, 0));
        let given_up = request.survival(Source::Mtp, 1, &server)[0];
        (0..600).for_each(|_| request.record(Source::Mtp, 0, 0));
        let later = request.survival(Source::Mtp, 1, &server)[0];
        assert!(given_up < 0.05 && later > 0.6, "{given_up}, later {later}");
    }

    #[test]
    fn matches_are_sorted_by_length() {
        let sources = [2, 5, 6, 15, 16, 32].map(Source::of_match);
        let [short, long, copy] = [Source::ShortMatch, Source::LongMatch, Source::Copy];
        assert_eq!(sources, [short, short, long, long, copy, copy]);
    }
}
