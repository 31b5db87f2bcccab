//! The tags of a call: `<parameter=KEY>\nVALUE\n</parameter>` within a function.

use super::loose::{quoted, to_json};
use super::schema::{declares, parameter_types};
use super::tag::{Match, Tag, tag_at};
use super::value::Argument;
use super::{MOST_SPACE_BYTES, State, ToolCallParser};

/// A call that has begun.
pub(super) struct Call {
    /// Which of the offered tools.
    tool: usize,
    /// Names of the arguments so far.
    keys: Vec<String>,
    /// Text that belongs to no argument.
    stray: String,
    /// Whether the first newline of a value was looked at.
    value_begun: bool,
    /// Whether a value has no text yet.
    at_value_start: bool,
}

/// How a value ends at some `<`.
enum End {
    /// With a closing tag of this many bytes.
    Closed(usize),
    /// Without one: what stands there belongs to the call.
    Open,
}

impl Call {
    pub(super) fn new(tool: usize) -> Self {
        Self { tool, keys: Vec::new(), stray: String::new(), value_begun: false, at_value_start: true }
    }
}

impl ToolCallParser {
    /// Between the tags of a call.
    pub(super) fn step_body(&mut self, mut call: Call) -> (State, bool) {
        let Some(at) = self.held.find('<') else {
            call.stray.push_str(&std::mem::take(&mut self.held));
            return if self.ended { self.close(call) } else { (State::Body(call), false) };
        };
        call.stray.extend(self.held.drain(..at));
        let (bytes, key) = match tag_at(&self.held) {
            Match::Yes(Tag::ParameterOpen(key), bytes) => (bytes, Some(key.to_owned())),
            Match::Yes(Tag::FunctionClose, bytes) => {
                self.held.drain(..bytes);
                return self.close(call);
            }
            // The call ends here, with what it has; the tag is read again outside.
            Match::Yes(Tag::CallClose | Tag::CallOpen | Tag::FunctionOpen(_), _) => return self.close(call),
            // One too many.
            Match::Yes(Tag::ParameterClose, bytes) => (bytes, None),
            Match::Maybe if !self.ended => return (State::Body(call), false),
            Match::Maybe | Match::No => {
                call.stray.push('<');
                (1, None)
            }
        };
        self.held.drain(..bytes);
        match key {
            Some(key) => {
                let value = self.begin_argument(&mut call, key);
                (State::Value(call, value), true)
            }
            None => (State::Body(call), true),
        }
    }

    fn begin_argument(&mut self, call: &mut Call, key: String) -> Argument {
        let before = if call.keys.is_empty() { "{" } else { ", " };
        self.give_arguments(&format!("{before}{}: ", quoted(&key)));
        let types = parameter_types(&self.tools[call.tool].parameters, &key);
        call.keys.push(key);
        call.value_begun = false;
        Argument::new(types)
    }

    /// The call is complete.
    fn close(&mut self, mut call: Call) -> (State, bool) {
        if call.keys.is_empty() {
            // Some models write the arguments as one object.
            let object = to_json(call.stray.trim()).filter(|json| json.starts_with('{'));
            if object.is_some() {
                call.stray.clear();
            }
            self.give_arguments(object.as_deref().unwrap_or("{}"));
        } else {
            self.give_arguments("}");
        }
        self.end_call(&call.stray);
        (State::AfterCall, true)
    }

    /// Within an argument.
    pub(super) fn step_value(&mut self, mut call: Call, mut value: Argument) -> (State, bool) {
        if !call.value_begun {
            if self.held.is_empty() && !self.ended {
                return (State::Value(call, value), false);
            }
            call.value_begun = true;
            if self.held.starts_with('\n') {
                self.held.drain(..1);
            }
            call.at_value_start = true;
        }
        let (certain, end) = self.find_end(&call);
        let mut text: String = self.held.drain(..certain).collect();
        match end {
            None if self.ended => {
                strip_newline(&mut text);
                self.give_arguments(&value.push(&text));
                self.give_arguments(&value.finish());
                self.close(call)
            }
            None => {
                // The newline before the closing tag is not part of the value.
                let newline = strip_newline(&mut text);
                self.held.insert_str(0, newline);
                call.at_value_start &= text.is_empty();
                self.give_arguments(&value.push(&text));
                (State::Value(call, value), false)
            }
            Some(end) => {
                strip_newline(&mut text);
                self.give_arguments(&value.push(&text));
                self.give_arguments(&value.finish());
                if let End::Closed(bytes) = end {
                    self.held.drain(..bytes);
                }
                (State::Body(call), true)
            }
        }
    }

    /// How much of what is held is certainly before the end of the value, and the end if that is certain.
    fn find_end(&self, call: &Call) -> (usize, Option<End>) {
        let mut from = 0;
        while let Some(at) = self.held[from..].find('<').map(|found| from + found) {
            let at_line_start = self.held[..at].ends_with('\n') || (at == 0 && call.at_value_start);
            match self.end_at(&self.held[at..], at_line_start, call) {
                Match::Yes(end, _) => return (at, Some(end)),
                Match::Maybe => return (at, None),
                Match::No => from = at + 1,
            }
        }
        (self.held.len(), None)
    }

    /// Whether the value ends where `text` begins.
    fn end_at(&self, text: &str, at_line_start: bool, call: &Call) -> Match<End> {
        match tag_at(text) {
            Match::Maybe if !self.ended => Match::Maybe,
            Match::Yes(Tag::ParameterClose, bytes) => {
                let goes_on = |tag: Tag| !matches!(tag, Tag::ParameterClose);
                self.followed_by(&text[bytes..], goes_on, End::Closed(bytes))
            }
            Match::Yes(Tag::FunctionClose, bytes) => {
                let block_ends =
                    |tag: Tag| matches!(tag, Tag::CallClose | Tag::CallOpen | Tag::FunctionOpen(_));
                self.followed_by(&text[bytes..], block_ends, End::Open)
            }
            Match::Yes(Tag::CallClose, bytes) => {
                self.followed_by(&text[bytes..], |tag| tag == Tag::CallOpen, End::Open)
            }
            Match::Yes(Tag::ParameterOpen(key), _)
                if at_line_start
                    && !call.keys.iter().any(|known| known == key)
                    && declares(&self.tools[call.tool].parameters, key) =>
            {
                Match::Yes(End::Open, 0)
            }
            Match::Yes(..) | Match::Maybe | Match::No => Match::No,
        }
    }

    /// `end`, if after white space comes a tag that `fits`, or the end of the text.
    fn followed_by(&self, text: &str, fits: impl Fn(Tag) -> bool, end: End) -> Match<End> {
        let rest = text.trim_start();
        let space_bytes = text.len() - rest.len();
        if space_bytes > MOST_SPACE_BYTES {
            return Match::Yes(end, 0);
        }
        if rest.is_empty() {
            return if self.ended { Match::Yes(end, 0) } else { Match::Maybe };
        }
        match tag_at(rest) {
            Match::Yes(tag, _) if fits(tag) => Match::Yes(end, 0),
            Match::Maybe if !self.ended => Match::Maybe,
            Match::Yes(..) | Match::Maybe | Match::No => Match::No,
        }
    }
}

/// Takes one newline off the end.
fn strip_newline(text: &mut String) -> &'static str {
    if text.ends_with('\n') {
        text.pop();
        "\n"
    } else {
        ""
    }
}
