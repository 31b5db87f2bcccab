//! The state of one sequence: where it stands, what it has seen, when it ends.

use std::borrow::Cow;
use std::collections::HashMap;

use qwill_contract::{FinishReason, Request};
use qwill_device::RING_TOKENS;
use qwill_device::batch::MAX_ROUND_ROWS;

use crate::guided::Guided;
use crate::speculation::Drafter;

/// Tokens that penalties look at: each once, in order of first appearance, so that the list depends on the
/// sequence alone.
#[derive(Debug, Clone, Default)]
pub(crate) struct SeenTokens {
    counts: Vec<(u32, u32)>,
    index: HashMap<u32, usize>,
}

impl SeenTokens {
    /// Tokens of a prompt, generated zero times.
    pub(crate) fn of_prompt(prompt: &[u32]) -> Self {
        let mut seen = Self::default();
        for token in prompt {
            seen.entry(*token);
        }
        seen
    }

    /// Counts a generated token.
    pub(crate) fn generated(&mut self, token: u32) {
        let at = self.entry(token);
        self.counts[at].1 += 1;
    }

    /// `(id, occurrences in the generated text)`.
    pub(crate) fn counts(&self) -> &[(u32, u32)] {
        &self.counts
    }

    /// [`SeenTokens::counts`] as it would be with more tokens generated.
    fn with(&self, tokens: &[u32]) -> Vec<(u32, u32)> {
        let mut counts = self.counts.clone();
        for token in tokens {
            let new = || counts[self.counts.len()..].iter().position(|(id, _)| id == token);
            let at = self.index.get(token).copied().or_else(|| new().map(|at| self.counts.len() + at));
            match at {
                Some(at) => counts[at].1 += 1,
                None => counts.push((*token, 1)),
            }
        }
        counts
    }

    fn entry(&mut self, token: u32) -> usize {
        *self.index.entry(token).or_insert_with(|| {
            self.counts.push((token, 0));
            self.counts.len() - 1
        })
    }
}

/// Which ids end a sequence, and how long it may or must become.
#[derive(Debug, Clone)]
pub(crate) struct EndRule {
    /// Ids that end it.
    pub(crate) stop_ids: Vec<u32>,
    /// Tokens that must come before a stop id can be drawn.
    pub(crate) min_tokens: usize,
    /// Tokens at most.
    pub(crate) new_tokens: usize,
    /// Ids from here on have no text and are no rows of the embedding.
    pub(crate) vocab_limit: usize,
}

impl EndRule {
    pub(crate) fn of(
        request: &Request,
        eos_token_ids: &[u32],
        new_tokens: usize,
        vocab_limit: usize,
    ) -> Self {
        let sampling = &request.sampling;
        let eos = if sampling.ignore_eos { &[] } else { eos_token_ids };
        let mut stop_ids = [eos, sampling.stop_token_ids.as_slice()].concat();
        stop_ids.sort_unstable();
        stop_ids.dedup();
        Self { stop_ids, min_tokens: sampling.min_tokens, new_tokens, vocab_limit }
    }
}

/// One choice of a request, from admission to its end.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sequence {
    /// State slot.
    pub(crate) slot: usize,
    /// Physical pages of the whole sequence; the first ones may be shared with other choices.
    pub(crate) pages: Vec<u32>,
    /// Tokens in the caches: position of the next row.
    pub(crate) position: usize,
    /// Entries in the recurrent state's ring.
    pub(crate) ring_len: usize,
    /// Tokens to feed next: drawn, not yet in the caches. Empty while the prompt is processed.
    pub(crate) pending: Vec<u32>,
    /// Guesses of what is drawn after the pending token, for the next round to verify.
    pub(crate) drafts: Vec<u32>,
    /// From the first token on, where anything drafts.
    pub(crate) drafter: Option<Drafter>,
    /// Where the request has a guide.
    pub(crate) guided: Option<Guided>,
    /// The tokens drawn.
    pub(crate) output: Vec<u32>,
    /// For penalties; stays empty where no penalty is asked for.
    pub(crate) seen: SeenTokens,
    /// Key of the draws.
    pub(crate) seed: u64,
    /// Whether any penalty is asked for.
    pub(crate) counts_tokens: bool,
}

impl Sequence {
    pub(crate) fn new(request: &Request, choice: usize, slot: usize, pages: Vec<u32>) -> Self {
        let sampling = &request.sampling;
        let repetition = sampling.repetition_penalty != 1.0;
        let seen = if repetition { SeenTokens::of_prompt(&request.prompt) } else { SeenTokens::default() };
        Self {
            slot,
            pages,
            position: 0,
            ring_len: 0,
            pending: Vec::new(),
            drafts: Vec::new(),
            drafter: None,
            guided: request.guide.clone().map(Guided::new),
            output: Vec::new(),
            seen,
            seed: sampling.seed.wrapping_add(choice as u64),
            counts_tokens: repetition
                || sampling.presence_penalty != 0.0
                || sampling.frequency_penalty != 0.0,
        }
    }

