//! Text on both sides of the model: token ids, streaming output, stop strings, chat prompts and reasoning.
//!
//! * [`Tokenizer`] turns text into token ids and back (byte-level BPE from a `tokenizer.json`).
//! * [`Detokenizer`] turns a stream of ids into text and never splits a character.
//! * [`StopMatcher`] finds stop strings in streamed text, at any chunking.
//! * [`ReasoningParser`] separates the thinking of a model from its answer.
//! * [`ChatTemplate`] renders a conversation; [`Rendered`] remembers which markers a user spelt.

mod detokenizer;
mod error;
mod reasoning;
mod stop;
mod template;
mod tokenizer;

pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use reasoning::{Piece, ReasoningParser, prompt_opens_reasoning};
pub use stop::{StopMatcher, StopOutcome};
pub use template::{ChatInput, ChatTemplate, Rendered};
pub use tokenizer::{Markers, Tokenizer};
