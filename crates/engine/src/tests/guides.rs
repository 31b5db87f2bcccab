//! Texts that a guide shapes: nothing else is drawn, and neither drafts nor company change what is.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use proptest::prelude::*;
use qwill_contract::{Allowed, FinishReason, Guide, GuideError, Request, SamplingParams};

use super::client::request;
use super::drafts::{any_speculation, oracle};
use super::harness::{Bench, EOS, VOCAB, options};
use crate::EngineOptions;

/// A guide without sense: what may come next is a hash of what came before. After an error it is of no use any more.
#[derive(Debug, Clone, Default)]
pub(crate) struct HashGuide {
    seed: u64,
    /// Tokens before anything is forbidden.
    free_tokens: usize,
    /// Tokens after which only the end may come.
    most_tokens: usize,
    /// After so many tokens it fails.
    fails_after: Option<usize>,
    /// Fails once it is asked what is forced.
    fails_when_asked_ahead: bool,
    text: Vec<u32>,
    broken: bool,
}

impl HashGuide {
    fn hash(&self, token: u32) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.seed, &self.text, token).hash(&mut hasher);
        hasher.finish()
    }

    fn is_allowed(&self, token: u32) -> bool {
        let tokens = self.text.len();
        if tokens < self.free_tokens {
            return true;
        }
        if self.text.contains(&EOS) || tokens >= self.most_tokens {
            return token == EOS;
        }
        // Often one alone, sometimes many.
        let one = self.hash(u32::MAX);
        token == (one % VOCAB as u64) as u32 || (!one.is_multiple_of(3) && self.hash(token).is_multiple_of(4))
    }

    fn check(&mut self) -> Result<(), GuideError> {
        self.broken |= self.fails_after == Some(self.text.len());
        if self.broken { Err(GuideError("as planned".to_owned())) } else { Ok(()) }
    }
}

