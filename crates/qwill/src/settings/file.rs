//! Settings in a TOML file: one line each, without groups.

use std::ffi::OsString;
use std::path::Path;

use clap::{Arg, Command};
use toml_edit::{Document, Item, Value};

use super::error::SettingError;
use super::{is_setting, key};

/// Below this likeness another name is no suggestion.
const LEAST_LIKENESS: f64 = 0.7;

/// A setting of the file.
#[derive(Debug)]
pub(super) struct Entry {
    /// The flag's id.
    pub(super) id: String,
    /// The flag's name.
    pub(super) key: String,
    /// Counted from 1.
    pub(super) line: usize,
    /// The same as it would be typed.
    pub(super) arguments: Vec<OsString>,
}

/// Checks values of a setting, and gives them as they would be typed.
pub(super) type Check<'a> = dyn Fn(&Arg, &[String]) -> Result<Vec<OsString>, String> + 'a;

/// Every setting of the file, checked.
pub(super) fn read(path: &Path, serve: &Command, check: &Check<'_>) -> Result<Vec<Entry>, SettingError> {
    let text = std::fs::read_to_string(path)
        .map_err(|reason| SettingError::Unreadable { path: path.to_owned(), reason })?;
    let document = Document::parse(text.as_str()).map_err(|error| SettingError::Syntax {
        path: path.to_owned(),
        line: line_of(&text, error.span()),
        reason: error.message().trim().replace('\n', ", "),
    })?;
    let mut entries: Vec<Entry> = Vec::new();
    for (name, item) in document.iter() {
        let span = document.get_key_value(name).and_then(|(key, _)| key.span());
        let line = line_of(&text, span.or_else(|| item.span()));
        let unknown = || SettingError::UnknownKey {
            path: path.to_owned(),
            line,
            key: name.to_owned(),
            nearest: nearest(name, serve),
        };
        let wanted = name.replace('_', "-");
        let mut settings = serve.get_arguments().filter(|argument| is_setting(argument));
        let argument = settings.find(|argument| key(argument) == wanted).ok_or_else(unknown)?;
        let refused = |reason| SettingError::Value {
            path: path.to_owned(),
            line,
            key: name.to_owned(),
            value: if argument.is_hide_env_values_set() { "(hidden)".to_owned() } else { shown(item) },
            reason,
        };
        let arguments = values(item).and_then(|values| check(argument, &values)).map_err(refused)?;
        let id = argument.get_id().to_string();
        if entries.iter().any(|entry| entry.id == id) {
            return Err(SettingError::Twice { path: path.to_owned(), line, key: name.to_owned() });
        }
        entries.push(Entry { id, key: wanted, line, arguments });
    }
    Ok(entries)
}

fn line_of(text: &str, span: Option<std::ops::Range<usize>>) -> usize {
    let before = span.map_or(0, |span| span.start);
    text.bytes().take(before).filter(|byte| *byte == b'\n').count() + 1
}

/// The setting whose name is most like this one.
fn nearest(name: &str, serve: &Command) -> Option<String> {
    let name = name.replace('_', "-").to_lowercase();
    serve
        .get_arguments()
        .filter(|argument| is_setting(argument))
        .map(key)
        .map(|key| (strsim::jaro_winkler(&name, &key), key))
        .filter(|(likeness, _)| *likeness >= LEAST_LIKENESS)
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, key)| key)
}

/// The value on one line, as it stands in the file.
fn shown(item: &Item) -> String {
    item.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The value or values as text.
fn values(item: &Item) -> Result<Vec<String>, String> {
    match item.as_value() {
        Some(Value::Array(list)) => list.iter().map(scalar).collect(),
        Some(value) => Ok(vec![scalar(value)?]),
        None => Err("settings are not grouped: write `key = value` outside any [table]".to_owned()),
    }
}

fn scalar(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.value().clone()),
        Value::Integer(number) => Ok(number.value().to_string()),
        Value::Float(number) => Ok(number.value().to_string()),
        Value::Boolean(is_on) => Ok(is_on.value().to_string()),
        Value::Datetime(_) | Value::Array(_) | Value::InlineTable(_) => {
            Err("expected a text, a number, true or false, or a list of these".to_owned())
        }
    }
}
