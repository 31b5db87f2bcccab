//! What a JSON schema says about the type of a parameter.

use serde_json::Value;

/// A set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Types(u8);

/// Schemas that are looked at for one parameter; one that refers to itself, or branches without end, is cut here.
const MOST_SCHEMAS: usize = 1000;
const DEEPEST: usize = 32;

impl Types {
    const NONE: Self = Self(0);
    pub(super) const STRING: Self = Self(1);
    pub(super) const INTEGER: Self = Self(2);
    /// A number with a fraction, or so large that it has none.
    pub(super) const FRACTION: Self = Self(4);
    pub(super) const BOOLEAN: Self = Self(8);
    pub(super) const NULL: Self = Self(16);
    pub(super) const ARRAY: Self = Self(32);
    pub(super) const OBJECT: Self = Self(64);
    pub(super) const ALL: Self = Self(127);

    /// Whether the sets have a type in common.
    pub(super) fn allow(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The type of a value from the first characters of its JSON text.
    pub(super) fn of_json(text: &str) -> Self {
        match text.as_bytes().first() {
            Some(b'{') => Self::OBJECT,
            Some(b'[') => Self::ARRAY,
            Some(b'"') => Self::STRING,
            Some(b't' | b'f') => Self::BOOLEAN,
            Some(b'n') => Self::NULL,
            _ if text.contains(['.', 'e', 'E']) => Self::FRACTION,
            _ => Self::INTEGER,
        }
    }

    fn named(name: &str) -> Self {
        match name {
            "string" => Self::STRING,
            "integer" => Self::INTEGER,
            "number" => Self::INTEGER.or(Self::FRACTION),
            "boolean" => Self::BOOLEAN,
            "null" => Self::NULL,
            "array" => Self::ARRAY,
            "object" => Self::OBJECT,
            _ => Self::ALL,
        }
    }

    fn of_value(value: &Value) -> Self {
        Self::of_json(&value.to_string())
    }
}

/// Types that the parameter `name` may have where `root` describes the arguments. A declared parameter of which
/// nothing is said may have any; one that is not declared is a string, unless additional ones are described.
pub(super) fn parameter_types(root: &Value, name: &str) -> Types {
    let mut reader = Reader { root, left: MOST_SCHEMAS };
    if let Some(schema) = reader.find(root, name, Which::Declared, 0) {
        return reader.types(schema, 0);
    }
    match reader.find(root, name, Which::Additional, 0) {
        Some(schema) if schema.is_object() => reader.types(schema, 0),
        _ => Types::STRING,
    }
}

/// Whether `root` declares the parameter `name`.
pub(super) fn declares(root: &Value, name: &str) -> bool {
    Reader { root, left: MOST_SCHEMAS }.find(root, name, Which::Declared, 0).is_some()
}

#[derive(Clone, Copy)]
enum Which {
    Declared,
    Additional,
}

struct Reader<'a> {
    root: &'a Value,
    left: usize,
}

impl<'a> Reader<'a> {
    /// Counts a schema; whether it is still to be looked at.
    fn enter(&mut self, depth: usize) -> bool {
        self.left = self.left.saturating_sub(1);
        self.left > 0 && depth < DEEPEST
    }

    fn resolve(&self, reference: &Value) -> Option<&'a Value> {
        let pointer = reference.as_str()?.strip_prefix('#')?;
        self.root.pointer(pointer)
    }

    /// The schema of a property of an object schema.
    fn find(&mut self, schema: &'a Value, name: &str, which: Which, depth: usize) -> Option<&'a Value> {
        if !self.enter(depth) {
            return None;
        }
        let found = match which {
            Which::Declared => schema.get("properties").and_then(|properties| properties.get(name)),
            Which::Additional => schema.get("additionalProperties"),
        };
        if found.is_some() {
            return found;
        }
        let target = schema.get("$ref").and_then(|reference| self.resolve(reference));
        let branches = ["allOf", "anyOf", "oneOf"].into_iter().filter_map(|key| schema.get(key)?.as_array());
        target
            .into_iter()
            .chain(branches.flatten())
            .find_map(|branch| self.find(branch, name, which, depth + 1))
    }

    fn types(&mut self, schema: &'a Value, depth: usize) -> Types {
        let Some(fields) = schema.as_object() else { return Types::ALL };
        if !self.enter(depth) {
            return Types::ALL;
        }
        let mut types = Types::ALL;
        if let Some(target) = fields.get("$ref").and_then(|reference| self.resolve(reference)) {
            types = types.and(self.types(target, depth + 1));
        }
        match fields.get("type") {
            Some(Value::String(name)) => types = types.and(Types::named(name)),
            Some(Value::Array(names)) => {
                let named = names.iter().filter_map(Value::as_str).map(Types::named);
                types = types.and(named.fold(Types::NONE, Types::or));
            }
            _ => {}
        }
        if let Some(values) = fields.get("enum").and_then(Value::as_array) {
            types = types.and(values.iter().map(Types::of_value).fold(Types::NONE, Types::or));
        }
        if let Some(value) = fields.get("const") {
            types = types.and(Types::of_value(value));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(branches) = fields.get(key).and_then(Value::as_array) {
                let mut any = Types::NONE;
                for branch in branches {
                    any = any.or(self.types(branch, depth + 1));
                }
                types = types.and(any);
            }
        }
        for branch in fields.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            types = types.and(self.types(branch, depth + 1));
        }
        if types == Types::ALL {
            types = implied(|key| fields.contains_key(key));
        }
        if fields.get("nullable") == Some(&Value::Bool(true)) {
            types = types.or(Types::NULL);
        }
        if types == Types::NONE { Types::ALL } else { types }
    }
}

