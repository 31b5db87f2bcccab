//! Random outputs of a model through everything that reads them. `cargo xtask fuzz` runs this for longer.

#![allow(clippy::unwrap_used, reason = "a test that finds something missing has failed")]

mod runner;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use qwill_text::{AnswerParser, CallPiece, Detokenizer, OfferedTool, Piece, StopMatcher, Tokenizer};
use serde_json::{Value, json};

use runner::{fuzz, search};

/// What outputs are made of: markup whole, broken and misplaced, values of every kind, and any characters.
fn output() -> impl Strategy<Value = String> {
    let markup = prop::sample::select(vec![
        "<tool_call>\n<function=f>\n",
        "</function>\n</tool_call>",
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<function=nobody>",
        "</function>",
        "<parameter=text>",
        "<parameter=count>",
        "<parameter=list>",
        "<parameter=maybe>",
        "</parameter>",
        "<think>",
        "</think>",
        "<function name=\"f\">",
        "<parameter name='maybe' type=x>",
        "< / function >",
        "\n",
        "\n\n",
        " ",
        "<",
        ">",
        "{\"name\": \"f\", \"arguments\": ",
        "{'arguments': {}, 'name': 'f'}",
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "\"",
        "'",
        "\\",
        "\\u",
        "\\ud83d",
        "\\ude42",
        "null",
        "None",
        "True",
        "12",
        "-",
        "1e5",
        "\u{301}",
        "🙂",
    ]);
    let bit = prop_oneof![6 => markup.prop_map(str::to_owned), 1 => any::<String>(), 1 => "[a-z <>/=]{0,12}"];
    prop::collection::vec(bit, 0..40).prop_map(|bits| bits.concat())
}

/// A text and where it is cut.
fn in_chunks(text: &str, cuts: &[usize]) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let mut chunks = Vec::new();
    let mut rest = &chars[..];
    for &cut in cuts.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (now, later) = rest.split_at(cut.clamp(1, rest.len()));
        chunks.push(now.iter().collect());
        rest = later;
    }
    chunks
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1..24_usize, 1..16)
}

fn tools() -> Arc<[OfferedTool]> {
    let parameters = json!({"properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "list": {"type": ["array", "object"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "any": {},
    }});
    Arc::new([OfferedTool { name: "f".into(), parameters }])
}

/// Thinking, content, and the text of each call's arguments.
fn join(pieces: impl IntoIterator<Item = Piece>) -> (String, String, Vec<String>) {
    let mut joined = (String::new(), String::new(), Vec::new());
    for piece in pieces {
        match piece {
            Piece::Reasoning(text) => joined.0 += &text,
            Piece::Content(text) => joined.1 += &text,
            Piece::Call(CallPiece::Begin { .. }) => joined.2.push(String::new()),
            Piece::Call(CallPiece::Arguments(text)) => *joined.2.last_mut().unwrap() += &text,
            Piece::Call(CallPiece::End) => {}
        }
    }
    joined
}

fn parse(
    thinking: bool,
    tools: Option<Arc<[OfferedTool]>>,
    chunks: &[String],
) -> (String, String, Vec<String>) {
    let mut parser = AnswerParser::new(thinking, tools);
    let mut pieces: Vec<Piece> = chunks.iter().flat_map(|chunk| parser.push(chunk)).collect();
    pieces.extend(parser.finish());
    join(pieces)
}

#[test]
fn tool_calls() {
    fuzz("tool calls", &(output(), cuts(), any::<bool>()), |(text, cuts, thinking)| {
        let whole = parse(thinking, Some(tools()), std::slice::from_ref(&text));
        for arguments in &whole.2 {
            let value = serde_json::from_str::<Value>(arguments);
            prop_assert!(value.as_ref().is_ok_and(Value::is_object), "{}", arguments);
        }
        if whole.2.is_empty() {
            prop_assert_eq!(&whole, &parse(thinking, None, std::slice::from_ref(&text)));
        }
        prop_assert_eq!(parse(thinking, Some(tools()), &in_chunks(&text, &cuts)), whole);
        Ok(())
    });
}

