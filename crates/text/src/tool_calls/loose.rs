//! JSON as models write it, turned into JSON while it arrives.

/// Deeper than this, no client could read it either.
const DEEPEST: usize = 100;
const LONGEST_BARE_BYTES: usize = 400;

/// The text is no JSON in any spelling that is understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Invalid;

/// Reads JSON with Python's spellings (`True`, `None`, single quotes), trailing commas, raw control characters
/// and unknown escapes in strings; writes JSON. Numbers and white space stay as they are.
#[derive(Default)]
pub(super) struct Loose {
    /// What was written and not yet taken.
    out: String,
    open: Vec<Container>,
    expect: Expect,
    token: Token,
    /// White space after a comma that is written only if something follows it.
    comma: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Container {
    Array,
    Object,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Expect {
    /// The only value.
    #[default]
    Top,
    /// A value of an array, or its end.
    Item,
    /// A key of an object, or its end.
    Key,
    Colon,
    /// The value after a key.
    Member,
    /// A comma, or the container's end.
    Next,
    Done,
}

#[derive(Default)]
enum Token {
    #[default]
    None,
    Text(Text),
    /// A number or a word.
    Bare(String),
}

/// Inside a string.
struct Text {
    quote: char,
    is_key: bool,
    escape: Escape,
    /// The first half of a surrogate pair.
    high: Option<u32>,
}

enum Escape {
    None,
    Backslash,
    /// Hexadecimal digits of `\u`.
    Unicode(String),
}

/// JSON text of a whole value.
pub(super) fn to_json(text: &str) -> Option<String> {
    let mut loose = Loose::default();
    text.chars().try_for_each(|c| loose.push(c)).ok()?;
    loose.end_bare().ok()?;
    (loose.expect == Expect::Done).then_some(loose.out)
}

/// Appends `c` as it stands inside a JSON string.
pub(super) fn escape_char(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c if (c as u32) < 0x20 => {
            out.push_str("\\u00");
            out.extend(
                [c as u32 / 16, c as u32 % 16].into_iter().filter_map(|digit| char::from_digit(digit, 16)),
            );
        }
        c => out.push(c),
    }
}

/// `text` as it stands inside a JSON string.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    text.chars().for_each(|c| escape_char(c, &mut out));
    out
}

/// `text` as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", escaped(text))
}

impl Loose {
    /// Takes a character. After an error the state is that before the character.
    pub(super) fn push(&mut self, c: char) -> Result<(), Invalid> {
        match &mut self.token {
            Token::Text(text) => {
                if text.push(c, &mut self.out) {
                    let is_key = text.is_key;
                    self.token = Token::None;
                    if is_key { self.expect = Expect::Colon } else { self.after_value() }
                }
                Ok(())
            }
            Token::Bare(word) if is_bare(c) => {
                if word.len() >= LONGEST_BARE_BYTES {
                    return Err(Invalid);
                }
                word.push(c);
                Ok(())
            }
            Token::Bare(_) => {
                self.end_bare()?;
                self.structure(c)
            }
            Token::None => self.structure(c),
        }
    }

    /// How many containers are open.
    pub(super) fn depth(&self) -> usize {
        self.open.len()
    }

    /// Whether the value is complete.
    pub(super) fn is_done(&self) -> bool {
        self.expect == Expect::Done
    }

    /// What was written and not yet taken.
    pub(super) fn written(&self) -> &str {
        &self.out
    }