impl Guide for HashGuide {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, GuideError> {
        self.check()?;
        if self.text.len() < self.free_tokens {
            return Ok(Allowed::All);
        }
        for token in (0..VOCAB as u32).filter(|token| self.is_allowed(*token)) {
            mask[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(Allowed::Masked)
    }

    fn count_allowed(&mut self, tokens: &[u32]) -> Result<usize, GuideError> {
        self.check()?;
        let mut ahead = self.clone();
        let accepted = tokens.iter().take_while(|token| ahead.accept(**token).is_ok());
        Ok(accepted.count())
    }

    fn accept(&mut self, token: u32) -> Result<(), GuideError> {
        self.check()?;
        if !self.is_allowed(token) {
            return Err(GuideError(format!("{token} is forbidden")));
        }
        self.text.push(token);
        Ok(())
    }

    fn roll_back(&mut self, tokens: usize) -> Result<(), GuideError> {
        // It may stand where it fails, as long as it was not asked there.
        if self.broken {
            return Err(GuideError("as planned".to_owned()));
        }
        self.text.truncate(self.text.len() - tokens);
        Ok(())
    }

    fn forced(&mut self) -> Vec<u32> {
        self.broken |= self.fails_when_asked_ahead;
        // The second one is a guess.
        let mut allowed = (0..VOCAB as u32).filter(|token| self.is_allowed(*token));
        match (allowed.next(), allowed.next()) {
            (Some(only), None) => vec![only, self.hash(only) as u32 % VOCAB as u32],
            _ => Vec::new(),
        }
    }

    fn boxed_clone(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }
}

pub(crate) fn any_guide() -> impl Strategy<Value = HashGuide> {
    let fails_after = prop::option::weighted(0.2, 0usize..40);
    (any::<u64>(), 0usize..20, 0usize..60, fails_after, any::<bool>()).prop_map(
        |(seed, free_tokens, most_tokens, fails_after, fails_when_asked_ahead)| HashGuide {
            seed,
            free_tokens,
            most_tokens,
            fails_after,
            fails_when_asked_ahead,
            ..HashGuide::default()
        },
    )
}

fn guided(guide: &HashGuide, sampling: SamplingParams) -> Request {
    Request { guide: Some(guide.boxed_clone()), ..request(&[1; 70], sampling) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_token_is_allowed_whatever_drafts(
        guide in any_guide(),
        min_tokens in 0usize..40,
        ignore_eos: bool,
        seed: u64,
        speculation in any_speculation(),
        right_of_8 in 0usize..=8,
    ) {
        let sampling = SamplingParams {
            temperature: 1.0, max_tokens: 50, min_tokens, ignore_eos, seed, ..SamplingParams::default()
        };
        let asked = guided(&guide, sampling);
        let plain = Bench::answer(&options(), asked.clone());
        let mut walk = guide.clone();
        let ids = plain.ids(0);
        for token in &ids {
            prop_assert!(walk.is_allowed(*token), "{token} in {ids:?}");
            walk.text.push(*token);
        }
        match &plain.choices[0].end {
            Some(FinishReason::Guide { message }) => {
                prop_assert_eq!(message, "as planned");
                prop_assert_eq!(Some(ids.len()), guide.fails_after);
            }
            Some(FinishReason::Stop { token }) => prop_assert!(!ignore_eos && *token == EOS),
            end => prop_assert_eq!(end, &Some(FinishReason::Length)),
        }

        let mut bench = Bench::new(EngineOptions { speculation, ..options() });
        bench.engine.model.oracle = Some(oracle([(&asked, &plain)], right_of_8));
        let client = bench.submit(asked.clone());
        bench.finish();
        prop_assert_eq!(client.wait(), plain);
    }
}

/// A text that has to end before `min_tokens` ends.
#[test]
fn what_may_come_counts_more_than_a_least_length() {
    let guide = HashGuide { most_tokens: 3, ..HashGuide::default() };
    let sampling = SamplingParams { min_tokens: 20, max_tokens: 30, ..SamplingParams::default() };
    let answer = Bench::answer(&options(), guided(&guide, sampling));
    assert_eq!(answer.choices[0].end, Some(FinishReason::Stop { token: EOS }));
    assert!(answer.ids(0).len() <= 4);
}

#[test]
fn a_guide_that_panics_or_allows_nothing_ends_its_request_alone() {
    #[derive(Debug, Clone)]
    struct Bad {
        panics: bool,
    }
    impl Guide for Bad {
        fn allowed(&mut self, _mask: &mut [u32]) -> Result<Allowed, GuideError> {
            assert!(!self.panics, "as planned");
            Ok(Allowed::Masked)
        }
        fn count_allowed(&mut self, _tokens: &[u32]) -> Result<usize, GuideError> {
            Ok(0)
        }
        fn accept(&mut self, _token: u32) -> Result<(), GuideError> {
            Ok(())
        }
        fn roll_back(&mut self, _tokens: usize) -> Result<(), GuideError> {
            Ok(())
        }
        fn forced(&mut self) -> Vec<u32> {
            Vec::new()
        }
        fn boxed_clone(&self) -> Box<dyn Guide> {
            Box::new(self.clone())
        }
    }
    let sampling = SamplingParams { max_tokens: 30, ..SamplingParams::default() };
    let plain = Bench::answer(&options(), request(&[2; 10], sampling.clone()));
    for panics in [false, true] {
        let mut bench = Bench::new(options());
        let bad = Request { guide: Some(Box::new(Bad { panics })), ..request(&[1; 70], sampling.clone()) };
        let bad = bench.submit(bad);
        let mate = bench.submit(request(&[2; 10], sampling.clone()));
        bench.finish();
        let end = bad.wait().choices[0].end.clone();
        assert!(matches!(end, Some(FinishReason::Guide { .. })), "{end:?}");
        assert!(mate.wait().same_answer(&plain));
    }
}