    /// Notes that the prompt up to `position` is in the caches; prefill leaves the ring empty.
    pub(crate) fn prefilled(&mut self, position: usize) {
        self.position = position;
        self.ring_len = 0;
    }

    /// Rows that the next round may have: the pending token's and those of drafts. Rows do not cross a fold of the
    /// ring; what could be drawn after the last token that may be generated is of no use, and its row has no page.
    pub(crate) fn max_round_rows(&self, rule: &EndRule) -> usize {
        let ring_room = if self.ring_len == RING_TOKENS { RING_TOKENS } else { RING_TOKENS - self.ring_len };
        let tokens_left = rule.new_tokens.saturating_sub(self.generated());
        MAX_ROUND_ROWS.min(ring_room).min(tokens_left)
    }

    /// Gives up the drafts from the first one on that its guide forbids.
    pub(crate) fn cut_drafts(&mut self) {
        if let Some(guided) = &mut self.guided {
            self.drafts.truncate(guided.count_allowed(&self.drafts));
        }
    }

    /// Tokens of its next round.
    pub(crate) fn round_tokens(&self) -> Vec<u32> {
        [&self.pending[..], &self.drafts].concat()
    }

    /// Takes what was drawn after each row of a step: behind a prompt one token, in a round one for the pending token
    /// and for each draft. The pending token's row is right, and a draft's is while it is what was drawn before it;
    /// the first draw that is no draft is the next token to feed. The caches keep the right rows, all others will be
    /// overwritten. Says why the sequence ends, if it does; nothing after its end is taken.
    pub(crate) fn accept(&mut self, drawn: &[u32], rule: &EndRule) -> Option<FinishReason> {
        let drafts = std::mem::take(&mut self.drafts);
        for (row, token) in drawn.iter().enumerate() {
            self.pending_is_fed();
            if let Some(end) = self.take(*token, rule) {
                return Some(end);
            }
            if drafts.get(row) != Some(token) {
                return None;
            }
        }
        None
    }

    /// Notes that the pending token is in the caches. A full ring was folded before.
    fn pending_is_fed(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let before = if self.ring_len == RING_TOKENS { 0 } else { self.ring_len };
        self.ring_len = before + self.pending.len();
        self.position += self.pending.len();
        self.pending.clear();
    }

    /// Takes a drawn token; it is the next one to feed.
    fn take(&mut self, token: u32, rule: &EndRule) -> Option<FinishReason> {
        if token as usize >= rule.vocab_limit {
            // Only a broken device draws it.
            let message = format!("the model drew token {token}, the vocabulary has {}", rule.vocab_limit);
            return Some(FinishReason::Error { message });
        }
        self.output.push(token);
        if self.counts_tokens {
            self.seen.generated(token);
        }
        self.pending.push(token);
        // Before `min_tokens` stop ids are banned, so one that comes is a real end.
        if rule.stop_ids.binary_search(&token).is_ok() {
            return Some(FinishReason::Stop { token });
        }
        (self.generated() >= rule.new_tokens).then_some(FinishReason::Length)
    }

    /// Number of tokens drawn.
    pub(crate) fn generated(&self) -> usize {
        self.output.len()
    }

    /// Absolute position of the token to be drawn after the pending one and `drafts` drafts.
    pub(crate) fn draw_position(&self, drafts: usize) -> u64 {
        (self.position + self.pending.len() + drafts) as u64
    }

    /// What penalties look at after `drafts` drafts.
    pub(crate) fn seen_after(&self, drafts: usize) -> Cow<'_, [(u32, u32)]> {
        if drafts == 0 || !self.counts_tokens {
            Cow::Borrowed(self.seen.counts())
        } else {
            Cow::Owned(self.seen.with(&self.drafts[..drafts]))
        }
    }
}

#[cfg(test)]
mod tests {
    use qwill_contract::{CancelFlag, SamplingParams};

    use super::*;

    fn request(sampling: SamplingParams) -> Request {
        let prompt = vec![5, 6, 5].into();
        Request {
            id: "r".into(),
            prompt,
            cache_salt: None,
            priority: 0,
            sampling,
            choices: 1,
            guide: None,
            prompt_logprobs: None,
            cancel: CancelFlag::default(),
            choice_cancel: Vec::new(),
        }
    }

    fn rule() -> EndRule {
        EndRule { stop_ids: vec![], min_tokens: 0, new_tokens: 9, vocab_limit: 100 }
    }

