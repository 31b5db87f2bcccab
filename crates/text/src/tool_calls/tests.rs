use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::{AnswerParser, Piece};

fn tools() -> Arc<[OfferedTool]> {
    let tool = |name: &str, parameters: Value| OfferedTool { name: name.into(), parameters };
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "x": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "y": {"$ref": "#/$defs/Ids"},
            "note": {"type": ["string", "null"]},
        },
        "$defs": {"Ids": {"type": "array"}},
    });
    Arc::new([tool("f", parameters.clone()), tool("g", parameters), tool("bare", Value::Null)])
}

/// What became of an output: thinking, content, and the name and arguments of calls.
#[derive(Debug, PartialEq)]
struct Outcome {
    reasoning: String,
    content: String,
    calls: Vec<(String, Value)>,
}

fn outcome(reasoning: &str, content: &str, calls: &[(&str, Value)]) -> Outcome {
    let calls = calls.iter().map(|(name, arguments)| ((*name).to_owned(), arguments.clone())).collect();
    Outcome { reasoning: reasoning.into(), content: content.into(), calls }
}

/// Checks that pieces come in order, and joins them.
fn join(pieces: impl IntoIterator<Item = Piece>) -> Outcome {
    let mut all = Outcome { reasoning: String::new(), content: String::new(), calls: Vec::new() };
    let mut open: Option<(String, String)> = None;
    for piece in pieces {
        match piece {
            Piece::Reasoning(text) => {
                assert!(!text.is_empty() && all.content.is_empty() && all.calls.is_empty() && open.is_none());
                all.reasoning += &text;
            }
            Piece::Content(text) => {
                assert!(!text.is_empty() && open.is_none());
                all.content += &text;
            }
            Piece::Call(CallPiece::Begin { name }) => {
                assert!(open.replace((name, String::new())).is_none());
            }
            Piece::Call(CallPiece::Arguments(text)) => {
                assert!(!text.is_empty());
                open.as_mut().unwrap().1 += &text;
            }
            Piece::Call(CallPiece::End) => {
                let (name, arguments) = open.take().unwrap();
                let value: Value =
                    serde_json::from_str(&arguments).unwrap_or_else(|error| panic!("{error} in {arguments}"));
                assert!(value.is_object(), "{arguments}");
                all.calls.push((name, value));
            }
        }
    }
    assert!(open.is_none());
    all
}

fn parse_in(thinking: bool, chunks: &[&str]) -> Outcome {
    let mut parser = AnswerParser::new(thinking, Some(tools()));
    let mut pieces: Vec<Piece> = chunks.iter().flat_map(|chunk| parser.push(chunk)).collect();
    pieces.extend(parser.finish());
    join(pieces)
}

/// Parses a text at once, by the character, and cut in two everywhere; the results must be the same.
fn parse(thinking: bool, text: &str) -> Outcome {
    let whole = parse_in(thinking, &[text]);
    let chars: Vec<&str> = text.split("").collect();
    assert_eq!(parse_in(thinking, &chars), whole, "by the character: {text}");
    for (cut, _) in text.char_indices() {
        assert_eq!(parse_in(thinking, &[&text[..cut], &text[cut..]]), whole, "cut at {cut}: {text}");
    }
    whole
}

const OSLO: &str =
    "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>";

#[test]
fn a_call_as_the_template_writes_it() {
    let call = ("f", json!({"city": "Oslo"}));
    assert_eq!(parse(false, OSLO), outcome("", "", std::slice::from_ref(&call)));
    assert_eq!(
        parse(false, &format!("Checking.\n\n{OSLO}\n")),
        outcome("", "Checking.", std::slice::from_ref(&call))
    );
    let thought = format!("I need it.\n</think>\n\n{OSLO}");
    assert_eq!(parse(true, &thought), outcome("I need it.", "", std::slice::from_ref(&call)));
    let twice = format!("{OSLO}\n{OSLO}");
    assert_eq!(parse(false, &twice), outcome("", "", &[call.clone(), call.clone()]));
    let talk = format!("One {OSLO}\ntwo\n{OSLO} three");
    assert_eq!(parse(false, &talk), outcome("", "One \ntwo three", &[call.clone(), call]));
    let none = "<tool_call>\n<function=bare>\n</function>\n</tool_call>";
    assert_eq!(parse(false, none), outcome("", "", &[("bare", json!({}))]));
}