    /// Takes what was written.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.out)
    }

    /// The text breaks off: ends what is open down to `depth`, so that what was written is JSON.
    pub(super) fn break_off(&mut self, depth: usize) {
        match std::mem::take(&mut self.token) {
            Token::None => {}
            Token::Text(mut text) => {
                text.flush(&mut self.out);
                self.out.push('"');
                if text.is_key { self.expect = Expect::Colon } else { self.after_value() }
            }
            Token::Bare(word) => {
                self.out.push_str(&bare(&word).unwrap_or_else(|| "null".into()));
                self.after_value();
            }
        }
        while self.open.len() > depth {
            match self.expect {
                Expect::Colon => self.out.push_str(": null"),
                Expect::Member => self.out.push_str("null"),
                Expect::Top | Expect::Item | Expect::Key | Expect::Next | Expect::Done => {}
            }
            self.close();
        }
    }

    fn structure(&mut self, c: char) -> Result<(), Invalid> {
        match c {
            ' ' | '\t' | '\n' | '\r' => match &mut self.comma {
                Some(space) => space.push(c),
                None => self.out.push(c),
            },
            '{' | '[' => {
                if self.open.len() >= DEEPEST {
                    return Err(Invalid);
                }
                self.begin_value()?;
                self.out.push(c);
                let (container, expect) = if c == '{' {
                    (Container::Object, Expect::Key)
                } else {
                    (Container::Array, Expect::Item)
                };
                self.open.push(container);
                self.expect = expect;
            }
            '"' | '\'' => {
                let is_key = self.expect == Expect::Key;
                if is_key {
                    self.write_comma();
                } else {
                    self.begin_value()?;
                }
                self.out.push('"');
                self.token = Token::Text(Text { quote: c, is_key, escape: Escape::None, high: None });
            }
            ':' if self.expect == Expect::Colon => {
                self.out.push(':');
                self.expect = Expect::Member;
            }
            ',' if self.expect == Expect::Next => {
                self.comma = Some(String::new());
                let in_object = self.open.last() == Some(&Container::Object);
                self.expect = if in_object { Expect::Key } else { Expect::Item };
            }
            '}' if self.ends(Container::Object, Expect::Key) => self.close(),
            ']' if self.ends(Container::Array, Expect::Item) => self.close(),
            c if is_bare(c) => {
                self.begin_value()?;
                self.token = Token::Bare(c.into());
            }
            _ => return Err(Invalid),
        }
        Ok(())
    }

    fn ends(&self, container: Container, before: Expect) -> bool {
        self.open.last() == Some(&container) && [before, Expect::Next].contains(&self.expect)
    }

    fn begin_value(&mut self) -> Result<(), Invalid> {
        if !matches!(self.expect, Expect::Top | Expect::Item | Expect::Member) {
            return Err(Invalid);
        }
        self.write_comma();
        Ok(())
    }

    fn write_comma(&mut self) {
        if let Some(space) = self.comma.take() {
            self.out.push(',');
            self.out.push_str(&space);
        }
    }

    fn close(&mut self) {
        // A comma before it has no place in JSON.
        self.out.push_str(&self.comma.take().unwrap_or_default());
        if let Some(container) = self.open.pop() {
            self.out.push(if container == Container::Object { '}' } else { ']' });
        }
        self.after_value();
    }

    fn after_value(&mut self) {
        self.expect = if self.open.is_empty() { Expect::Done } else { Expect::Next };
    }

    fn end_bare(&mut self) -> Result<(), Invalid> {
        if let Token::Bare(word) = &self.token {
            self.out.push_str(&bare(word).ok_or(Invalid)?);
            self.token = Token::None;
            self.after_value();
        }
        Ok(())
    }
}

impl Text {
    /// Takes a character; whether the string ends with it.
    fn push(&mut self, c: char, out: &mut String) -> bool {
        match &mut self.escape {
            Escape::None if c == self.quote => {
                self.flush(out);
                out.push('"');
                return true;
            }
            Escape::None if c == '\\' => self.escape = Escape::Backslash,
            Escape::None => self.write(c, out),
            Escape::Backslash => {
                self.escape = Escape::None;
                match c {
                    'u' => self.escape = Escape::Unicode(String::new()),
                    'n' => self.write('\n', out),
                    't' => self.write('\t', out),
                    'r' => self.write('\r', out),
                    'b' => self.write('\u{8}', out),
                    'f' => self.write('\u{c}', out),
                    '"' | '\'' | '\\' | '/' => self.write(c, out),
                    // A backslash that escapes nothing is one.
                    other => {
                        self.write('\\', out);
                        self.write(other, out);
                    }
                }
            }
            Escape::Unicode(digits) if c.is_ascii_hexdigit() => {
                digits.push(c);
                if digits.len() == 4 {
                    let unit = u32::from_str_radix(digits, 16).unwrap_or(0xfffd);
                    self.escape = Escape::None;
                    self.write_unit(unit, out);
                }
            }
            Escape::Unicode(_) => {
                self.flush(out);
                return self.push(c, out);
            }
        }
        false
    }

    fn write(&mut self, c: char, out: &mut String) {
        self.flush_half(out);
        escape_char(c, out);
    }

