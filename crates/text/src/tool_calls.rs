//! Reads tool calls out of the text of an answer while it is written.

mod json;
mod loose;
mod schema;
mod tag;
mod value;
mod xml;

use std::sync::Arc;

use serde_json::Value;

use json::JsonCall;
use tag::{Match, Tag, tag_at};
use value::Argument;
use xml::Call;

/// More white space than this within a call's opening or after a closing tag, and there is nothing to wait for.
const MOST_SPACE_BYTES: usize = 64;
/// More white space than this before a call is not only there to separate it.
const MOST_SEPARATOR_BYTES: usize = 256;

/// How a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolStyle {
    /// `<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>`
    Xml,
    /// `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`
    Json,
}

impl ToolStyle {
    /// The style that a chat template teaches.
    pub(crate) fn of_template(source: &str) -> Self {
        if source.contains("<function=") || source.contains("<parameter=") { Self::Xml } else { Self::Json }
    }

    /// What a call of the tool `name` starts with, up to its arguments.
    pub fn opening(self, name: &str) -> String {
        match self {
            Self::Xml => format!("<tool_call>\n<function={name}>\n"),
            Self::Json => format!("<tool_call>\n{{\"name\": {}, \"arguments\": ", loose::quoted(name)),
        }
    }
}

/// A tool whose calls are looked for.
#[derive(Clone, Debug, PartialEq)]
pub struct OfferedTool {
    /// Its name; a call of any other name is text.
    pub name: String,
    /// JSON schema of its arguments, or `null`.
    pub parameters: Value,
}

/// A part of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallPiece {
    /// A call of this tool begins.
    Begin {
        /// One of the offered names.
        name: String,
    },
    /// The next part of the arguments, which together are the text of a JSON object.
    Arguments(String),
    /// The call is complete.
    End,
}

/// A part of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    /// Not of a call.
    Text(String),
    Call(CallPiece),
}

/// Finds tool calls in streamed text; the result does not depend on how the text was cut.
///
/// A call is looked for in both styles, whatever the template teaches. It begins when `<tool_call>` and the name of
/// an offered tool are certain, or a `<function=NAME>` of one that stands first in its line; up to there everything
/// may still be text, and then it is given back as it was. Once it has begun it is brought to an end whatever
/// follows: closing tags that are missing, stray spaces and attributes, Python's spelling of values and text that
/// breaks off are understood, and what belongs to no argument is given back as text after the call.
///
/// Within an argument, a closing tag ends it only if the call goes on or ends after it; elsewhere it is part of
/// the value.
///
/// White space around calls that separates them from each other, from the text before the first and from the end
/// of the answer is dropped.
#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own about what was read")]
pub(crate) struct ToolCallParser {
    tools: Arc<[OfferedTool]>,
    state: State,
    /// Text that cannot be assigned yet.
    held: String,
    segments: Vec<Segment>,
    /// Whether nothing but spaces stands before `held` in its line.
    at_line_start: bool,
    /// Whether only white space came since a call.
    after_call: bool,
    /// Whether the last call had no `</tool_call>`: one that comes late is no text.
    owes_close: bool,
    /// Whether the text is complete.
    ended: bool,
}

enum State {
    /// Outside calls.
    Text,
    /// A JSON object after `<tool_call>`, which may be a call or not.
    Json(JsonCall),
    /// Between the tags of a call.
    Body(Call),
    /// Within an argument.
    Value(Call, Argument),
    /// After a call, where `</tool_call>` is due.
    AfterCall,
}

/// The opening of a call.
enum Head {
    Function(String),
    /// An object begins; whether it is a call shows later.
    Json,
}

impl ToolCallParser {
    pub(crate) fn new(tools: Arc<[OfferedTool]>) -> Self {
        Self {
            tools,
            state: State::Text,
            held: String::new(),
            segments: Vec::new(),
            at_line_start: true,
            after_call: false,
            owes_close: false,
            ended: false,
        }
    }

    /// Takes the next chunk; gives what is certain.
    pub(crate) fn push(&mut self, chunk: &str) -> Vec<Segment> {
        self.held.push_str(chunk);
        self.run()
    }

    /// The end of the text: what was held back, and the end of a call that is still open.
    pub(crate) fn finish(&mut self) -> Vec<Segment> {
        self.ended = true;
        self.run()
    }

    fn run(&mut self) -> Vec<Segment> {
        loop {
            let (state, goes_on) = match std::mem::replace(&mut self.state, State::Text) {
                State::Text => self.step_text(),
                State::Json(call) => self.step_json(call),
                State::Body(call) => self.step_body(call),
                State::Value(call, value) => self.step_value(call, value),
                State::AfterCall => self.step_after_call(),
            };
            self.state = state;
            if !goes_on {
                return std::mem::take(&mut self.segments);
            }
        }
    }