#[test]
fn a_call_ends_thinking_that_was_not_closed() {
    let call = ("f", json!({"city": "Oslo"}));
    assert_eq!(parse(true, &format!("plan {OSLO}")), outcome("plan ", "", std::slice::from_ref(&call)));
    let late = format!("plan\n{OSLO}\n</think>\n\nDone.");
    assert_eq!(parse(true, &late), outcome("plan", "Done.", std::slice::from_ref(&call)));
    let musing = "I could write <tool_call>\n<function=h> or so.\n</think>\n\nNo.";
    assert_eq!(parse(true, musing), outcome("I could write <tool_call>\n<function=h> or so.", "No.", &[]));
}

#[test]
fn values_are_of_the_types_in_the_schema() {
    let text = "<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>\n<parameter=y>\n[1, True, None]\n</parameter>\n\
                <parameter=city>\n5\n</parameter>\n<parameter=other>\n7\n</parameter>\n<parameter=days>\n7\n</parameter>\n\
                <parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>";
    let arguments = json!({"x": 3, "y": [1, true, null], "city": "5", "other": "7", "days": 7, "note": null});
    assert_eq!(parse(false, text), outcome("", "", &[("f", arguments)]));
}

#[test]
fn strings_are_verbatim() {
    for value in [
        "",
        "\n",
        " two  spaces ",
        "a\n\n",
        "\n\nb",
        "if a < b && c > d { \"q\" } \\ \u{1}",
        "<parameter>\n<x>1</x>\n</parameter>\n<y/>",
        "a </parameter> b",
        "see </function> and </tool_call> and <tool_call>\n<function=f>",
        "<parameter=unknown>\n1",
        "<parameter name=\"a\">1</parameter>x",
        "🙂\u{301}日本",
    ] {
        let text = format!(
            "<tool_call>\n<function=f>\n<parameter=city>\n{value}\n</parameter>\n<parameter=note>\n{value}\n</parameter>\n\
             </function>\n</tool_call>"
        );
        let arguments = json!({"city": value, "note": value});
        assert_eq!(parse(false, &text), outcome("", "", &[("f", arguments)]), "{value:?}");
    }
}

#[test]
fn slightly_wrong_calls_are_understood() {
    let call = ("f", json!({"city": "Oslo"}));
    for text in [
        "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n",
        "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=city>\nOslo",
        "<tool_call><function=f><parameter=city>Oslo</parameter></function></tool_call>",
        "<tool_call>\n<function name=\"f\">\n<parameter name=\"city\">\nOslo\n</parameter>\n</function>\n</tool_call>",
        "< tool_call >\n< function = f >\n< parameter = city >\nOslo\n</ parameter >\n</ function >\n</ tool_call >",
        "<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>",
        "<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n{\"city\": \"Oslo\"}\n</function>\n</tool_call>",
        "<tool_call>\n<function=\"f\">\n<parameter='city'>\nOslo\n</parameter>\n</function>\n</tool_call>\n\n",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>",
        "<tool_call>\n{'name': 'f', 'arguments': {'city': 'Oslo',}}\n</tool_call>",
        "<tool_call>{\"arguments\": {\"city\": \"Oslo\"}, \"name\": \"f\"}</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": \"{\\\"city\\\": \\\"Oslo\\\"}\"}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"parameters\": {\"city\": \"Oslo\"}}",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Oslo",
    ] {
        assert_eq!(parse(false, text), outcome("", "", std::slice::from_ref(&call)), "{text}");
    }
    let missing = "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>";
    assert_eq!(parse(false, missing), outcome("", "", &[("f", json!({"city": "Oslo", "days": 2}))]));
    let empty = "<tool_call>\n{\"name\": \"bare\"}\n</tool_call>";
    assert_eq!(parse(false, empty), outcome("", "", &[("bare", json!({}))]));
}

