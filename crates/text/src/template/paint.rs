//! Follows text of a request through a template: see [`super::ChatTemplate::render`].

use std::collections::HashSet;

use minijinja::value::Value as Data;
use serde::Deserialize;
use serde_json::Value;

use super::ChatInput;
use crate::TextError;

/// A marker as it is spelt.
#[derive(Clone, Deserialize)]
pub(super) struct Spelling {
    pub content: String,
    #[serde(default)]
    pub special: bool,
}

/// The markers of the Qwen3.5 family.
pub(super) fn family_spellings() -> Vec<Spelling> {
    let special = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|audio_start|>",
        "<|audio_end|>",
        "<tts_pad>",
        "<tts_text_bos>",
        "<tts_text_eod>",
        "<tts_text_bos_single>",
        "<|audio_pad|>",
    ];
    let plain = [
        "<tool_call>",
        "</tool_call>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    ];
    let spelling = |special| move |content: &str| Spelling { content: content.to_owned(), special };
    special.into_iter().map(spelling(true)).chain(plain.into_iter().map(spelling(false))).collect()
}

/// The characters that markers start with, each once.
pub(super) fn first_chars(spellings: &[Spelling]) -> Vec<char> {
    let mut firsts: Vec<char> =
        spellings.iter().filter_map(|spelling| spelling.content.chars().next()).collect();
    firsts.sort_unstable();
    firsts.dedup();
    firsts
}

/// A character that could start a marker, and the one that stands for it in the second rendering.
#[derive(Clone, Copy)]
pub(super) struct Ink {
    plain: char,
    inked: char,
}

impl Ink {
    /// Byte positions in `text` of the inked characters, if `inked` is the same text but for the ink.
    pub(super) fn positions(inks: &[Self], text: &str, inked: &str) -> Option<Vec<usize>> {
        let mut positions = Vec::new();
        let mut other = inked.chars();
        for (at, plain) in text.char_indices() {
            let found = other.next()?;
            if found == plain {
                continue;
            }
            if !inks.iter().any(|ink| ink.inked == found && ink.plain == plain) {
                return None;
            }
            positions.push(at);
        }
        other.next().is_none().then_some(positions)
    }
}

/// An ink for each first character of a marker that the request contains; none if it contains none. Inks are
/// supplementary private-use code points that occur neither in the request nor in the template.
pub(super) fn choose_inks(
    input: &ChatInput,
    spellings: &[Spelling],
    template: &str,
) -> Result<Vec<Ink>, TextError> {
    let firsts = first_chars(spellings);
    let mut present: HashSet<char> = HashSet::new();
    let mut taken: HashSet<char> = template.chars().filter(|c| INKS.contains(c)).collect();
    let mut look = |text: &str| {
        present.extend(firsts.iter().filter(|&&first| text.contains(first)));
        // The code points in question are the only ones whose UTF-8 starts with this byte.
        if text.as_bytes().contains(&0xF4) {
            taken.extend(text.chars().filter(|c| INKS.contains(c)));
        }
    };
    input.values().for_each(|value| each_string(value, &mut look));
    let mut free = INKS.filter(|ink| !taken.contains(ink));
    let mut inks = Vec::new();
    for plain in firsts.into_iter().filter(|first| present.contains(first)) {
        let inked = free.next().ok_or(TextError::UntrackableText {
            reason: "the conversation uses up the private-use code points of plane 16",
        })?;
        inks.push(Ink { plain, inked });
    }
    Ok(inks)
}

const INKS: std::ops::RangeInclusive<char> = '\u{100000}'..='\u{10FFFD}';

/// Calls `look` with every string of a value, keys included.
fn each_string(value: &Value, look: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => look(text),
        Value::Array(items) => items.iter().for_each(|item| each_string(item, look)),
        Value::Object(entries) => {
            for (key, entry) in entries {
                look(key);
                each_string(entry, look);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// How much of the request's text is inked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// Every character that could start a marker.
    Everything,
    /// Only what spells a special marker, or its beginning at the end of a string (where a template may add
    /// another string), so that templates that look for `<tool_response>` and the like find it.
    SpecialSpellings,
}

/// Turns JSON into template data, with ink.
pub(super) struct Painter<'a> {
    inks: &'a [Ink],
    level: Level,
    spellings: &'a [Spelling],
}

impl<'a> Painter<'a> {
    pub(super) fn new(inks: &'a [Ink], level: Level, spellings: &'a [Spelling]) -> Self {
        Self { inks, level, spellings }
    }

    /// No ink at all.
    pub(super) fn blank() -> Self {
        Self { inks: &[], level: Level::Everything, spellings: &[] }
    }

    pub(super) fn value(&self, value: &Value) -> Data {
        self.convert(value, false)
    }

    /// A message. What an assistant said, other than in tool calls, may hold markers that are not special: they
    /// are the model's own.
    pub(super) fn message(&self, message: &Value) -> Data {
        let Value::Object(entries) = message else { return self.value(message) };
        let assistant = entries.get("role").is_some_and(|role| role == "assistant");
        Data::from_pairs(entries.iter().map(|(key, value)| {
            let own_words = assistant && key != "tool_calls";
            (self.text(key, false), self.convert(value, own_words))
        }))
    }

    fn convert(&self, value: &Value, own_words: bool) -> Data {
        match value {
            Value::Null => Data::from(()),
            Value::Bool(truth) => Data::from(*truth),
            Value::Number(number) => convert_number(number),
            Value::String(text) => self.text(text, own_words),
            Value::Array(items) => {
                Data::from(items.iter().map(|item| self.convert(item, own_words)).collect::<Vec<_>>())
            }
            Value::Object(entries) => Data::from_pairs(
                entries.iter().map(|(key, entry)| (self.text(key, false), self.convert(entry, own_words))),
            ),
        }
    }

    fn text(&self, text: &str, own_words: bool) -> Data {
        if !self.inks.iter().any(|ink| text.contains(ink.plain)) {
            return Data::from(text);
        }
        let content = text.trim_end();
        let mut painted = String::with_capacity(text.len() + 16);
        for (at, c) in text.char_indices() {
            let ink = self.inks.iter().find(|ink| ink.plain == c);
            let inked = ink.filter(|_| self.is_inked(&text[at..], content.get(at..), own_words));
            painted.push(inked.map_or(c, |ink| ink.inked));
        }
        Data::from(painted)
    }

    /// Whether the first character of `tail` is inked; `trimmed` is the tail without spaces at its end.
    fn is_inked(&self, tail: &str, trimmed: Option<&str>, own_words: bool) -> bool {
        match self.level {
            Level::Everything => {
                let plain = |spelling: &&Spelling| !spelling.special && tail.starts_with(&spelling.content);
                !(own_words && self.spellings.iter().any(|spelling| plain(&spelling)))
            }
            Level::SpecialSpellings => {
                self.spellings.iter().filter(|spelling| spelling.special).any(|spelling| {
                    tail.starts_with(&spelling.content)
                        || trimmed.is_some_and(|trimmed| spelling.content.starts_with(trimmed))
                })
            }
        }
    }
}

/// Integers stay exact as far as JSON kept them.
fn convert_number(number: &serde_json::Number) -> Data {
    if let Some(integer) = number.as_i64() {
        return Data::from(integer);
    }
    if let Some(integer) = number.as_u64() {
        return Data::from(integer);
    }
    number.as_f64().map_or(Data::UNDEFINED, Data::from)
}
