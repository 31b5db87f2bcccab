use std::fmt::Debug;

use thiserror::Error;

/// Says token by token what may come next in a choice's text: a grammar, a limit for thinking.
///
/// A guide stands somewhere in the text, at first before its first token, and what it says depends on nothing but the
/// tokens up to there. The engine draws each token among those that are allowed, and tells the guide what was drawn. It
/// asks ahead along drafts and goes back where they were wrong.
///
/// Where the text may end, the model's end-of-turn tokens are among the allowed ones; where it has to, they alone are, also
/// after one of them: a request that ignores them gets no other text for it.
///
/// An error ends the choice, nothing else.
pub trait Guide: Debug + Send {
    /// Writes down which tokens may come next: bit `t % 32` of word `t / 32` of `mask` for token `t`. There is always one.
    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, GuideError>;
    /// How many of these tokens may come next, one after the other. Stays where it is.
    fn count_allowed(&mut self, tokens: &[u32]) -> Result<usize, GuideError>;
    /// Goes on behind a token, which has to be allowed.
    fn accept(&mut self, token: u32) -> Result<(), GuideError>;
    /// Goes back by so many accepted tokens.
    fn roll_back(&mut self, tokens: usize) -> Result<(), GuideError>;
    /// The tokens by which the text most likely goes on because hardly anything else is allowed: drafts for nothing. None
    /// where there is a choice.
    fn forced(&mut self) -> Vec<u32>;
    /// A guide at the same place that goes its own way.
    fn boxed_clone(&self) -> Box<dyn Guide>;
}

impl Clone for Box<dyn Guide> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// Which tokens may come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowed {
    /// All of them; the mask says nothing.
    All,
    /// Those in the mask.
    Masked,
}

/// A guide cannot go on, as when a grammar takes more work than it may.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct GuideError(pub String);