#[test]
fn several_functions_in_a_block() {
    let text = "<tool_call>\n<function=f>\n<parameter=city>\na\n</parameter>\n</function>\n<function=g>\n</function>\n</tool_call>\nx";
    assert_eq!(parse(false, text), outcome("", "\nx", &[("f", json!({"city": "a"})), ("g", json!({}))]));
}

#[test]
fn what_is_no_call_stays_text() {
    for text in [
        "a < b",
        "Use <tool_call> to call.",
        "<tool_call>\n<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n{\"name\": \"unknown\", \"arguments\": {\"a\": {}}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": [1]}\n</tool_call>",
        "<tool_call>\n{not json}\n</tool_call>\n",
        "<tool_call>\n{\"name\": \"f\", \"arg",
        "<tool_call>\n<function=f",
        "<tool_call>\n",
        "<tool_",
        "Write `<function=f>` for that.",
        "x\n \n",
        "\n\n",
    ] {
        assert_eq!(parse(false, text), outcome("", text, &[]), "{text}");
    }
    assert_eq!(parse(true, "hm <tool_call>\n"), outcome("hm <tool_call>", "", &[]));
}

#[test]
fn what_belongs_to_no_argument_comes_after_the_call() {
    let call = ("f", json!({"city": "Oslo"}));
    let inside = OSLO.replace("</function>", "oops\n</function>");
    // A closing tag after which a call does not go on is part of the value.
    let value = json!({"city": "Oslo\n</parameter>\noops"});
    assert_eq!(parse(false, &inside), outcome("", "", &[("f", value)]));
    let before = OSLO.replace("<parameter", "why\n<parameter");
    assert_eq!(parse(false, &before), outcome("", "\nwhy\n\n", std::slice::from_ref(&call)));
    let after = OSLO.replace("</tool_call>", "oops</tool_call> and more");
    assert_eq!(parse(false, &after), outcome("", "\noops and more", std::slice::from_ref(&call)));
    let json = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Oslo\"; x}}\n</tool_call>";
    assert_eq!(parse(false, json), outcome("", "; x}}\n", &[call]));
}

#[test]
fn text_streams_until_a_tag_is_certain() {
    let mut parser = ToolCallParser::new(tools());
    let text = |text: &str| vec![Segment::Text(text.into())];
    assert_eq!(parser.push("one "), text("one "));
    assert_eq!(parser.push("two <"), text("two "));
    assert_eq!(parser.push("b> three"), text("<b> three"));
    assert_eq!(parser.push("\n\n"), []);
    assert_eq!(parser.push("<tool"), []);
    assert_eq!(parser.push("_call>\n<function=f>\n"), [Segment::Call(CallPiece::Begin { name: "f".into() })]);
    let arguments = |text: &str| vec![Segment::Call(CallPiece::Arguments(text.into()))];
    assert_eq!(parser.push("<parameter=city>\n"), arguments("{\"city\": \""));
    assert_eq!(parser.push("Os"), arguments("Os"));
    assert_eq!(parser.push("lo\n"), arguments("lo"));
    assert_eq!(parser.push("</parameter>\n</f"), []);
    assert_eq!(parser.push("unction>").len(), 2);
    assert_eq!(parser.push("\n</tool_call>\n"), []);
    assert_eq!(parser.finish(), []);
}

