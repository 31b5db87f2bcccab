//! Takes typed fields out of a JSON object; every error names the field, what it must be and what it was.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of an object that have not been looked at. `null` counts as absent.
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Where the object is, as `messages[2].`; empty for the body itself.
    prefix: String,
    /// Fields that stand elsewhere in the client's body than where they are read, with their paths there.
    moved: Vec<(&'static str, String)>,
}

impl Fields {
    pub(crate) fn new(map: Map<String, Value>) -> Self {
        Self { map, prefix: String::new(), moved: Vec::new() }
    }

    /// The object `value` found at `path`.
    pub(crate) fn nested(path: &str, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, prefix: format!("{path}."), moved: Vec::new() }),
            other => Err(ApiError::value(path, "an object", &other)),
        }
    }

    /// Full path of the field `name`, as the client spells it.
    pub(crate) fn path(&self, name: &str) -> String {
        match self.moved.iter().find(|(ours, _)| *ours == name) {
            Some((_, path)) => path.clone(),
            None => format!("{}{name}", self.prefix),
        }
    }

    /// Lets the field that an API calls `theirs` be read as `ours`.
    pub(crate) fn rename(&mut self, theirs: &str, ours: &'static str) {
        if let Some(value) = self.take(theirs) {
            self.put(ours, self.path(theirs), value);
        }
    }

    /// Lets a value that stands at `path` of the body be read as the field `ours`.
    pub(crate) fn put(&mut self, ours: &'static str, path: String, value: Value) {
        self.map.insert(ours.to_owned(), value);
        self.moved.push((ours, path));
    }

    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        #[cfg(test)]
        asked::note(&self.path(name));
        // What is left is only listed, so its order does not matter.
        self.map.swap_remove(name).filter(|value| !value.is_null())
    }

    /// A field that is left where it is.
    pub(crate) fn peek(&self, name: &str) -> Option<&Value> {
        self.map.get(name)
    }

    /// Whether the field is there, even as `null`.
    pub(crate) fn has(&self, name: &str) -> bool {
        #[cfg(test)]
        asked::note(&self.path(name));
        self.map.contains_key(name)
    }

    fn convert<T>(
        &mut self,
        name: &str,
        expected: &str,
        convert: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match convert(&value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(ApiError::value(self.path(name), expected, &value)),
        }
    }

    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.convert(name, "true or false", Value::as_bool)
    }

    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(ApiError::value(self.path(name), "a string", &other)),
        }
    }

    /// A number that is in range as the `f32` it is used as.
    pub(crate) fn number(
        &mut self,
        name: &str,
        expected: &str,
        in_range: impl Fn(f32) -> bool,
    ) -> Result<Option<f32>, ApiError> {
        self.convert(name, expected, |value| {
            let number = value.as_f64()? as f32;
            in_range(number).then_some(number)
        })
    }

    /// A whole number; `4.0` is one.
    pub(crate) fn integer(
        &mut self,
        name: &str,
        expected: &str,
        in_range: impl Fn(i64) -> bool,
    ) -> Result<Option<i64>, ApiError> {
        self.convert(name, expected, |value| whole_number(value).filter(|&number| in_range(number)))
    }

    pub(crate) fn count(&mut self, name: &str, least: i64) -> Result<Option<usize>, ApiError> {
        let expected = format!("a whole number, at least {least}");
        let found = self.integer(name, &expected, |number| number >= least)?;
        Ok(found.map(|number| number as usize))
    }

    /// A list, with the path of the field for messages about its items.
    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(ApiError::value(self.path(name), "a list", &other)),
        }
    }

    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(ApiError::value(self.path(name), "an object", &other)),
        }
    }

    /// Names of the fields that nobody took.
    pub(crate) fn rest(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.map.iter().map(|(name, value)| (name.as_str(), value))
    }
}

/// The whole number that `value` is, if it is one and fits.
pub(crate) fn whole_number(value: &Value) -> Option<i64> {
    // Exclusive: the float next to the largest whole number is one above it.
    const END: f64 = 9_223_372_036_854_775_808.0;
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        (value.as_u64().is_none() && number.fract() == 0.0 && (-END..END).contains(&number))
            .then_some(number as i64)
    })
}

/// The token id that `value` is, if it is one of `vocab_size`.
pub(crate) fn token_id(value: &Value, vocab_size: usize) -> Option<u32> {
    let number = whole_number(value)?;
    (0..vocab_size as i64).contains(&number).then_some(number as u32)
}

/// Remembers which fields parsers asked for, so that a test can hold them against the `OpenAPI` document.
#[cfg(test)]
pub(crate) mod asked {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    thread_local! {
        static PATHS: RefCell<BTreeSet<String>> = RefCell::default();
    }

    /// Positions in lists are left out: `messages[2].role` is `messages[].role`.
    pub(super) fn note(path: &str) {
        PATHS.with_borrow_mut(|paths| paths.insert(path.replace(|c: char| c.is_ascii_digit(), "")));
    }

    /// What this thread's parsers have asked for since the last call.
    pub(crate) fn take() -> BTreeSet<String> {
        PATHS.take()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value) -> Fields {
        let Value::Object(map) = value else { panic!("not an object") };
        Fields::new(map)
    }

    #[test]
    fn null_is_absent() {
        let mut fields = fields(json!({"a": null, "b": null}));
        assert!(fields.has("a"));
        assert_eq!(fields.boolean("a").unwrap(), None);
        assert_eq!(fields.string("b").unwrap(), None);
        assert_eq!(fields.rest().count(), 0);
    }

    #[test]
    fn moved_fields_keep_their_names() {
        let mut fields = fields(json!({"stop_sequences": 7, "text": {"format": 1}}));
        fields.rename("stop_sequences", "stop");
        fields.rename("absent", "seed");
        let error = fields.list("stop").unwrap_err();
        assert_eq!(error.message, "`stop_sequences` must be a list, got 7");
        fields.put("response_format", "text.format".into(), json!(1));
        assert_eq!(fields.object("response_format").unwrap_err().param.as_deref(), Some("text.format"));
        assert_eq!(fields.path("seed"), "seed");
    }

    #[test]
    fn errors_name_field_and_value() {
        let mut top = fields(json!({"t": "hot", "deep": {"x": 3}}));
        let error = top.number("t", "a number from 0 to 2", |_| true).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("t"));
        assert_eq!(error.message, "`t` must be a number from 0 to 2, got \"hot\"");
        let deep = top.take("deep").unwrap();
        let error = Fields::nested("deep", deep).unwrap().boolean("x").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("deep.x"));
    }

    #[test]
    fn whole_numbers() {
        for (value, expected) in [
            (json!(3), Some(3)),
            (json!(-3), Some(-3)),
            (json!(4.0), Some(4)),
            (json!(4.5), None),
            (json!(1e18), Some(1_000_000_000_000_000_000)),
            (json!(9.3e18), None),
            (json!(1e300), None),
            (json!(u64::MAX), None),
            (json!("3"), None),
            (json!(true), None),
        ] {
            assert_eq!(whole_number(&value), expected, "{value}");
        }
        assert_eq!(token_id(&json!(7), 8), Some(7));
        assert_eq!(token_id(&json!(8), 8), None);
        assert_eq!(token_id(&json!(-1), 8), None);
    }
}
