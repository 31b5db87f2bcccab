//! What a text has to be like, as guides for the engine.
//!
//! * [`Grammars`] compiles a [`Shape`] (a JSON schema, a regular expression, a choice, a grammar, tool calls) once and keeps
//!   it; a [`Grammar`] gives a guide for each text.
//! * [`Thinking`] leaves a thinking section alone, leads out of it when its budget is used up, and lets a grammar begin behind
//!   it.
//! * [`Limited`] keeps a text to some tokens, or off some runs of them, whatever else shapes it.
//!
//! Bounded: shapes in bytes, compiling and every mask in work, what is kept in bytes. Nothing here runs on the engine's
//! thread but the guides.

mod cache;
mod compile;
mod guide;
mod limits;
mod shape;
mod spelling;
#[cfg(test)]
mod tests;
mod thinking;
mod tools;
mod vocabulary;

pub use compile::{Grammar, Grammars};
pub use limits::{Limited, TokenLimits};
pub use shape::{GrammarError, Shape};
pub use thinking::{Thinking, ThinkingMarkers};
pub use tools::{ToolCalls, ToolShape};
