//! Random bodies: whatever a client sends, it gets an answer or an error that says why, and the next one is served.
//! `cargo xtask fuzz` runs this for longer.

#[path = "../../../text/tests/fuzz/runner.rs"]
mod runner;

use std::sync::Arc;

use axum::http::StatusCode;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use qwill_contract::EngineFacts;
use qwill_server::ServerOptions;
use serde_json::{Value, json};

use crate::client::{Bench, CHAT, COMPLETIONS, Reply, byte_tokens, plain_chat, with};
use crate::engine::{self, Act};
use runner::fuzz;

const ANSWER: &str = "Hm.\n</think>\n\nÅ 🙂 <tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n\
                      </tool_call>\nEND of it";

fn bench() -> Bench {
    let facts = EngineFacts { max_context_tokens: 2048, kv_capacity_tokens: 8192, ..engine::facts() };
    let steps: Vec<Act> = byte_tokens(ANSWER).chunks(3).map(|step| Act::Step(step.to_vec())).collect();
    Bench::with(ServerOptions::default(), facts, Arc::new(move |_, _| steps.clone()))
}

/// Requests as they should be, with their paths.
fn good() -> impl Strategy<Value = (&'static str, Value)> {
    let tool = json!({"type": "function", "function": {"name": "f", "strict": false, "parameters": {
        "type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/N"}]}},
        "$defs": {"N": {"type": "integer"}}}}});
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
    let chat = json!({
        "model": "tiny", "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": null, "reasoning": "r", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "t"}],
        "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": true, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 2, "seed": 1,
        "stop": ["END"], "max_tokens": 30, "logprobs": true, "top_logprobs": 2, "logit_bias": {"5": 1},
        "stream": true, "stream_options": {"include_usage": true}, "chat_template_kwargs": {"enable_thinking": true},
        "reasoning_effort": "low", "min_tokens": 1, "stop_token_ids": [7], "return_token_ids": true,
    });
    let completion = json!({
        "prompt": ["a", [1, 2]], "echo": true, "logprobs": 1, "max_tokens": 9, "n": 1, "stop": "x", "stream": false,
        "presence_penalty": 1, "ignore_eos": true, "cache_salt": "s", "skip_special_tokens": false,
    });
    let tokenize = json!({"messages": [{"role": "user", "content": "u"}], "return_token_strs": true});
    prop::sample::select(vec![
        (CHAT, chat),
        (CHAT, with(plain_chat(), json!({"functions": [{"name": "f"}], "function_call": "auto"}))),
        (COMPLETIONS, completion),
        ("/tokenize", tokenize),
        ("/detokenize", json!({"tokens": [1, 2, 3]})),
    ])
}

/// Values that do not belong where they are put.
fn odd() -> impl Strategy<Value = Value> {
    let numbers = [json!(-1), json!(0), json!(1e308), json!(0.5), json!(u64::MAX), json!(i64::MIN), json!(3)];
    let texts = ["", "NaN", "none", "required", "<|im_end|>", "{\"a\": ", "\u{0}", "function", "f", "🙂"];
    let nested = (0..200).fold(json!([]), |inner, _| json!([inner]));
    let others = [
        json!(null),
        json!(true),
        json!([]),
        json!({}),
        json!([[]]),
        json!({"$ref": "#"}),
        nested,
        json!([1, "a"]),
    ];
    let all: Vec<Value> = numbers.into_iter().chain(texts.map(Value::from)).chain(others).collect();
    prop_oneof![5 => prop::sample::select(all), 1 => any::<String>().prop_map(Value::from)]
}

#[derive(Debug, Clone)]
enum Change {
    /// The value at the n-th place is another one.
    Replace(usize, Value),
    /// The n-th place is gone.
    Remove(usize),
    /// A field more.
    Add(String, Value),
}

fn change() -> impl Strategy<Value = Change> {
    let names = prop::sample::select(vec![
        "response_format",
        "tools",
        "tool_choice",
        "functions",
        "max_completion_tokens",
        "prompt",
        "messages",
        "echo",
        "suffix",
        "best_of",
        "grammar",
        "thinking",
        "add_generation_prompt",
        "include_stop_str_in_output",
        "new",
    ]);
    prop_oneof![
        6 => (any::<usize>(), odd()).prop_map(|(place, value)| Change::Replace(place, value)),
        2 => any::<usize>().prop_map(Change::Remove),
        2 => (names, odd()).prop_map(|(name, value)| Change::Add(name.to_owned(), value)),
    ]
}

