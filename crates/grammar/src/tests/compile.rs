//! What is compiled, and what is refused with which words.

use serde_json::{Value, json};

use super::{grammars, json, lark, refusal};
use crate::Shape;

#[test]
fn what_cannot_be_met_is_refused_in_words() {
    let regex = |pattern: &str| refusal(&Shape::Regex(pattern.to_owned()));
    assert!(!regex("(?<x").is_empty());
    assert!(regex("a(?=b)").contains("look"));
    assert!(refusal(&lark("root ::= (")).contains("Lark"));
    assert!(refusal(&lark("start: (")).contains('1'), "where it is wrong: {}", refusal(&lark("start: (")));
    assert!(refusal(&lark("start: missing")).contains("missing"));
    let pattern = json(json!({"type": "string", "pattern": "(?<x"}));
    assert!(refusal(&pattern).contains("(?<x"), "{}", refusal(&pattern));
    let impossible = json(json!({"type": "integer", "minimum": 5, "maximum": 3}));
    assert!(refusal(&impossible).to_lowercase().contains("minimum"), "{}", refusal(&impossible));
    assert!(refusal(&json(json!(7))).contains('7'));
    assert!(refusal(&json(json!({"type": "strange"}))).contains("strange"));
    assert!(refusal(&json(json!({"$ref": "#/$defs/none"}))).contains("none"));
    let unsupported = json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true});
    assert!(refusal(&json(unsupported.clone())).contains("uniqueItems"));
    assert!(grammars().compile(&Shape::Json { schema: unsupported, lenient: true }).is_ok());
    let long = Shape::Regex("a".repeat(300 << 10));
    assert!(refusal(&long).contains("262144"));
}

/// Schemas that blow up come to an end, one way or the other.
#[test]
fn schemas_that_blow_up_are_bounded() {
    let mut nested = json!({"type": "string"});
    for level in 0..12 {
        let branch = |index: usize| json!({"type": "object", "properties": {format!("p{level}_{index}"): nested.clone()}});
        nested = if level % 4 == 0 {
            json!({"oneOf": (0..2).map(branch).collect::<Vec<Value>>()})
        } else {
            json!({"allOf": [branch(0)]})
        };
    }
    let _ = grammars().compile(&json(nested));
    let many: Vec<String> = (0..20_000).map(|index| format!("value {index}")).collect();
    let _ = grammars().compile(&json(json!({"enum": many})));
    let _ = grammars().compile(&Shape::Regex("(a|b){1,1000}(c|d){1,1000}".to_owned()));
    let left = lark("start: start \"a\" | \"a\"");
    let _ = grammars().compile(&left);
    let nothing = lark("start: start");
    assert!(grammars().compile(&nothing).is_err());
}

#[test]
fn a_shape_is_compiled_once() {
    let shape = json(json!({"type": "object", "properties": {"once": {"type": "boolean"}}}));
    let first = grammars().compile(&shape).unwrap();
    let second = grammars().compile(&shape).unwrap();
    assert!(first.is_same(&second));
}
