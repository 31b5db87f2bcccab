//! The state of one sequence: where it stands, what it has seen, when it ends.

use std::collections::HashMap;

use qwill_contract::{FinishReason, Request};
use qwill_device::RING_TOKENS;

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
}

impl EndRule {
    pub(crate) fn of(request: &Request, eos_token_ids: &[u32], new_tokens: usize) -> Self {
        let sampling = &request.sampling;
        let eos = if sampling.ignore_eos { &[] } else { eos_token_ids };
        let mut stop_ids = [eos, sampling.stop_token_ids.as_slice()].concat();
        stop_ids.sort_unstable();
        stop_ids.dedup();
        Self { stop_ids, min_tokens: sampling.min_tokens, new_tokens }
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
    /// Tokens drawn.
    pub(crate) generated: usize,
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
            generated: 0,
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

    /// Notes that a round has put the pending rows into the caches. A full ring was folded first.
    pub(crate) fn fed(&mut self) {
        let rows = self.pending.len();
        let before = if self.ring_len == RING_TOKENS { 0 } else { self.ring_len };
        self.ring_len = before + rows;
        self.position += rows;
        self.pending.clear();
    }

    /// Takes a drawn token; it is the next one to feed. Says why the sequence ends, if it does.
    pub(crate) fn accept(&mut self, token: u32, rule: &EndRule) -> Option<FinishReason> {
        self.generated += 1;
        if self.counts_tokens {
            self.seen.generated(token);
        }
        self.pending.push(token);
        // Before `min_tokens` stop ids are banned, so one that comes is a real end.
        if rule.stop_ids.binary_search(&token).is_ok() {
            return Some(FinishReason::Stop { token });
        }
        (self.generated >= rule.new_tokens).then_some(FinishReason::Length)
    }

    /// Absolute position of the token to be drawn next.
    pub(crate) fn draw_position(&self) -> u64 {
        (self.position + self.pending.len()) as u64
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
            sampling,
            choices: 1,
            prompt_logprobs: None,
            cancel: CancelFlag::default(),
            choice_cancel: Vec::new(),
        }
    }

    #[test]
    fn the_ring_folds_when_it_is_full() {
        let mut sequence = Sequence::new(&request(SamplingParams::default()), 0, 0, Vec::new());
        sequence.prefilled(3);
        let rule = EndRule { stop_ids: vec![], min_tokens: 0, new_tokens: 1000 };
        let mut rings = Vec::new();
        for token in 0..2 * RING_TOKENS as u32 + 2 {
            assert_eq!(sequence.draw_position(), 3 + u64::from(token));
            sequence.accept(token, &rule);
            rings.push(sequence.ring_len);
            sequence.fed();
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
            EndRule::of(&request(sampling), &[90, 80], 9).stop_ids
        };
        assert_eq!(rule(false, &[7, 80]), [7, 80, 90]);
        assert_eq!(rule(true, &[7]), [7]);
        assert_eq!(rule(true, &[80]), [80], "an ignored end-of-turn token still stops where it is asked for");
    }

    #[test]
    fn a_stop_on_the_last_allowed_token_is_a_stop() {
        let rule = EndRule { stop_ids: vec![9], min_tokens: 0, new_tokens: 2 };
        let mut sequence = Sequence::new(&request(SamplingParams::default()), 0, 0, Vec::new());
        assert_eq!(sequence.accept(1, &rule), None);
        assert_eq!(sequence.clone().accept(9, &rule), Some(FinishReason::Stop { token: 9 }));
        assert_eq!(sequence.accept(1, &rule), Some(FinishReason::Length));
    }

    #[test]
    fn penalties_see_the_prompt_only_through_repetition() {
        let seen = |sampling: SamplingParams| {
            let mut sequence = Sequence::new(&request(sampling), 0, 0, Vec::new());
            let rule = EndRule { stop_ids: vec![], min_tokens: 0, new_tokens: 9 };
            for token in [6, 8, 6] {
                sequence.accept(token, &rule);
            }
            sequence.seen.counts().to_vec()
        };
        assert_eq!(seen(SamplingParams::default()), []);
        assert_eq!(seen(SamplingParams { presence_penalty: 0.5, ..Default::default() }), [(6, 2), (8, 1)]);
        let repetition = SamplingParams { repetition_penalty: 1.2, ..Default::default() };
        assert_eq!(seen(repetition), [(5, 0), (6, 2), (8, 1)]);
    }
}