/// Pointers to everything inside `value`.
fn places(value: &Value, path: &str, all: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, inner) in fields {
                let path = format!("{path}/{}", name.replace('~', "~0").replace('/', "~1"));
                places(inner, &path, all);
                all.push(path);
            }
        }
        Value::Array(items) => {
            for (index, inner) in items.iter().enumerate() {
                let path = format!("{path}/{index}");
                places(inner, &path, all);
                all.push(path);
            }
        }
        _ => {}
    }
}

fn apply(body: &mut Value, change: Change) {
    let mut all = Vec::new();
    places(body, "", &mut all);
    let pick = |place: usize| all.get(place % all.len().max(1));
    match change {
        Change::Replace(place, value) => {
            if let Some(found) = pick(place).and_then(|path| body.pointer_mut(path)) {
                *found = value;
            }
        }
        Change::Remove(place) => {
            let Some((parent, name)) = pick(place).and_then(|path| path.rsplit_once('/')) else { return };
            match body.pointer_mut(parent) {
                Some(Value::Object(fields)) => drop(fields.shift_remove(name)),
                Some(Value::Array(items)) => drop(name.parse().map(|index: usize| items.remove(index))),
                _ => {}
            }
        }
        Change::Add(name, value) => {
            if let Value::Object(fields) = body {
                fields.insert(name, value);
            }
        }
    }
}

/// Bytes of a body, some of them not as they were.
fn bytes() -> impl Strategy<Value = Vec<(usize, Vec<u8>)>> {
    let piece = prop::sample::select(vec![
        b"\"".to_vec(),
        b"\\".to_vec(),
        b"{".to_vec(),
        b"]".to_vec(),
        b",".to_vec(),
        b"\xc4\xe3".to_vec(),
        b"\\ud800".to_vec(),
        b"NaN".to_vec(),
        b"\x00".to_vec(),
        b"1e999".to_vec(),
        b"//".to_vec(),
        Vec::new(),
    ]);
    prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec((any::<usize>(), piece), 1..4)]
}

fn check(reply: &Reply, sent: &[u8]) -> Result<(), TestCaseError> {
    let sent = String::from_utf8_lossy(sent);
    if reply.status != StatusCode::OK {
        prop_assert!(reply.status.is_client_error(), "{} for {}: {}", reply.status, sent, reply.body);
        let error = reply.error();
        prop_assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{}", reply.body);
        prop_assert!(
            error["type"].is_string() && error.get("param").is_some() && error.get("code").is_some()
        );
        return Ok(());
    }
    if reply.header("content-type") == Some("text/event-stream") {
        let events = reply.events();
        let errors: Vec<_> = events.iter().filter(|event| event.get("error").is_some()).collect();
        prop_assert!(errors.is_empty() && !events.is_empty(), "{} for {}", reply.body, sent);
        prop_assert!(reply.body.lines().all(|line| line.is_empty() || line.starts_with("data: ")));
    } else {
        prop_assert!(serde_json::from_str::<Value>(&reply.body).is_ok(), "{}", reply.body);
    }
    Ok(())
}

#[test]
fn bodies() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let bench = bench();
    let input = (good(), prop::collection::vec(change(), 0..4), bytes());
    fuzz("bodies", &input, |((path, mut body), changes, edits)| {
        for change in changes {
            apply(&mut body, change);
        }
        let mut sent = body.to_string().into_bytes();
        for (place, piece) in edits {
            let at = place % (sent.len() + 1);
            let end = (at + piece.len().min(2)).min(sent.len());
            if piece.is_empty() {
                sent.truncate(at);
            } else {
                sent.splice(at..end, piece);
            }
        }
        runtime.block_on(async {
            check(&bench.post_raw(path, sent.clone()).await, &sent)?;
            let after = bench.post(CHAT, with(plain_chat(), json!({"max_tokens": 2}))).await;
            prop_assert_eq!(after.status, StatusCode::OK);
            Ok(())
        })
    });
}
