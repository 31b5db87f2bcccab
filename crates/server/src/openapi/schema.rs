//! JSON Schema, as far as the tables need it.

use serde_json::{Map, Value, json};

/// A property of an object.
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) schema: Value,
    pub(super) required: bool,
}

/// A request field that may be left out, which `null` does as well. The example is what the tests send.
pub(super) fn field(name: &'static str, schema: Value, example: impl Into<Value>, doc: &str) -> Field {
    Field { name, schema: described(nullable(schema), doc, Some(example.into())), required: false }
}

/// A request field that must be there.
pub(super) fn needed(name: &'static str, schema: Value, example: impl Into<Value>, doc: &str) -> Field {
    Field { name, schema: described(schema, doc, Some(example.into())), required: true }
}

/// A field of an answer that is always there.
pub(super) fn always(name: &'static str, schema: Value, doc: &str) -> Field {
    Field { name, schema: described(schema, doc, None), required: true }
}

/// A field of an answer that is there when it was asked for or when there is something to tell.
pub(super) fn sometimes(name: &'static str, schema: Value, doc: &str) -> Field {
    Field { name, schema: described(schema, doc, None), required: false }
}

fn described(schema: Value, doc: &str, example: Option<Value>) -> Value {
    let mut schema = schema;
    if let Value::Object(map) = &mut schema {
        if !doc.is_empty() {
            map.insert("description".into(), doc.into());
        }
        map.extend(example.map(|example| ("examples".into(), json!([example]))));
    }
    schema
}

/// `schema` or null.
pub(super) fn nullable(mut schema: Value) -> Value {
    if schema.as_object().is_some_and(Map::is_empty) {
        return schema;
    }
    if let Some(Value::Array(values)) = schema.get_mut("enum") {
        values.push(Value::Null);
        return schema;
    }
    match schema.get_mut("type").map(Value::take) {
        Some(kind) => {
            schema["type"] = json!([kind, "null"]);
            schema
        }
        None => any_of([schema, json!({"type": "null"})]),
    }
}

/// An object with these properties; others are let through.
pub(super) fn object(fields: impl IntoIterator<Item = Field>) -> Value {
    let mut properties = Map::new();
    let mut required = Vec::new();
    for field in fields {
        if field.required {
            required.push(field.name);
        }
        let before = properties.insert(field.name.into(), field.schema);
        debug_assert!(before.is_none(), "{} is there twice", field.name);
    }
    if required.is_empty() {
        json!({"type": "object", "properties": properties})
    } else {
        json!({"type": "object", "required": required, "properties": properties})
    }
}

/// Any object.
pub(super) fn any_object() -> Value {
    json!({"type": "object"})
}

/// Any value.
pub(super) fn anything() -> Value {
    json!({})
}

/// A component by its name.
pub(super) fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// One of several.
pub(super) fn any_of(schemas: impl IntoIterator<Item = Value>) -> Value {
    json!({"anyOf": schemas.into_iter().collect::<Vec<_>>()})
}

/// One of these values.
pub(super) fn one_of<T: Into<Value>>(values: impl IntoIterator<Item = T>) -> Value {
    let values: Vec<Value> = values.into_iter().map(Into::into).collect();
    json!({"enum": values})
}

/// Any string.
pub(super) fn text() -> Value {
    json!({"type": "string"})
}

/// A string that is not empty.
pub(super) fn some_text() -> Value {
    json!({"type": "string", "minLength": 1})
}

/// True or false.
pub(super) fn boolean() -> Value {
    json!({"type": "boolean"})
}

/// A number in a closed interval.
pub(super) fn number(least: f64, most: f64) -> Value {
    json!({"type": "number", "minimum": least, "maximum": most})
}

/// A number above the lower bound, at most the upper one.
pub(super) fn number_above(bound: f64, most: f64) -> Value {
    json!({"type": "number", "exclusiveMinimum": bound, "maximum": most})
}

/// Any number.
pub(super) fn any_number() -> Value {
    json!({"type": "number"})
}

/// A whole number from `least` on, of those that are read as one.
pub(super) fn count(least: i64) -> Value {
    whole(least, i64::MAX)
}

/// A whole number in a closed interval.
pub(super) fn whole(least: i64, most: i64) -> Value {
    json!({"type": "integer", "minimum": least, "maximum": most})
}

/// A list.
pub(super) fn list(items: Value) -> Value {
    let mut schema = json!({"type": "array"});
    schema["items"] = items;
    schema
}

/// A list of bounded length.
pub(super) fn list_of(items: Value, least: usize, most: usize) -> Value {
    let mut schema = list(items);
    schema["minItems"] = least.into();
    schema["maxItems"] = most.into();
    schema
}

/// A list of at least one item.
pub(super) fn some(items: Value) -> Value {
    let mut schema = list(items);
    schema["minItems"] = 1.into();
    schema
}
