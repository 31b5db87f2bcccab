use std::fmt;
use std::sync::Arc;

use llguidance::Matcher;
use qwill_contract::{Allowed, Guide, GuideError};

use crate::compile::plain_message;

/// A grammar on its way through a text.
#[derive(Clone)]
pub(crate) struct GrammarGuide {
    /// Behind the text without its end-of-turn tokens.
    matcher: Matcher,
    end_ids: Arc<[u32]>,
    /// End-of-turn tokens behind the text.
    ends: usize,
}

impl fmt::Debug for GrammarGuide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarGuide").field("ends", &self.ends).finish_non_exhaustive()
    }
}

fn failed(error: impl fmt::Display) -> GuideError {
    GuideError(plain_message(&error.to_string()))
}

impl GrammarGuide {
    pub(crate) fn new(matcher: Matcher, end_ids: Arc<[u32]>) -> Self {
        Self { matcher, end_ids, ends: 0 }
    }

    fn may_end(&mut self) -> Result<bool, GuideError> {
        Ok(self.has_ended() || self.matcher.is_accepting().map_err(failed)?)
    }

    /// Whether nothing but an end may come.
    fn has_ended(&self) -> bool {
        self.ends > 0 || (self.matcher.is_stopped() && !self.matcher.is_error())
    }
}

impl Guide for GrammarGuide {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, GuideError> {
        mask.fill(0);
        if self.has_ended() {
            for id in self.end_ids.iter() {
                mask[*id as usize / 32] |= 1 << (id % 32);
            }
        } else {
            let allowed = self.matcher.compute_mask().map_err(failed)?;
            let words = allowed.as_slice();
            let common = words.len().min(mask.len());
            mask[..common].copy_from_slice(&words[..common]);
        }
        Ok(Allowed::Masked)
    }

    fn count_allowed(&mut self, tokens: &[u32]) -> Result<usize, GuideError> {
        let is_end = |id: &u32| self.end_ids.contains(id);
        let text = tokens.iter().take_while(|id| !is_end(id)).count();
        let ends = tokens[text..].iter().take_while(|id| is_end(id)).count();
        if self.has_ended() {
            return Ok(if text == 0 { ends } else { 0 });
        }
        if text > 0 {
            return self.matcher.validate_tokens(&tokens[..text]).map_err(failed);
        }
        Ok(if self.may_end()? { ends } else { 0 })
    }

    fn accept(&mut self, token: u32) -> Result<(), GuideError> {
        if self.end_ids.contains(&token) {
            self.ends += 1;
            return Ok(());
        }
        if self.has_ended() {
            return Err(GuideError(format!("the token {token} comes behind the end of the text")));
        }
        self.matcher.consume_token(token).map_err(failed)
    }

    fn roll_back(&mut self, tokens: usize) -> Result<(), GuideError> {
        let ends = tokens.min(self.ends);
        self.ends -= ends;
        if tokens > ends {
            self.matcher.rollback(tokens - ends).map_err(failed)?;
            // The library keeps its last mask, and takes a place on another way for the one that it was made at.
            self.matcher.invalidate_bias_cache();
        }
        Ok(())
    }

    fn forced(&mut self) -> Vec<u32> {
        if self.has_ended() { Vec::new() } else { self.matcher.compute_ff_tokens() }
    }

    fn boxed_clone(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }
}