#[test]
fn long_strings_stream_in_either_style() {
    let value = "word \"q\" ".repeat(200);
    let xml = format!(
        "<tool_call>\n<function=f>\n<parameter=note>\n{value}\n</parameter>\n</function>\n</tool_call>"
    );
    let json = format!("<tool_call>\n{}\n</tool_call>", json!({"name": "f", "arguments": {"note": value}}));
    for text in [xml, json] {
        let chars: Vec<char> = text.chars().collect();
        let mut parser = AnswerParser::new(false, Some(tools()));
        let mut pieces: Vec<Piece> =
            chars.chunks(20).flat_map(|part| parser.push(&part.iter().collect::<String>())).collect();
        pieces.extend(parser.finish());
        let deltas =
            pieces.iter().filter(|piece| matches!(piece, Piece::Call(CallPiece::Arguments(_)))).count();
        assert!(deltas >= 80, "{deltas}");
        assert_eq!(join(pieces), outcome("", "", &[("f", json!({"note": value}))]));
    }
}

#[test]
fn openings_lead_into_a_call() {
    for style in [ToolStyle::Xml, ToolStyle::Json] {
        let arguments = match style {
            ToolStyle::Xml => "<parameter=city>\nx\n</parameter>\n</function>",
            ToolStyle::Json => "{\"city\": \"x\"}}",
        };
        let call = style.opening("f") + arguments + "\n</tool_call>";
        assert_eq!(parse(false, &call), outcome("", "", &[("f", json!({"city": "x"}))]));
    }
    assert_eq!(ToolStyle::of_template("…<function=NAME>…"), ToolStyle::Xml);
    assert_eq!(ToolStyle::of_template("…{\"name\": …"), ToolStyle::Json);
}

/// Bits of outputs: tags whole and in parts, and what may stand around them.
fn bits() -> impl Strategy<Value = Vec<&'static str>> {
    let bits = vec![
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<function=unknown>",
        "</function>",
        "<parameter=city>",
        "<parameter=days>",
        "<parameter=note>",
        "</parameter>",
        "<think>",
        "</think>",
        "\n",
        "\n",
        "\n",
        "a ",
        "<",
        "</",
        "é🙂",
        "12",
        "null",
        "{\"name\": \"f\", \"arguments\": ",
        "{",
        "}",
        "{\"a\": [1, 'x']}",
        "\"",
        ",",
        "tool_call>",
        "<function name=\"g\">",
        "< parameter = y >",
        "        ",
        OSLO,
    ];
    prop::collection::vec(prop::sample::select(bits), 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_chunking_gives_the_same(bits in bits(), thinking: bool, cuts in prop::collection::vec(1..9_usize, 1..12)) {
        let text = bits.concat();
        let chars: Vec<char> = text.chars().collect();
        let mut chunks = Vec::new();
        let mut rest = &chars[..];
        for &cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at(cut.min(rest.len()));
            chunks.push(now.iter().collect::<String>());
            rest = later;
        }
        let chunks: Vec<&str> = chunks.iter().map(String::as_str).collect();
        prop_assert_eq!(parse_in(thinking, &chunks), parse_in(thinking, &[&text]));
    }

    /// Every letter and digit of the output is somewhere in the result, tags and names of arguments apart.
    #[test]
    fn text_without_calls_is_left_as_it_is(bits in bits()) {
        let text = bits.concat();
        let parsed = parse_in(false, &[&text]);
        if parsed.calls.is_empty() {
            prop_assert_eq!(parsed.content, text);
        }
    }

    /// A well-formed call comes through whatever its values are, unless they end with what ends a value.
    #[test]
    fn calls_survive_their_values(city in "[a-z<>/= \n\"\\\\é]{0,30}", days: i64) {
        let text = format!(
            "t\n</think>\n\nok\n\n<tool_call>\n<function=f>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n\
             {days}\n</parameter>\n</function>\n</tool_call>"
        );
        let parsed = parse_in(true, &[&text]);
        prop_assert_eq!(parsed, outcome("t", "ok", &[("f", json!({"city": city, "days": days}))]));
    }
}
