//! JSON as Python's `json.dumps` writes it, which is what templates and training data contain: no HTML escapes,
//! keys in their order, `", "` and `": "`.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::python::{as_float, float_repr};

/// Deeper data is refused; a namespace may contain itself.
const MAX_DEPTH: usize = 200;

/// The `tojson` filter, with the arguments that Hugging Face gives it: `ensure_ascii` (default false), `indent`
/// (a number of spaces or a string), `separators` (item, key) and `sort_keys`.
#[expect(clippy::needless_pass_by_value, reason = "the engine hands filters their arguments by value")]
pub(super) fn tojson(
    state: &State,
    value: &Value,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let style = Style::from_arguments(indent, &kwargs)?;
    let mut writer = Writer { style, text: String::new() };
    writer.value(value, 0)?;
    // Written bytes are paid for like other data that a template makes.
    state.consume_fuel(writer.text.len() as u64 / 16)?;
    Ok(writer.text)
}

struct Style {
    ascii: bool,
    /// One level of indentation; `None` for all on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

impl Style {
    fn from_arguments(indent: Option<Value>, kwargs: &Kwargs) -> Result<Self, Error> {
        let indent = match indent {
            Some(indent) => Some(indent),
            None => kwargs.get("indent")?,
        };
        let indent = match indent.filter(|indent| !indent.is_none() && !indent.is_undefined()) {
            None => None,
            Some(indent) => Some(match indent.as_str() {
                Some(text) => text.to_owned(),
                None => " ".repeat(indent_width(&indent)?),
            }),
        };
        let separators: Option<Value> = kwargs.get("separators")?;
        let (item_separator, key_separator) = match separators.filter(|separators| !separators.is_none()) {
            Some(pair) => (separator(&pair, 0)?, separator(&pair, 1)?),
            // With line breaks, Python leaves the space after a comma out.
            None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        };
        let ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
        let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
        kwargs.assert_all_used()?;
        Ok(Self { ascii, indent, item_separator, key_separator, sort_keys })
    }
}

fn indent_width(indent: &Value) -> Result<usize, Error> {
    let width = indent.as_i64().filter(|width| *width <= 64);
    let width = width.ok_or_else(|| invalid("tojson: indent must be a string or a number up to 64"))?;
    Ok(usize::try_from(width).unwrap_or(0))
}

fn separator(pair: &Value, index: usize) -> Result<String, Error> {
    let text = pair.get_item_by_index(index)?;
    text.as_str().map(str::to_owned).ok_or_else(|| invalid("tojson: separators must be two strings"))
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

struct Writer {
    style: Style,
    text: String,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid(format!("tojson: data is nested deeper than {MAX_DEPTH}")));
        }
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            kind => return Err(invalid(format!("tojson: a value of type {kind} has no JSON form"))),
        }
        Ok(())
    }

    fn number(&mut self, value: &Value) {
        match as_float(value) {
            Some(float) if float.is_nan() => self.text.push_str("NaN"),
            Some(float) if float.is_infinite() => {
                self.text.push_str(if float > 0.0 { "Infinity" } else { "-Infinity" });
            }
            Some(float) => self.text.push_str(&float_repr(float)),
            None => self.text.push_str(&value.to_string()),
        }
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.text.push('[');
        let mut empty = true;
        for item in value.try_iter()? {
            self.start_item(empty, depth);
            self.value(&item, depth + 1)?;
            empty = false;
        }
        self.end(empty, depth, ']');
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()? {
            entries.push((key_text(&key)?, value.get_item(&key)?));
        }
        if self.style.sort_keys {
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.text.push('{');
        let empty = entries.is_empty();
        for (index, (key, entry)) in entries.iter().enumerate() {
            self.start_item(index == 0, depth);
            self.string(key);
            self.text.push_str(&self.style.key_separator);
            self.value(entry, depth + 1)?;
        }
        self.end(empty, depth, '}');
        Ok(())
    }

    fn start_item(&mut self, first: bool, depth: usize) {
        if !first {
            self.text.push_str(&self.style.item_separator);
        }
        self.line(depth + 1);
    }

    fn end(&mut self, empty: bool, depth: usize, bracket: char) {
        if !empty {
            self.line(depth);
        }
        self.text.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.style.indent {
            self.text.push('\n');
            for _ in 0..depth {
                self.text.push_str(indent);
            }
        }
    }

    fn string(&mut self, string: &str) {
        self.text.push('"');
        for c in string.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                c if c < ' ' || (self.style.ascii && !c.is_ascii()) => self.escape(c),
                c => self.text.push(c),
            }
        }
        self.text.push('"');
    }

    /// `\uXXXX`, twice for characters beyond the basic plane.
    fn escape(&mut self, c: char) {
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(self.text, "\\u{unit:04x}");
        }
    }
}

