//! Tool calls that grammars allow.

use qwill_text::ToolStyle;
use serde_json::{Value, json};

use super::walk::{allowed, walk};
use super::{end_ids, grammars, json, tokenizer};
use crate::{Shape, ToolCalls, ToolShape};

fn markers() -> (u32, u32) {
    let id = |text| tokenizer().id_of(text).unwrap();
    (id("<tool_call>"), id("</tool_call>"))
}

fn weather() -> ToolShape {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/point"}, "note": {"type": "string", "pattern": "^[a-z]{2,4}$"}},
        "required": ["city", "unit", "note"], "additionalProperties": false,
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
            "additionalProperties": false}}});
    ToolShape { name: "get_weather".to_owned(), parameters, strict: true }
}

fn calls(style: ToolStyle, parallel: bool) -> ToolCalls {
    let other = ToolShape { name: "stop".to_owned(), parameters: json!({"type": "object"}), strict: false };
    ToolCalls {
        style,
        tools: vec![weather(), other],
        parallel,
        required: true,
        answer: None,
        markers: Some(markers()),
    }
}

fn texts(calls: &ToolCalls) -> Vec<String> {
    let grammar = grammars().compile(&Shape::Tools(calls.clone())).unwrap();
    let walks = (0..12).filter_map(|seed| walk(&mut *grammar.guide(), seed));
    let texts: Vec<String> = walks.map(|ids| tokenizer().decode(&ids, false)).collect();
    assert!(texts.len() > 3, "only {} texts came to an end", texts.len());
    texts
}

#[test]
fn json_calls_have_the_arguments_that_the_schema_wants() {
    for text in texts(&calls(ToolStyle::Json, false)) {
        let body = text.strip_prefix("<tool_call>\n").unwrap().strip_suffix("\n</tool_call>").unwrap();
        let call: Value = serde_json::from_str(body).unwrap();
        let arguments = &call["arguments"];
        if call["name"] == "get_weather" {
            assert!(
                arguments["city"].is_string() && ["C", "F"].contains(&arguments["unit"].as_str().unwrap()),
                "{text}"
            );
        } else {
            assert!(call["name"] == "stop" && arguments.is_object(), "{text}");
        }
    }
}

#[test]
fn xml_calls_have_the_parameters_that_the_schema_wants() {
    for text in texts(&calls(ToolStyle::Xml, true)) {
        for call in text.split("</tool_call>").filter(|call| !call.is_empty()) {
            let body = call.trim_start_matches('\n').strip_prefix("<tool_call>\n<function=").unwrap();
            let (name, rest) = body.split_once(">\n").unwrap();
            let parameters = rest.strip_suffix("</function>\n").unwrap();
            if name == "stop" {
                continue;
            }
            assert_eq!(name, "get_weather");
            assert!(parameters.starts_with("<parameter=city>\n"), "{text}");
            let value = |key: &str| {
                let begin = format!("<parameter={key}>\n");
                Some(parameters.split_once(&begin)?.1.split_once("\n</parameter>\n").unwrap().0)
            };
            assert!(["C", "F"].contains(&value("unit").unwrap()), "{text}");
            let note = value("note").unwrap();
            assert!(
                (2..=4).contains(&note.len()) && note.bytes().all(|byte| byte.is_ascii_lowercase()),
                "{text}"
            );
            assert!(value("days").is_none_or(|days| days.trim().parse::<f64>().is_ok()), "{text}");
            let is_point = |text: &str| serde_json::from_str::<Value>(text).unwrap()["x"].is_number();
            assert!(value("where").is_none_or(is_point), "{text}");
        }
    }
}

#[test]
fn one_call_is_one_call_and_free_text_may_have_none() {
    let guide = |calls: &ToolCalls| grammars().compile(&Shape::Tools(calls.clone())).unwrap().guide();
    let mut required = guide(&calls(ToolStyle::Xml, false));
    assert_eq!(allowed(&mut *required), [markers().0]);
    for text in texts(&calls(ToolStyle::Xml, false)) {
        assert_eq!(text.matches("<tool_call>").count(), 1, "{text}");
    }
    let free = ToolCalls { required: false, ..calls(ToolStyle::Xml, true) };
    let mut free = guide(&free);
    let choices = allowed(&mut *free);
    assert!(choices.contains(&markers().0) && choices.len() > tokenizer().vocab_size() / 2);
    let hello = tokenizer().encode("hello <tool", qwill_text::Markers::None);
    for id in &hello {
        free.accept(*id).unwrap();
    }
    let choices = allowed(&mut *free);
    assert!(choices.contains(&markers().0) && choices.contains(&end_ids()[0]));
    let rest = tokenizer().encode("_call>", qwill_text::Markers::None);
    assert!(free.count_allowed(&rest).unwrap() < rest.len(), "a call has to begin with its marker");
    free.accept(markers().0).unwrap();
    assert!(!allowed(&mut *free).contains(&end_ids()[0]));
}

#[test]
fn an_answer_has_its_schema_where_it_is_no_call() {
    let answer = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
        "additionalProperties": false});
    let either =
        ToolCalls { required: false, answer: Some(Box::new(json(answer))), ..calls(ToolStyle::Xml, false) };
    let (mut objects, mut called) = (0, 0);
    for text in texts(&either) {
        if text.starts_with('{') {
            assert!(serde_json::from_str::<Value>(&text).unwrap()["n"].is_number(), "{text}");
            objects += 1;
        } else {
            assert!(text.starts_with("<tool_call>"), "{text}");
            called += 1;
        }
    }
    assert!(objects + called > 0);
}