    /// Outside calls: gives out text up to the next opening of a call, or what may be one.
    fn step_text(&mut self) -> (State, bool) {
        let mut from = 0;
        while let Some(at) = self.held[from..].find('<').map(|found| from + found) {
            let rest = &self.held[at..];
            if self.owes_close
                && let Match::Yes(Tag::CallClose, bytes) = tag_at(rest)
            {
                self.owes_close = false;
                self.held.replace_range(at..at + bytes, "");
                return (State::Text, true);
            }
            match self.head_at(rest, self.is_line_start(at)) {
                Match::Yes(Head::Function(name), bytes) => {
                    self.give_text_before_call(at);
                    self.held.drain(..bytes);
                    return (State::Body(self.begin(name)), true);
                }
                Match::Yes(Head::Json, bytes) => {
                    let keep = self.separator_start(at);
                    self.give_text(keep);
                    let tag_bytes = bytes - 1;
                    return (State::Json(JsonCall::new(at - keep, at - keep + tag_bytes)), true);
                }
                Match::Maybe if !self.ended => {
                    let keep = self.separator_start(at);
                    self.give_text(keep);
                    return (State::Text, false);
                }
                Match::Maybe | Match::No => from = at + 1,
            }
        }
        let separates = !self.ended || (self.after_call && self.held.trim().is_empty());
        let keep = if separates { self.separator_start(self.held.len()) } else { self.held.len() };
        self.give_text(keep);
        if self.ended {
            self.held.clear();
        }
        (State::Text, false)
    }

    /// Where the white space before `end` begins that would be dropped if a call or the end came there.
    fn separator_start(&self, end: usize) -> usize {
        let text = self.held[..end].trim_end();
        let start = if text.is_empty() && self.after_call {
            0
        } else {
            self.held[text.len()..end].find('\n').map_or(end, |newline| text.len() + newline)
        };
        start.max(self.held.floor_char_boundary(end.saturating_sub(MOST_SEPARATOR_BYTES)))
    }

    fn is_line_start(&self, at: usize) -> bool {
        let before = &self.held[..at];
        let line = before.rfind('\n').map_or(before, |newline| &before[newline + 1..]);
        line.trim().is_empty() && (self.at_line_start || line.len() < before.len())
    }

    /// Gives out the first `bytes` of what is held.
    fn give_text(&mut self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let text: String = self.held.drain(..bytes).collect();
        self.note_text(&text);
        match self.segments.last_mut() {
            Some(Segment::Text(last)) => last.push_str(&text),
            _ => self.segments.push(Segment::Text(text)),
        }
    }

    fn note_text(&mut self, text: &str) {
        let line = text.rsplit('\n').next().unwrap_or_default();
        self.at_line_start = line.trim().is_empty() && (self.at_line_start || line.len() < text.len());
        if !text.trim().is_empty() {
            self.after_call = false;
        }
    }

    /// Gives out what is held before `at`, where a call begins, but for the white space that separates the two.
    fn give_text_before_call(&mut self, at: usize) {
        let keep = self.separator_start(at);
        self.held.drain(keep..at);
        self.give_text(keep);
    }

    /// A call's opening at the start of `text`.
    fn head_at(&self, text: &str, at_line_start: bool) -> Match<Head> {
        let function = |text: &str| match tag_at(text) {
            Match::Yes(Tag::FunctionOpen(name), bytes) if self.offers(name) => {
                Match::Yes(Head::Function(name.to_owned()), bytes)
            }
            Match::Maybe => Match::Maybe,
            Match::Yes(..) | Match::No => Match::No,
        };
        let bytes = match tag_at(text) {
            Match::Yes(Tag::CallOpen, bytes) => bytes,
            Match::Yes(Tag::FunctionOpen(_), _) if at_line_start => return function(text),
            Match::Maybe => return Match::Maybe,
            Match::Yes(..) | Match::No => return Match::No,
        };
        let inside = text[bytes..].trim_start();
        let before = text.len() - inside.len();
        if before - bytes > MOST_SPACE_BYTES {
            return Match::No;
        }
        match inside.chars().next() {
            None => Match::Maybe,
            Some('{') => Match::Yes(Head::Json, before + 1),
            Some('<') => match function(inside) {
                Match::Yes(head, bytes) => Match::Yes(head, before + bytes),
                other => other,
            },
            Some(_) => Match::No,
        }
    }

    fn offers(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool.name == name)
    }

    fn begin(&mut self, name: String) -> Call {
        let tool = self.tools.iter().position(|tool| tool.name == name).unwrap_or_default();
        self.segments.push(Segment::Call(CallPiece::Begin { name }));
        Call::new(tool)
    }

    fn give_arguments(&mut self, text: &str) {
        match self.segments.last_mut() {
            _ if text.is_empty() => {}
            Some(Segment::Call(CallPiece::Arguments(last))) => last.push_str(text),
            _ => self.segments.push(Segment::Call(CallPiece::Arguments(text.into()))),
        }
    }

    /// Ends a call; `rest` was written in it and belongs to none of its arguments.
    fn end_call(&mut self, rest: &str) {
        self.segments.push(Segment::Call(CallPiece::End));
        self.after_call = true;
        self.at_line_start = true;
        if !rest.trim().is_empty() {
            self.note_text(rest);
            self.segments.push(Segment::Text(rest.to_owned()));
        }
    }

    /// After a call: its `</tool_call>`, or another function in the same block, or text.
    fn step_after_call(&mut self) -> (State, bool) {
        let text = self.held.trim_start();
        let before = self.held.len() - text.len();
        let found = if before > MOST_SPACE_BYTES { Match::No } else { tag_at(text) };
        match found {
            Match::Maybe if !self.ended => return (State::AfterCall, false),
            Match::Yes(Tag::CallClose, bytes) => {
                self.held.drain(..before + bytes);
                self.owes_close = false;
            }
            Match::Yes(..) | Match::Maybe | Match::No => self.owes_close = true,
        }
        (State::Text, true)
    }
}

#[cfg(test)]
mod tests;
