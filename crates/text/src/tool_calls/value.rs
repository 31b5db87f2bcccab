//! One argument as JSON text, from the characters between its tags.

use super::loose::{escaped, quoted, to_json};
use super::schema::Types;

/// Longer than this, white space around it included, the text is no number and no word such as `null`.
const LONGEST_WORD_BYTES: usize = 128;

/// An argument that arrives in parts. What can only be a string is given out while it arrives; the rest when it
/// is whole.
pub(super) struct Argument {
    types: Types,
    /// Text of which it is not known yet what it is.
    undecided: String,
    is_string: bool,
}

impl Argument {
    pub(super) fn new(types: Types) -> Self {
        Self { types, undecided: String::new(), is_string: false }
    }

    /// The JSON text that `text` brings.
    pub(super) fn push(&mut self, text: &str) -> String {
        if self.is_string {
            return escaped(text);
        }
        self.undecided.push_str(text);
        if self.types.allow(Types::STRING) && !may_be_other(self.types, &self.undecided) {
            self.is_string = true;
            return format!("\"{}", escaped(&std::mem::take(&mut self.undecided)));
        }
        String::new()
    }

    /// The JSON text that was left when the value is whole.
    pub(super) fn finish(self) -> String {
        if self.is_string { "\"".into() } else { coerce(&self.undecided, self.types) }
    }
}

/// Whether text that begins like this can become a value of these types that is no string.
fn may_be_other(types: Types, text: &str) -> bool {
    if types == Types::STRING {
        return false;
    }
    let starts = |c| text[..text.floor_char_boundary(LONGEST_WORD_BYTES)].trim_start().starts_with(c);
    if starts('{') {
        return types.allow(Types::OBJECT);
    }
    if starts('[') {
        return types.allow(Types::ARRAY);
    }
    text.len() <= LONGEST_WORD_BYTES && may_be_word(types, text.trim())
}

/// Whether `text` is the beginning of a number, a truth value or null, if that is one of these types.
fn may_be_word(types: Types, text: &str) -> bool {
    let begins = |words: &[&str]| words.iter().any(|word| word.starts_with(text));
    let number = |c: char| c.is_ascii_digit() || "+-.eE".contains(c);
    text.is_empty()
        || (types.allow(Types::NULL) && begins(&["null", "None", "Null", "NULL"]))
        || (types.allow(Types::BOOLEAN) && begins(&["true", "True", "TRUE", "false", "False", "FALSE"]))
        || ((types.allow(Types::INTEGER) || types.allow(Types::FRACTION)) && text.chars().all(number))
}

/// The value that the text of an argument stands for, as JSON text. A string comes last where others are allowed;
/// text that is none of what is allowed is what it is as JSON, else a string.
fn coerce(text: &str, types: Types) -> String {
    let json = if types == Types::STRING { None } else { to_json(text.trim()) };
    let Some(json) = json else { return quoted(text) };
    let kind = Types::of_json(&json);
    let takes_strings = types.allow(Types::STRING);
    if kind == Types::STRING {
        // Quoted, where a string was not asked for: what is inside may be what was.
        let inside = serde_json::from_str::<String>(&json).unwrap_or_default();
        return match to_json(inside.trim()) {
            _ if takes_strings => quoted(text),
            Some(inner) if types.allow(Types::of_json(&inner)) => inner,
            _ => json,
        };
    }
    if types.allow(kind) || (kind == Types::INTEGER && types.allow(Types::FRACTION)) {
        return json;
    }
    if kind == Types::FRACTION
        && types.allow(Types::INTEGER)
        && let Some(whole) = whole_number(&json)
    {
        return whole;
    }
    if takes_strings { quoted(text) } else { json }
}

/// `3.0` as `3`.
fn whole_number(json: &str) -> Option<String> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let number: f64 = json.parse().ok()?;
    (number.fract() == 0.0 && number.abs() <= EXACT).then(|| format!("{}", number as i64))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::super::schema::parameter_types;
    use super::*;

    fn types(schema: &Value) -> Types {
        parameter_types(&json!({"properties": {"x": schema}}), "x")
    }

    #[test]
    fn values_become_what_the_schema_says() {
        let cases = [
            (json!({"type": "string"}), "3", json!("3")),
            (json!({"type": "string"}), " true\n", json!(" true\n")),
            (json!({"type": "integer"}), "3", json!(3)),
            (json!({"type": "integer"}), " 3.0 ", json!(3)),
            (json!({"type": "integer"}), "\"3\"", json!(3)),
            (json!({"type": "integer"}), "three", json!("three")),
            (json!({"type": "integer"}), "null", json!(null)),
            (json!({"type": "number"}), "3", json!(3)),
            (json!({"type": "number"}), "2.5", json!(2.5)),
            (json!({"type": "boolean"}), "True", json!(true)),
            (json!({"type": "array"}), "[true, null, False]", json!([true, null, false])),
            (json!({"type": "array"}), "[1", json!("[1")),
            (json!({"type": "object"}), "{'a': (1)}", json!("{'a': (1)}")),
            (json!({"type": "object"}), "{'a': None}", json!({"a": null})),
            (json!({"type": "object"}), "\"{\\\"a\\\": 1}\"", json!({"a": 1})),
            (json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}), "None", json!(null)),
            (json!({"type": ["string", "null"]}), "null", json!(null)),
            (json!({"type": ["string", "null"]}), "nullable", json!("nullable")),
            (json!({"type": ["string", "null"]}), "3", json!("3")),
            (json!({"type": ["string", "integer"]}), "007", json!("007")),
            (json!({"type": ["string", "integer"]}), "7", json!(7)),
            (json!({"type": ["string", "object"]}), "\"quoted\"", json!("\"quoted\"")),
            (json!({"enum": ["auto", 3]}), "3", json!(3)),
            (json!({"enum": ["1", "2"]}), "1", json!("1")),
            (json!({}), "[1]", json!([1])),
            (json!({}), "plain", json!("plain")),
        ];
        for (schema, text, value) in cases {
            let coerced = coerce(text, types(&schema));
            assert_eq!(serde_json::from_str::<Value>(&coerced).unwrap(), value, "{text:?} as {schema}");
        }
    }

    #[test]
    fn strings_stream_as_soon_as_they_can_be_nothing_else() {
        let mut argument = Argument::new(types(&json!({"type": ["string", "null"]})));
        assert_eq!(argument.push("nu"), "");
        assert_eq!(argument.push("t"), "\"nut");
        assert_eq!(argument.push("s\""), "s\\\"");
        assert_eq!(argument.finish(), "\"");
    }

    proptest! {
        #[test]
        fn parts_make_the_whole(
            parts in prop::collection::vec("(null|true|3|[\\[\\]{}\"a \n.-]){0,3}", 0..5),
            bits in 1..128_u8,
        ) {
            let names = ["string", "integer", "number", "boolean", "null", "array", "object"];
            let chosen: Vec<&str> = (0..7).filter(|bit| bits >> bit & 1 == 1).map(|bit| names[bit]).collect();
            let types = types(&json!({"type": chosen}));
            let mut argument = Argument::new(types);
            let mut json: String = parts.iter().map(|part| argument.push(part)).collect();
            json += &argument.finish();
            prop_assert_eq!(&json, &coerce(&parts.concat(), types));
            prop_assert!(serde_json::from_str::<Value>(&json).is_ok(), "{}", json);
        }
    }
}