#[test]
fn reasoning() {
    fuzz("reasoning", &(output(), cuts(), any::<bool>()), |(text, cuts, thinking)| {
        let (reasoning, content, calls) = parse(thinking, None, std::slice::from_ref(&text));
        prop_assert!(calls.is_empty());
        prop_assert!(text.ends_with(&content) && text.contains(&reasoning));
        let between = text.len() - reasoning.len() - content.len();
        let dropped = text.replace("<think>", "").replace("</think>", "").replace('\n', "");
        prop_assert!(thinking || between == 0);
        prop_assert!(reasoning.len() + content.len() >= dropped.len());
        prop_assert_eq!(parse(thinking, None, &in_chunks(&text, &cuts)), (reasoning, content, calls));
        Ok(())
    });
}

#[test]
fn stop_strings() {
    let stops = prop::collection::vec("[a-c\né]{0,5}", 0..5);
    fuzz("stop strings", &("[a-c\né]{0,60}", cuts(), stops, any::<bool>()), |(text, cuts, stops, shown)| {
        let run = |chunks: &[String]| {
            let mut matcher = StopMatcher::new(stops.clone(), shown);
            let given: String = chunks.iter().map(|chunk| matcher.push(chunk).text).collect();
            given + &matcher.finish()
        };
        let whole = run(std::slice::from_ref(&text));
        prop_assert!(text.starts_with(&whole));
        for stop in stops.iter().filter(|stop| !stop.is_empty() && !shown) {
            prop_assert!(!whole.contains(stop.as_str()));
        }
        prop_assert_eq!(run(&in_chunks(&text, &cuts)), whole);
        Ok(())
    });
}

fn tokenizer() -> Arc<Tokenizer> {
    static LOADED: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let load = || {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny");
        let read = |name: &str| std::fs::read(format!("{directory}/{name}")).unwrap();
        let config = read("tokenizer_config.json");
        Arc::new(Tokenizer::from_json(&read("tokenizer.json"), Some(&config)).unwrap())
    };
    Arc::clone(LOADED.get_or_init(load))
}

#[test]
fn detokenizer() {
    // Ids of single bytes often, so that characters are cut; ids that do not exist sometimes.
    let id = prop_oneof![3 => 0..256_u32, 3 => 0..8192_u32, 1 => 8100..8300_u32, 1 => any::<u32>()];
    fuzz("detokenizer", &(prop::collection::vec(id, 0..64), any::<bool>()), |(ids, skip)| {
        let mut stream = Detokenizer::new(tokenizer(), skip);
        let text: String = ids.iter().map(|&id| stream.push(id)).collect();
        prop_assert_eq!(text + &stream.finish(), tokenizer().decode(&ids, skip));
        Ok(())
    });
}

#[test]
fn planted_faults_are_found() {
    // Forgets a newline at the end of a chunk.
    let forgetful = |text: &str, cuts: &[usize]| {
        let mut chunks = in_chunks(text, cuts);
        for chunk in &mut chunks {
            chunk.truncate(chunk.trim_end_matches('\n').len());
        }
        chunks
    };
    let found = search(&(output(), cuts()), Duration::ZERO, |(text, cuts)| {
        let whole = parse(false, Some(tools()), std::slice::from_ref(&text));
        prop_assert_eq!(parse(false, Some(tools()), &forgetful(&text, &cuts)), whole);
        Ok(())
    });
    assert!(found.is_err());
    // Ends an answer after the first call, whatever comes then.
    let found = search(&output(), Duration::ZERO, |text| {
        let calls = parse(true, Some(tools()), &[text]).2;
        if calls.len() > 1 { Err(TestCaseError::fail("a second call")) } else { Ok(()) }
    });
    assert!(found.is_err());
}
