//! Text on both sides of the model: token ids, streaming output, stop strings, chat prompts and reasoning.
//!
//! * [`Tokenizer`] turns text into token ids and back (byte-level BPE from a `tokenizer.json`).
//! * [`Detokenizer`] turns a stream of ids into text and never splits a character.
//! * [`StopMatcher`] finds stop strings in streamed text, at any chunking.
//! * [`AnswerParser`] separates a model's thinking, its answer and its tool calls.
//! * [`ChatTemplate`] renders a conversation; [`Rendered`] remembers which markers a user spelt.

mod answer;
mod detokenizer;
mod error;
mod reasoning;
mod stop;
mod template;
mod tokenizer;
mod tool_calls;

pub use answer::{AnswerParser, Piece};
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use reasoning::prompt_opens_reasoning;
pub use stop::{StopMatcher, StopOutcome};
pub use template::{ChatInput, ChatTemplate, Rendered};
pub use tokenizer::{Markers, Tokenizer};
pub use tool_calls::{CallPiece, OfferedTool, ToolStyle};
