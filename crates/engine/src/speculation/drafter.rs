use super::{Acceptance, Candidate, LookupIndex, Source, SpecMode};

/// What one sequence drafts with: its own tokens, and what became of its drafts so far.
#[derive(Debug, Clone)]
pub struct Drafter {
    /// `None` where tokens are not looked up.
    lookup: Option<LookupIndex>,
    acceptance: Acceptance,
    /// Where the drafts of the coming round are from.
    source: Source,
}

/// What a sequence may draft for a round, with the tokens where it looked them up.
#[derive(Debug, Clone, PartialEq)]
pub struct Offer {
    /// How good the drafts are expected to be.
    pub candidate: Candidate,
    /// The drafts; empty where the MTP module is to make them.
    pub tokens: Vec<u32>,
}

impl Offer {
    /// Gives up all drafts but the first `count`, where they are known.
    pub fn cut(&mut self, count: usize) {
        if self.candidate.source != Source::Mtp {
            self.tokens.truncate(count);
            self.candidate.survival.truncate(count);
        }
    }
}

impl Drafter {
    /// For a sequence that begins after a prompt.
    pub fn new(mode: SpecMode, prompt: &[u32]) -> Self {
        let lookup = mode.uses_lookup().then(|| LookupIndex::new(prompt));
        Self { lookup, acceptance: Acceptance::of_request(), source: Source::Mtp }
    }

    /// Takes tokens that the sequence has drawn.
    pub fn extend(&mut self, tokens: &[u32]) {
        if let Some(lookup) = &mut self.lookup {
            lookup.extend(tokens);
        }
    }

    /// Where the drafts of the coming round are from.
    pub fn source(&self) -> Source {
        self.source
    }

    /// Notes where the drafts of the coming round are from.
    pub fn draft_from(&mut self, source: Source) {
        self.source = source;
    }

    /// Notes a round in which the first `accepted` of `drafted` drafts were right.
    pub fn record(&mut self, drafted: usize, accepted: usize) {
        self.acceptance.record(self.source, drafted, accepted);
    }

    /// The best of what the tokens, the MTP module, where there is one, and the tokens that a guide forces are expected to
    /// do with at most `most` drafts. `server` is what is expected of any sequence.
    pub fn offer(&self, most: usize, has_mtp: bool, mut forced: Vec<u32>, server: &Acceptance) -> Offer {
        let survival = |source, drafts| self.acceptance.survival(source, drafts, server);
        let mtp = if has_mtp { most } else { 0 };
        let mtp = Candidate { source: Source::Mtp, survival: survival(Source::Mtp, mtp) };
        let found = self.lookup.as_ref().map(|lookup| lookup.draft(most)).unwrap_or_default();
        let source = Source::of_match(found.matched);
        let looked_up = Candidate { source, survival: survival(source, found.tokens.len()) };
        forced.truncate(most);
        let by_guide = Candidate { source: Source::Forced, survival: survival(Source::Forced, forced.len()) };
        let free = if by_guide.survival.is_empty() { mtp } else { by_guide.better(mtp) };
        let candidate = free.better(looked_up);
        let tokens = match candidate.source {
            Source::Mtp => Vec::new(),
            Source::Forced => forced,
            Source::ShortMatch | Source::LongMatch | Source::Copy => found.tokens,
        };
        Offer { candidate, tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_looked_up_and_new_text_is_left_to_the_module() {
        let server = Acceptance::of_server();
        let passage: Vec<u32> = (0..40).collect();
        let mut drafter = Drafter::new(SpecMode::Auto, &passage);
        let offer = drafter.offer(4, true, Vec::new(), &server);
        assert_eq!((offer.candidate.source, offer.candidate.survival.len()), (Source::Mtp, 4));
        assert!(offer.tokens.is_empty());
        let nothing = drafter.offer(4, false, Vec::new(), &server).candidate;
        assert!(nothing.survival.is_empty(), "nothing to copy, no module");
        drafter.extend(&passage[..20]);
        let offer = drafter.offer(3, true, Vec::new(), &server);
        assert_eq!((offer.candidate.source, offer.tokens), (Source::Copy, vec![20, 21, 22]));
        let without = Drafter::new(SpecMode::Mtp, &[passage.clone(), passage].concat());
        assert_eq!(without.offer(3, true, Vec::new(), &server).candidate.source, Source::Mtp);
    }

    #[test]
    fn copies_that_were_wrong_give_way() {
        let mut server = Acceptance::of_server();
        let mut drafter = Drafter::new(SpecMode::Auto, &[1, 2, 3, 4, 1, 2]);
        drafter.draft_from(Source::ShortMatch);
        for _ in 0..50 {
            drafter.record(4, 0);
            server.record(Source::ShortMatch, 4, 0);
        }
        assert_eq!(drafter.offer(4, true, Vec::new(), &server).candidate.source, Source::Mtp);
    }
}