    fn write_unit(&mut self, unit: u32, out: &mut String) {
        match (self.high.take(), unit) {
            (Some(high), 0xdc00..=0xdfff) => {
                let code = 0x1_0000 + ((high - 0xd800) << 10) + (unit - 0xdc00);
                escape_char(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), out);
            }
            (before, 0xd800..=0xdbff) => {
                self.high = before;
                self.flush_half(out);
                self.high = Some(unit);
            }
            (before, _) => {
                self.high = before;
                self.write(char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER), out);
            }
        }
    }

    fn flush_half(&mut self, out: &mut String) {
        if self.high.take().is_some() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// Writes what an escape began and did not end.
    fn flush(&mut self, out: &mut String) {
        self.flush_half(out);
        match std::mem::replace(&mut self.escape, Escape::None) {
            Escape::None => {}
            Escape::Backslash => out.push_str("\\\\"),
            Escape::Unicode(digits) => {
                out.push_str("\\\\u");
                out.push_str(&digits);
            }
        }
    }
}

fn is_bare(c: char) -> bool {
    c.is_ascii_alphanumeric() || "+-._".contains(c)
}

fn bare(word: &str) -> Option<String> {
    match word {
        "true" | "True" | "TRUE" => Some("true".into()),
        "false" | "False" | "FALSE" => Some("false".into()),
        "null" | "None" | "Null" | "NULL" => Some("null".into()),
        _ => number(word),
    }
}

/// A number with the liberties of most languages but JSON: a plus sign, no digit beside the point.
fn number(word: &str) -> Option<String> {
    let word = word.strip_prefix('+').unwrap_or(word);
    let (sign, rest) = match word.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", word),
    };
    let (mantissa, exponent) = match rest.find(['e', 'E']) {
        Some(at) => rest.split_at(at),
        None => (rest, ""),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let power = exponent.get(1..).unwrap_or_default();
    let power = power.strip_prefix(['+', '-']).unwrap_or(power);
    let well_formed = digits(whole)
        && digits(fraction)
        && !(whole.is_empty() && fraction.is_empty())
        && (whole.len() < 2 || !whole.starts_with('0'))
        && (exponent.is_empty() || (!power.is_empty() && digits(power)));
    if !well_formed {
        return None;
    }
    let whole = if whole.is_empty() { "0" } else { whole };
    let point = if fraction.is_empty() { "" } else { "." };
    let text = format!("{sign}{whole}{point}{fraction}{exponent}");
    // Beyond the range of a double, readers disagree.
    text.parse::<f64>().is_ok_and(f64::is_finite).then_some(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    #[test]
    fn python_and_other_liberties() {
        let cases = [
            ("[true, null, False]", "[true, null, false]"),
            ("{'a': 'it\\'s', \"b\": None,}", r#"{"a": "it's", "b": null}"#),
            ("[1, 2, ]", "[1, 2 ]"),
            ("'say \"hi\"'", r#""say \"hi\"""#),
            ("\"two\nlines\"", r#""two\nlines""#),
            (r#""C:\dir\users""#, r#""C:\\dir\\users""#),
            (r#""\ud83d\ude42 \ud83d x \u00e9""#, "\"🙂 \u{fffd} x é\""),
            ("[+1, .5, 2., -0.5e+3]", "[1, 0.5, 2, -0.5e+3]"),
            (" 3 ", " 3 "),
        ];
        for (text, json) in cases {
            assert_eq!(to_json(text).as_deref(), Some(json), "{text}");
        }
        for text in [
            "",
            "x",
            "007",
            "1 2",
            "[1",
            "{\"a\" 1}",
            "{1: 2}",
            "[,]",
            "1e999",
            "--1",
            "1e",
            "}",
            "[}",
            "\"a",
            "NaN",
        ] {
            assert_eq!(to_json(text), None, "{text}");
        }
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<i32>().prop_map(|number| Value::from(f64::from(number) / 8.0)),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map("[a-z\"\\\\é]{0,3}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn json_is_left_as_it_is(value in json(), pretty: bool) {
            let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) };
            let read = to_json(&text.unwrap()).unwrap();
            prop_assert_eq!(serde_json::from_str::<Value>(&read).unwrap(), value);
        }

        #[test]
        fn what_breaks_off_is_still_json(value in json(), length in 0..200_usize) {
            let mut loose = Loose::default();
            let text = value.to_string();
            for c in text.chars().take(length) {
                loose.push(c).unwrap();
            }
            loose.break_off(0);
            let written = loose.take();
            prop_assert!(written.is_empty() || serde_json::from_str::<Value>(&written).is_ok(), "{}", written);
        }

        #[test]
        fn anything_is_refused_or_becomes_json(text in "[\\[\\]{},:'\"\\\\ un0-9dceTrueNone.+\n-]{0,24}") {
            if let Some(json) = to_json(&text) {
                prop_assert!(serde_json::from_str::<Value>(&json).is_ok(), "{} from {}", json, text);
            }
        }
    }
}