/// The type that keywords speak of where none is named.
fn implied(has: impl Fn(&str) -> bool) -> Types {
    let any = |keys: &[&str]| keys.iter().any(|key| has(key));
    if any(&["properties", "additionalProperties", "patternProperties", "required"]) {
        Types::OBJECT
    } else if any(&["items", "prefixItems", "minItems", "maxItems"]) {
        Types::ARRAY
    } else if any(&["pattern", "minLength", "maxLength", "format"]) {
        Types::STRING
    } else if any(&["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]) {
        Types::named("number")
    } else {
        Types::ALL
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn types_of_parameters() {
        let number = Types::named("number");
        let cases = [
            (json!({"type": "string"}), Types::STRING),
            (json!({"type": ["integer", "null"]}), Types::INTEGER.or(Types::NULL)),
            (json!({"type": "number", "nullable": true}), number.or(Types::NULL)),
            (json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}), Types::INTEGER.or(Types::NULL)),
            (json!({"oneOf": [{"$ref": "#/$defs/Ids"}, {"type": "string"}]}), Types::ARRAY.or(Types::STRING)),
            (
                json!({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}),
                Types::INTEGER,
            ),
            (json!({"enum": ["auto", 3]}), Types::STRING.or(Types::INTEGER)),
            (json!({"const": 1.5}), Types::FRACTION),
            (json!({"$ref": "#/$defs/Ids", "description": "x"}), Types::ARRAY),
            (json!({"$ref": "#/$defs/Loop"}), Types::ALL),
            (json!({"$ref": "other.json#/x"}), Types::ALL),
            (json!({"properties": {}}), Types::OBJECT),
            (json!({"items": {}}), Types::ARRAY),
            (json!({"pattern": "x"}), Types::STRING),
            (json!({"minimum": 1}), number),
            (json!({"description": "anything"}), Types::ALL),
            (json!({"type": "nonsense"}), Types::ALL),
            (json!({"allOf": [{"type": "string"}, {"type": "null"}]}), Types::ALL),
            (json!(true), Types::ALL),
        ];
        for (schema, types) in cases {
            let root = json!({
                "properties": {"x": schema},
                "$defs": {"Ids": {"type": "array"}, "Loop": {"$ref": "#/$defs/Loop"}},
            });
            assert_eq!(parameter_types(&root, "x"), types, "{root}");
        }
    }

    #[test]
    fn parameters_are_found_where_they_are_declared() {
        let root = json!({
            "allOf": [{"$ref": "#/$defs/Base"}],
            "additionalProperties": {"type": "integer"},
            "$defs": {"Base": {"properties": {"a": {"type": "boolean"}}}},
        });
        assert_eq!(parameter_types(&root, "a"), Types::BOOLEAN);
        assert!(declares(&root, "a") && !declares(&root, "b"));
        assert_eq!(parameter_types(&root, "b"), Types::INTEGER);
        assert_eq!(parameter_types(&json!({"properties": {}}), "b"), Types::STRING);
        assert_eq!(parameter_types(&json!({"additionalProperties": false}), "b"), Types::STRING);
        assert_eq!(parameter_types(&Value::Null, "b"), Types::STRING);
    }

    #[test]
    fn schemas_that_branch_without_end_are_cut() {
        let branches = vec![json!({"$ref": "#/$defs/T"}); 10];
        let root = json!({"properties": {"x": {"$ref": "#/$defs/T"}}, "$defs": {"T": {"anyOf": branches}}});
        assert_eq!(parameter_types(&root, "x"), Types::ALL);
    }
}
