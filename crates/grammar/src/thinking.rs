use std::fmt;
use std::sync::Arc;

use qwill_contract::{Allowed, Guide, GuideError};
use qwill_text::{Markers, Tokenizer};

use crate::spelling::Spelling;

const CLOSE: &str = "</think>";
const CALL: &str = "<tool_call>";

/// A character has no more bytes than this, so none is cut for longer than so many tokens.
const MOST_CHARACTER_BYTES: usize = 4;

/// A model's tokens around thinking.
pub struct ThinkingMarkers {
    tokenizer: Arc<Tokenizer>,
    close: u32,
    newline: u32,
    blank_line: u32,
    end_ids: Arc<[u32]>,
    /// The closing tag in letters.
    close_spelling: Spelling,
    /// The start of a tool call, as a marker or in letters.
    call_spelling: Spelling,
}

impl fmt::Debug for ThinkingMarkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ThinkingMarkers")
    }
}

impl ThinkingMarkers {
    /// `None` for a model without a `</think>` of its own. Looks through the whole vocabulary.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, end_ids: &[u32]) -> Option<Self> {
        let single = |text: &str, markers| match tokenizer.encode(text, markers)[..] {
            [id] if (id as usize) < vocab_size => Some(id),
            _ => None,
        };
        let close = single(CLOSE, Markers::All)?;
        let newline = single("\n", Markers::None)?;
        let blank_line = single("\n\n", Markers::None)?;
        let close_spelling = Spelling::new(CLOSE, &tokenizer, vocab_size, Some(close));
        let call_spelling = Spelling::new(CALL, &tokenizer, vocab_size, None);
        let end_ids = end_ids.into();
        Some(Self { tokenizer, close, newline, blank_line, end_ids, close_spelling, call_spelling })
    }

    fn bytes(&self, token: u32) -> &[u8] {
        self.tokenizer.token_bytes(token).unwrap_or_default()
    }
}

/// A text that begins inside a thinking section.
///
/// Thinking is free, with these exceptions. The section ends with the model's own marker, never in letters, so that
/// everybody agrees where it ends. When the budget is used up and the last character is whole, the model is led out of it:
/// a new line, the marker, a blank line, which is how it ends when the model ends it. And where another guide shapes the
/// answer, that one begins behind the marker and the blank line, so neither the end of the turn nor a tool call may come
/// before them.
#[derive(Debug, Clone)]
pub struct Thinking {
    markers: Arc<ThinkingMarkers>,
    /// Tokens that may be thought.
    budget: Option<usize>,
    /// The tokens up to the marker and the blank line behind it, as far as they have come.
    head: Vec<u32>,
    /// Tokens up to the marker, once it has come.
    closed: Option<usize>,
    answer: Option<Box<dyn Guide>>,
    /// Tokens behind the head.
    answer_tokens: usize,
}

/// What comes next.
enum Next {
    Thought,
    /// This token alone.
    Forced(u32),
    Answer,
}

impl Thinking {
    /// `answer` shapes what comes behind thinking.
    pub fn new(markers: Arc<ThinkingMarkers>, budget: Option<usize>, answer: Option<Box<dyn Guide>>) -> Self {
        Self { markers, budget, head: Vec::new(), closed: None, answer, answer_tokens: 0 }
    }

    fn next(&self) -> Next {
        let used_up = |thought: usize| self.budget.is_some_and(|budget| thought >= budget);
        if let Some(closed) = self.closed {
            // The marker itself is no thought.
            let leads = self.answer.is_some() || used_up(closed - 1);
            return if leads && self.head.len() == closed {
                Next::Forced(self.markers.blank_line)
            } else {
                Next::Answer
            };
        }
        let thought = self.head.len();
        if !used_up(thought) {
            return Next::Thought;
        }
        let tail = self.tail();
        let over = thought - self.budget.unwrap_or_default();
        if is_cut(&tail) && over < MOST_CHARACTER_BYTES {
            Next::Thought
        } else if tail.ends_with(b"\n") {
            Next::Forced(self.markers.close)
        } else {
            Next::Forced(self.markers.newline)
        }
    }

