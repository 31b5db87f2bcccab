//! Calls written as an object: `{"name": …, "arguments": {…}}`.

use serde_json::Value;

use super::loose::{Loose, to_json};
use super::{CallPiece, Segment, State, ToolCallParser};

/// An object that is a call, or may be one.
pub(super) struct JsonCall {
    json: Loose,
    /// Where in the held text its `<tool_call>` begins, until the call has.
    start: usize,
    /// How much of the held text was read.
    read: usize,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Before its first inner value.
    Opening,
    /// Name and arguments do not come in the usual order: the object is read to its end first.
    Whole,
    /// The call has begun, its arguments are given out.
    Arguments,
    /// After the arguments.
    Tail,
}

impl JsonCall {
    /// A tag at `start` of the held text, and an object from `object` on.
    pub(super) fn new(start: usize, object: usize) -> Self {
        Self { json: Loose::default(), start, read: object, stage: Stage::Opening }
    }
}

impl ToolCallParser {
    pub(super) fn step_json(&mut self, mut call: JsonCall) -> (State, bool) {
        while let Some(c) = self.held[call.read..].chars().next() {
            let begun = matches!(call.stage, Stage::Arguments | Stage::Tail);
            if call.json.push(c).is_err() {
                return if begun { self.end_json(call) } else { self.not_a_call(&call) };
            }
            call.read += c.len_utf8();
            match call.stage {
                Stage::Opening if call.json.depth() == 2 => self.open_json(&mut call),
                Stage::Arguments if call.json.depth() == 1 => {
                    self.give_arguments(&call.json.take());
                    call.stage = Stage::Tail;
                }
                _ => {}
            }
            if call.json.is_done() {
                return if call.stage == Stage::Tail { self.end_json(call) } else { self.whole_json(call) };
            }
        }
        match call.stage {
            Stage::Opening | Stage::Whole if self.ended => return self.all_text(),
            Stage::Arguments | Stage::Tail if self.ended => return self.end_json(call),
            Stage::Arguments => self.give_arguments(&call.json.take()),
            Stage::Opening | Stage::Whole | Stage::Tail => {}
        }
        if matches!(call.stage, Stage::Arguments | Stage::Tail) {
            self.held.clear();
            call.read = 0;
        }
        (State::Json(call), false)
    }

    /// The first inner value opens: these are the arguments if the name came before.
    fn open_json(&mut self, call: &mut JsonCall) {
        call.stage = Stage::Whole;
        let written = call.json.written();
        let Some(before) = written.strip_suffix('{') else { return };
        let Ok(Value::Object(fields)) = serde_json::from_str(&format!("{before}null}}")) else { return };
        let last = fields.keys().next_back().map(String::as_str);
        let name = fields.get("name").and_then(Value::as_str).filter(|name| self.offers(name));
        if let (Some(name), Some("arguments" | "parameters")) = (name, last) {
            call.stage = Stage::Arguments;
            call.json.take();
            self.drop_opening(call);
            self.segments.push(Segment::Call(CallPiece::Begin { name: name.to_owned() }));
            self.give_arguments("{");
        }
    }

    /// Gives out the text before the call and drops what was read of it.
    fn drop_opening(&mut self, call: &mut JsonCall) {
        self.held.drain(call.start..call.read);
        self.give_text_before_call(call.start);
        call.read = 0;
    }

    /// The object is complete: a call of an offered tool, or text.
    fn whole_json(&mut self, mut call: JsonCall) -> (State, bool) {
        let fields: Value = serde_json::from_str(call.json.written()).unwrap_or_default();
        let arguments = match fields.get("arguments").or_else(|| fields.get("parameters")) {
            None | Some(Value::Null) => Some("{}".to_owned()),
            Some(Value::String(text)) => to_json(text.trim()).filter(|json| json.starts_with('{')),
            Some(Value::Object(fields)) => serde_json::to_string(fields).ok(),
            Some(_) => None,
        };
        let name = fields.get("name").and_then(Value::as_str).filter(|name| self.offers(name));
        let (Some(name), Some(arguments)) = (name, arguments) else { return self.not_a_call(&call) };
        self.drop_opening(&mut call);
        self.segments.push(Segment::Call(CallPiece::Begin { name: name.to_owned() }));
        self.give_arguments(&arguments);
        self.end_call("");
        (State::AfterCall, true)
    }

    /// Ends a call that has begun, at its end or where it is no JSON any more.
    fn end_json(&mut self, mut call: JsonCall) -> (State, bool) {
        if call.stage == Stage::Arguments {
            call.json.break_off(1);
            self.give_arguments(&call.json.take());
        }
        self.held.drain(..call.read);
        self.end_call("");
        (State::AfterCall, true)
    }

    /// The tag was text; what follows is looked at anew.
    fn not_a_call(&mut self, call: &JsonCall) -> (State, bool) {
        self.give_text(call.start + 1);
        (State::Text, true)
    }

    /// The text ends before it was known to be a call.
    fn all_text(&mut self) -> (State, bool) {
        self.give_text(self.held.len());
        (State::Text, false)
    }
}