/// Keys that are no strings are written as their JSON text, in quotes.
fn key_text(key: &Value) -> Result<String, Error> {
    match (key.as_str(), key.kind()) {
        (Some(text), _) => Ok(text.to_owned()),
        (None, ValueKind::None) => Ok("null".to_owned()),
        (None, ValueKind::Bool) => Ok(key.is_true().to_string()),
        (None, ValueKind::Number) => Ok(as_float(key).map_or_else(|| key.to_string(), float_repr)),
        (None, kind) => Err(invalid(format!("tojson: a key cannot be of type {kind}"))),
    }
}

#[cfg(test)]
mod tests {
    use minijinja::{Environment, context};

    use super::*;

    fn render(expression: &str, value: &Value) -> String {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        environment.render_str(&format!("{{{{ {expression} }}}}"), context! { x => value }).unwrap()
    }

    fn data() -> Value {
        Value::from_pairs([
            ("b", Value::from(vec![Value::from(1), Value::from(()), Value::from(true), Value::from(1e-7)])),
            ("a", Value::from("<é😀 & 'x' \"q\" \u{1}\u{7f}\n/>")),
            ("e", Value::from_pairs(Vec::<(String, Value)>::new())),
            ("l", Value::from(Vec::<Value>::new())),
        ])
    }

    #[test]
    fn the_default_is_pythons_without_ascii() {
        let expected = "{\"b\": [1, null, true, 1e-07], \"a\": \"<é😀 & 'x' \\\"q\\\" \\u0001\u{7f}\\n/>\", \"e\": {}, \"l\": []}";
        assert_eq!(render("x|tojson", &data()), expected);
    }

    #[test]
    fn arguments_work_as_in_python() {
        let text = Value::from("é😀");
        assert_eq!(render("x|tojson(ensure_ascii=true)", &text), "\"\\u00e9\\ud83d\\ude00\"");
        let value = Value::from_pairs([("b", vec![1, 2]), ("a", vec![])]);
        assert_eq!(render("x|tojson(sort_keys=true)", &value), "{\"a\": [], \"b\": [1, 2]}");
        assert_eq!(render("x|tojson(separators=(',', ':'))", &value), "{\"b\":[1,2],\"a\":[]}");
        let indented = "{\n  \"b\": [\n    1,\n    2\n  ],\n  \"a\": []\n}";
        assert_eq!(render("x|tojson(indent=2)", &value), indented);
        assert_eq!(render("x|tojson(2)", &value), indented);
    }

    #[test]
    fn keys_and_numbers_keep_their_form() {
        assert_eq!(
            render("{7: 2, none: 3, true: 4.0}|tojson", &Value::UNDEFINED),
            "{\"7\": 2, \"null\": 3, \"true\": 4.0}"
        );
        assert_eq!(render("x|tojson", &Value::from(u64::MAX)), "18446744073709551615");
        assert_eq!(render("x|tojson", &Value::from(i128::MAX)), i128::MAX.to_string());
        assert_eq!(render("x|tojson", &Value::from(f64::INFINITY)), "Infinity");
    }

    #[test]
    fn what_is_no_json_is_an_error() {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        for template in [
            "{{ missing|tojson }}",
            "{{ 1|tojson(unknown=1) }}",
            "{{ 1|tojson(indent=1000000) }}",
            "{% set ns = namespace() %}{% set ns.me = ns %}{{ ns|tojson }}",
        ] {
            assert!(environment.render_str(template, ()).is_err(), "{template}");
        }
    }
}