    /// The last bytes of what was thought: at least as many as the longest word that must not be spelt.
    fn tail(&self) -> Vec<u8> {
        let mut bytes = 0;
        let is_enough = |token: &u32| {
            let before = bytes;
            bytes += self.markers.bytes(*token).len();
            before >= CALL.len()
        };
        let earlier = self.head.iter().rposition(is_enough).map_or(0, |last| last + 1);
        self.head[earlier..].iter().flat_map(|token| self.markers.bytes(*token)).copied().collect()
    }

    /// Tokens that must not be thought next.
    fn forbidden(&self) -> Vec<u32> {
        let tail = self.tail();
        let mut forbidden: Vec<u32> = self.markers.close_spelling.completing(&tail).collect();
        if self.answer.is_some() {
            forbidden.extend(self.markers.call_spelling.completing(&tail));
            forbidden.extend(&self.markers.end_ids[..]);
        }
        forbidden
    }

    fn takes(&mut self, token: u32) -> Result<bool, GuideError> {
        match self.next() {
            Next::Thought => Ok(!self.forbidden().contains(&token)),
            Next::Forced(forced) => Ok(token == forced),
            Next::Answer => match &mut self.answer {
                Some(answer) => Ok(answer.count_allowed(&[token])? == 1),
                None => Ok(true),
            },
        }
    }
}

/// Whether a text ends within a character.
fn is_cut(text: &[u8]) -> bool {
    let last = text.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    // What is no beginning of a character will not become one.
    !last.is_empty() && std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none())
}

impl Guide for Thinking {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, GuideError> {
        match self.next() {
            Next::Forced(token) => {
                mask.fill(0);
                mask[token as usize / 32] |= 1 << (token % 32);
                Ok(Allowed::Masked)
            }
            Next::Answer => self.answer.as_mut().map_or(Ok(Allowed::All), |answer| answer.allowed(mask)),
            Next::Thought => {
                let forbidden = self.forbidden();
                if forbidden.is_empty() {
                    return Ok(Allowed::All);
                }
                mask.fill(u32::MAX);
                for token in forbidden {
                    mask[token as usize / 32] &= !(1 << (token % 32));
                }
                Ok(Allowed::Masked)
            }
        }
    }

    fn count_allowed(&mut self, tokens: &[u32]) -> Result<usize, GuideError> {
        let mut accepted = 0;
        let mut in_answer = 0;
        for token in tokens {
            if matches!(self.next(), Next::Answer) {
                let rest = &tokens[accepted..];
                in_answer = match &mut self.answer {
                    Some(answer) => answer.count_allowed(rest)?,
                    None => rest.len(),
                };
                break;
            }
            if !self.takes(*token)? {
                break;
            }
            self.accept(*token)?;
            accepted += 1;
        }
        self.roll_back(accepted)?;
        Ok(accepted + in_answer)
    }

    fn accept(&mut self, token: u32) -> Result<(), GuideError> {
        if matches!(self.next(), Next::Answer) {
            if let Some(answer) = &mut self.answer {
                answer.accept(token)?;
            }
            self.answer_tokens += 1;
            return Ok(());
        }
        self.head.push(token);
        if self.closed.is_none() && token == self.markers.close {
            self.closed = Some(self.head.len());
        }
        Ok(())
    }

    fn roll_back(&mut self, tokens: usize) -> Result<(), GuideError> {
        let in_answer = tokens.min(self.answer_tokens);
        if let Some(answer) = self.answer.as_mut().filter(|_| in_answer > 0) {
            answer.roll_back(in_answer)?;
        }
        self.answer_tokens -= in_answer;
        let left = self.head.len().checked_sub(tokens - in_answer);
        let left = left.ok_or_else(|| GuideError(format!("{tokens} tokens are more than there were")))?;
        self.head.truncate(left);
        self.closed = self.closed.filter(|closed| *closed <= left);
        Ok(())
    }

    fn forced(&mut self) -> Vec<u32> {
        let mut forced = Vec::new();
        while let Next::Forced(token) = self.next() {
            forced.push(token);
            if self.accept(token).is_err() {
                break;
            }
        }
        let in_head = forced.len();
        if let (Next::Answer, Some(answer)) = (self.next(), &mut self.answer) {
            forced.extend(answer.forced());
        }
        if self.roll_back(in_head).is_ok() { forced } else { Vec::new() }
    }

    fn boxed_clone(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests;