    #[test]
    fn drafts_are_kept_while_they_are_what_is_drawn() {
        let accepted = |drafts: &[u32], drawn: &[u32], rule: EndRule| {
            let mut sequence = Sequence::new(&request(SamplingParams::default()), 0, 0, Vec::new());
            sequence.prefilled(3);
            sequence.accept(&[1], &rule);
            sequence.drafts = drafts.to_vec();
            let end = sequence.accept(drawn, &rule);
            assert!(sequence.drafts.is_empty());
            (sequence.position, sequence.ring_len, sequence.generated(), sequence.pending, end)
        };
        assert_eq!(accepted(&[], &[7], rule()), (4, 1, 2, vec![7], None));
        assert_eq!(accepted(&[8, 9], &[7, 5, 5], rule()), (4, 1, 2, vec![7], None));
        assert_eq!(accepted(&[7, 9], &[7, 5, 5], rule()), (5, 2, 3, vec![5], None));
        assert_eq!(accepted(&[7, 9], &[7, 9, 4], rule()), (6, 3, 4, vec![4], None));
        assert_eq!(
            accepted(&[7, 9, 4], &[7, 9], rule()),
            (5, 2, 3, vec![9], None),
            "a round may have fewer rows"
        );
        let stop = EndRule { stop_ids: vec![9], ..rule() };
        let end = Some(FinishReason::Stop { token: 9 });
        assert_eq!(
            accepted(&[7, 9], &[7, 9, 4], stop),
            (5, 2, 3, vec![9], end),
            "nothing comes after an end"
        );
        let short = EndRule { new_tokens: 2, ..rule() };
        assert_eq!(accepted(&[7, 9], &[7, 9, 4], short), (4, 1, 2, vec![7], Some(FinishReason::Length)));
        let (.., generated, pending, end) = accepted(&[7, 9], &[7, 100, 4], rule());
        assert!(generated == 2 && pending.is_empty() && matches!(end, Some(FinishReason::Error { .. })));
    }

    #[test]
    fn rounds_end_at_a_fold_and_at_the_last_token() {
        let mut sequence = Sequence::new(&request(SamplingParams::default()), 0, 0, Vec::new());
        let long = EndRule { new_tokens: 1000, ..rule() };
        let rows = |sequence: &Sequence, ring_len, rule: &EndRule| {
            Sequence { ring_len, ..sequence.clone() }.max_round_rows(rule)
        };
        sequence.accept(&[1], &long);
        assert_eq!([0, 16, 17, 31, 32].map(|ring_len| rows(&sequence, ring_len, &long)), [16, 16, 15, 1, 16]);
        assert_eq!(rows(&sequence, 0, &rule()), 8, "8 of 9 tokens are left");
    }

    #[test]
    fn the_ring_folds_when_it_is_full() {
        let mut sequence = Sequence::new(&request(SamplingParams::default()), 0, 0, Vec::new());
        sequence.prefilled(3);
        let rule = EndRule { new_tokens: 1000, ..rule() };
        let mut rings = Vec::new();
        for token in 0..2 * RING_TOKENS as u32 + 3 {
            assert_eq!(sequence.draw_position(0), 3 + u64::from(token));
            sequence.accept(&[token], &rule);
            rings.push(sequence.ring_len);
        }
        let full: Vec<usize> =
            rings.iter().enumerate().filter(|(_, len)| **len == RING_TOKENS).map(|(at, _)| at).collect();
        assert_eq!(full, [RING_TOKENS, 2 * RING_TOKENS], "the row after R tokens finds a full ring");
        assert_eq!(sequence.ring_len, 2);
        assert_eq!(sequence.position, 3 + 2 * RING_TOKENS + 2);
    }

    #[test]
    fn stop_ids_come_from_the_model_and_the_request() {
        let rule = |ignore_eos, stop: &[u32]| {
            let sampling = SamplingParams { ignore_eos, stop_token_ids: stop.to_vec(), ..Default::default() };
            EndRule::of(&request(sampling), &[90, 80], 9, 100).stop_ids
        };
        assert_eq!(rule(false, &[7, 80]), [7, 80, 90]);
        assert_eq!(rule(true, &[7]), [7]);
        assert_eq!(rule(true, &[80]), [80], "an ignored end-of-turn token still stops where it is asked for");
    }

    #[test]
    fn a_stop_on_the_last_allowed_token_is_a_stop() {
        let rule = EndRule { stop_ids: vec![9], new_tokens: 2, ..rule() };
        let mut sequence = Sequence::new(&request(SamplingParams::default()), 0, 0, Vec::new());
        assert_eq!(sequence.accept(&[1], &rule), None);
        assert_eq!(sequence.clone().accept(&[9], &rule), Some(FinishReason::Stop { token: 9 }));
        assert_eq!(sequence.accept(&[1], &rule), Some(FinishReason::Length));
    }

    #[test]
    fn penalties_see_the_prompt_only_through_repetition() {
        let seen = |sampling: SamplingParams| {
            let mut sequence = Sequence::new(&request(sampling), 0, 0, Vec::new());
            sequence.drafts = vec![8, 6];
            assert_eq!(sequence.seen_after(0), sequence.seen.counts());
            let foreseen = sequence.seen_after(2).into_owned();
            sequence.accept(&[8], &rule());
            sequence.accept(&[6], &rule());
            assert_eq!(foreseen, sequence.seen.counts());
            sequence.accept(&[6], &rule());
            sequence.seen.counts().to_vec()
        };
        assert_eq!(seen(SamplingParams::default()), []);
        assert_eq!(seen(SamplingParams { presence_penalty: 0.5, ..Default::default() }), [(8, 1), (6, 2)]);
        let repetition = SamplingParams { repetition_penalty: 1.2, ..Default::default() };
        assert_eq!(seen(repetition), [(5, 0), (6, 2), (8, 1)]);
    }
}
