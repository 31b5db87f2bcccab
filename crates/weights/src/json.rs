//! Reading typed fields out of JSON that anyone may have written.

use serde_json::{Map, Value};

use crate::error::WeightsError;

/// Largest size accepted in a configuration: far above any model, low enough that products of a few sizes
/// cannot overflow.
pub(crate) const MAX_SIZE: usize = 1 << 24;

/// Parses a file that must hold one JSON object.
pub(crate) fn parse_object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>, WeightsError> {
    serde_json::from_slice(bytes)
        .map_err(|error| WeightsError::Json { file: file.to_owned(), reason: error.to_string() })
}

/// A value for a message, cut to a readable length.
pub(crate) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(100) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Fields looked up in several objects in turn, such as `text_config` and then the top level. A field that is
/// `null` counts as absent.
#[derive(Clone)]
pub(crate) struct Fields<'a> {
    file: &'a str,
    /// Path prefix for messages (`text_config.`) and object.
    scopes: Vec<(String, &'a Map<String, Value>)>,
}

impl<'a> Fields<'a> {
    /// The fields of a file's top level.
    pub(crate) fn new(file: &'a str, top: &'a Map<String, Value>) -> Self {
        Self { file, scopes: vec![(String::new(), top)] }
    }

    /// The same, with the object in field `key` (if there is one) searched first.
    pub(crate) fn with_nested(&self, key: &str) -> Result<Self, WeightsError> {
        let mut fields = self.clone();
        if let Some((path, value)) = self.get(key) {
            let object = value.as_object().ok_or_else(|| self.fault(&path, value, "an object"))?;
            fields.scopes.insert(0, (format!("{path}."), object));
        }
        Ok(fields)
    }

    /// The first value of that name with its path.
    pub(crate) fn get(&self, key: &str) -> Option<(String, &'a Value)> {
        self.scopes.iter().find_map(|(prefix, object)| {
            let value = object.get(key).filter(|value| !value.is_null())?;
            Some((format!("{prefix}{key}"), value))
        })
    }

    /// The error for a value that is not supported.
    pub(crate) fn fault(&self, path: &str, found: &Value, supported: impl Into<String>) -> WeightsError {
        WeightsError::Config {
            file: self.file.to_owned(),
            field: path.to_owned(),
            found: brief(found),
            supported: supported.into(),
        }
    }

    /// The error for a field that is not there.
    pub(crate) fn absent(&self, key: &str, supported: impl Into<String>) -> WeightsError {
        let prefix = self.scopes.first().map_or("", |(prefix, _)| prefix.as_str());
        WeightsError::Config {
            file: self.file.to_owned(),
            field: format!("{prefix}{key}"),
            found: "nothing".to_owned(),
            supported: supported.into(),
        }
    }

    /// `convert` applied to the value if there is one; its failure is an error that says `supported`.
    pub(crate) fn optional<T>(
        &self,
        key: &str,
        supported: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, WeightsError> {
        self.get(key)
            .map(|(path, value)| convert(value).ok_or_else(|| self.fault(&path, value, supported)))
            .transpose()
    }

    /// A size from 1 to [`MAX_SIZE`]; required when there is no default.
    pub(crate) fn size(&self, key: &str, default: Option<usize>) -> Result<usize, WeightsError> {
        const SUPPORTED: &str = "an integer from 1 to 16777216";
        self.optional(key, SUPPORTED, |value| {
            value.as_u64().filter(|&n| n >= 1 && n <= MAX_SIZE as u64).map(|n| n as usize)
        })?
        .or(default)
        .ok_or_else(|| self.absent(key, SUPPORTED))
    }

    /// A positive finite number.
    pub(crate) fn positive(&self, key: &str, default: f64) -> Result<f64, WeightsError> {
        let number = self.optional(key, "a positive number", |value| {
            value.as_f64().filter(|n| n.is_finite() && *n > 0.0)
        })?;
        Ok(number.unwrap_or(default))
    }

    /// `true` or `false`.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, WeightsError> {
        self.optional(key, "true or false", Value::as_bool)
    }

    /// A string that, when present, must be one of `choices`.
    pub(crate) fn choice(&self, key: &str, choices: &[&str]) -> Result<Option<&'a str>, WeightsError> {
        self.optional(key, &choices.join(", "), |value| value.as_str().filter(|text| choices.contains(text)))
    }
}
