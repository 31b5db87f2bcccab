//! `/v1/messages` and `/v1/messages/count_tokens`.

use std::sync::Arc;

use axum::http::StatusCode;
use qwill_contract::EngineFacts;
use qwill_server::{LenientModelNames, ServerOptions};
use serde_json::{Value, json};

use crate::client::{Bench, MESSAGES, Reply, byte_tokens, in_steps, one_by_one, tokens, with};
use crate::engine::{self, Act, CACHED_TOKENS};

fn body() -> Value {
    json!({"model": "claude-opus-5", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]})
}

fn thinking() -> Value {
    with(body(), json!({"thinking": {"type": "adaptive"}}))
}

/// The names of a stream's events, repeated ones once.
fn order(reply: &Reply) -> Vec<String> {
    let mut names: Vec<String> = reply.named_events().into_iter().map(|(name, _)| name).collect();
    names.dedup();
    names
}

/// The message that a client puts together from a stream.
fn accumulated(reply: &Reply) -> Value {
    let mut message = Value::Null;
    let mut inputs: Vec<String> = Vec::new();
    let grow = |block: &mut Value, field: &str, delta: &Value| {
        let text = block[field].as_str().unwrap().to_owned() + delta[field].as_str().unwrap();
        block[field] = text.into();
    };
    for (name, event) in reply.named_events() {
        assert_eq!(event["type"], name);
        let index = event["index"].as_u64().unwrap_or_default() as usize;
        match name.as_str() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!(message["content"].as_array().unwrap().len(), index);
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
                inputs.push(String::new());
            }
            "content_block_delta" => {
                let (delta, block) = (&event["delta"], &mut message["content"][index]);
                match delta["type"].as_str().unwrap() {
                    "text_delta" => grow(block, "text", delta),
                    "thinking_delta" => grow(block, "thinking", delta),
                    "signature_delta" => block["signature"] = delta["signature"].clone(),
                    "input_json_delta" => inputs[index] += delta["partial_json"].as_str().unwrap(),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                if message["content"][index]["type"] == "tool_use" {
                    message["content"][index]["input"] = serde_json::from_str(&inputs[index]).unwrap();
                }
            }
            "message_delta" => {
                for field in ["stop_reason", "stop_sequence"] {
                    message[field] = event["delta"][field].clone();
                }
                message["usage"] = event["usage"].clone();
            }
            "ping" | "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    message
}

fn without_id(mut message: Value) -> Value {
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    message["id"].take();
    message
}

#[tokio::test]
async fn a_message_with_thinking() {
    let bench = Bench::saying("Add them up.\n</think>\n\nIt is 4.");
    let reply = bench.post(MESSAGES, thinking()).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    let message = reply.json();
    let prompt_tokens = bench.stage.last_request().prompt.len();
    assert_eq!(
        without_id(message),
        json!({
            "id": null,
            "type": "message",
            "role": "assistant",
            "model": "claude-opus-5",
            "content": [
                {"type": "thinking", "thinking": "Add them up.", "signature": "qwill"},
                {"type": "text", "text": "It is 4."},
            ],
            "stop_reason": "end_turn",
            "stop_sequence": null,
            "usage": {
                "input_tokens": prompt_tokens - CACHED_TOKENS,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": CACHED_TOKENS,
                "output_tokens": tokens("Add them up.\n</think>\n\nIt is 4.").len() + 1,
            },
        })
    );
}

#[tokio::test]
async fn events_come_in_their_order() {
    let bench = Bench::new(in_steps(tokens("Add them up.\n</think>\n\nIt is 4."), 2));
    let reply = bench.post(MESSAGES, with(thinking(), json!({"stream": true}))).await;
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    let expected = [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(order(&reply), expected);
    let (_, start) = &reply.named_events()[0];
    assert_eq!(start["message"]["content"], json!([]));
    assert_eq!(start["message"]["usage"]["cache_read_input_tokens"], CACHED_TOKENS);
    assert!(!reply.body.contains("[DONE]"));
}

#[tokio::test]
async fn the_stream_adds_up_to_the_message_at_any_cut() {
    let text = "Ein Gedanke 🤔\n</think>\n\nnaïve 👩‍👩‍👧 family";
    for step_tokens in [1, 3, 100] {
        for ids in [tokens(text), byte_tokens(text)] {
            let bench = Bench::new(in_steps(ids, step_tokens));
            let body = with(thinking(), json!({"max_tokens": 150}));
            let (plain, streamed) = bench.both(MESSAGES, body).await;
            assert_eq!(without_id(accumulated(&streamed)), without_id(plain));
        }
    }
}

#[tokio::test]
async fn what_ended_the_answer_is_told() {
    let bench = Bench::new(one_by_one(byte_tokens("one END two")));
    for (more, reason, sequence) in [
        (json!({}), "end_turn", Value::Null),
        (json!({"max_tokens": 3}), "max_tokens", Value::Null),
        (json!({"stop_sequences": ["STOP", "END"]}), "stop_sequence", json!("END")),
    ] {
        let (plain, streamed) = bench.both(MESSAGES, with(body(), more)).await;
        for message in [plain, accumulated(&streamed)] {
            assert_eq!(message["stop_reason"], reason);
            assert_eq!(message["stop_sequence"], sequence);
        }
    }
}

#[tokio::test]
async fn without_a_word_on_thinking_there_is_none() {
    let bench = Bench::saying("42");
    for more in [json!({}), json!({"thinking": {"type": "disabled"}})] {
        let message = bench.post(MESSAGES, with(body(), more)).await.json();
        assert_eq!(message["content"], json!([{"type": "text", "text": "42"}]));
    }
    assert!(bench.last_prompt().ends_with("<think>\n\n</think>\n\n"));
    bench.post(MESSAGES, thinking()).await;
    assert!(bench.last_prompt().ends_with("<think>\n"));
    // Unless the server was started with a word on it.
    let kwargs = json!({"enable_thinking": true}).as_object().unwrap().clone();
    let options = ServerOptions { chat_template_kwargs: kwargs, ..ServerOptions::default() };
    let bench = Bench::with(options, engine::facts(), one_by_one(tokens("x")));
    bench.post(MESSAGES, body()).await;
    assert!(bench.last_prompt().ends_with("<think>\n"));
}

#[tokio::test]
async fn all_kinds_of_blocks_reach_the_prompt() {
    let bench = Bench::saying("ok");
    let body = json!({
        "model": "tiny",
        "max_tokens": 5,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=12345;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "text", "text": "it up."}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "need tool", "signature": ""},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "t1", "name": "find", "input": {"b": 1, "a": "x"}},
                {"type": "tool_use", "id": "t2", "name": "find", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "found"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": true,
                 "content": [{"type": "text", "text": "no such thing"}]},
                {"type": "text", "text": "And now?"},
            ]},
        ],
        "tools": [
            {"name": "find", "description": "d", "input_schema": {"type": "object"}},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
    });
    let reply = bench.post(MESSAGES, body.clone()).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    let prompt = bench.last_prompt();
    for part in [
        "Be brief.",
        "<|im_start|>user\nLook it up.<|im_end|>",
        "Looking.",
        "<function=find>",
        "<tool_response>\nfound\n</tool_response>",
        "<tool_response>\nError: no such thing\n</tool_response>",
        "<|im_start|>user\nAnd now?<|im_end|>",
    ] {
        assert!(prompt.contains(part), "{part:?} is not in {prompt}");
    }
    assert!(!prompt.contains("billing") && !prompt.contains("web_search"), "{prompt}");
    let b = prompt.find("<parameter=b>").unwrap();
    assert!(b < prompt.find("<parameter=a>").unwrap(), "arguments keep their order");
    let count = bench.post("/v1/messages/count_tokens", body.clone()).await.json();
    assert_eq!(count, json!({"input_tokens": bench.stage.last_request().prompt.len()}));
    // Thinking is shown as long as nobody has asked anything since.
    let mut unasked = body;
    unasked["messages"][2]["content"].as_array_mut().unwrap().pop();
    bench.post(MESSAGES, unasked).await;
    assert!(bench.last_prompt().contains("<think>\nneed tool\n</think>"), "{}", bench.last_prompt());
}

#[tokio::test]
async fn what_the_assistant_has_begun_goes_on() {
    let bench = Bench::saying(" 4.");
    let messages =
        json!([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "The answer is"}]);
    let message = bench.post(MESSAGES, with(body(), json!({"messages": messages}))).await.json();
    assert_eq!(message["content"][0]["text"], " 4.");
    assert!(bench.last_prompt().ends_with("The answer is"), "{}", bench.last_prompt());
}

#[tokio::test]
async fn errors_are_in_anthropics_words() {
    let bench = Bench::saying("x");
    for (more, status, kind, part) in [
        (json!({"messages": []}), 400, "invalid_request_error", "`messages`"),
        (
            json!({"messages": [{"role": "robot", "content": "x"}]}),
            400,
            "invalid_request_error",
            "messages[0].role",
        ),
        (json!({"stop_sequences": [""]}), 400, "invalid_request_error", "stop_sequences[0]"),
        (json!({"max_tokens": 0}), 400, "invalid_request_error", "`max_tokens`"),
        (json!({"max_tokens": 10_000}), 400, "invalid_request_error", "`max_tokens` asks for 10000"),
        (json!({"model": "llama"}), 404, "not_found_error", "llama"),
        (json!({"thinking": {"type": "maybe"}}), 400, "invalid_request_error", "thinking.type"),
        (
            json!({"tools": [{"name": "f", "input_schema": 1}]}),
            400,
            "invalid_request_error",
            "tools[0].input_schema",
        ),
        (json!({"tool_choice": {"type": "some"}}), 400, "invalid_request_error", "tool_choice.type"),
        (json!({"n": 2}), 400, "invalid_request_error", "`n`"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
            400,
            "invalid_request_error",
            "text only",
        ),
    ] {
        let reply = bench.post(MESSAGES, with(body(), more.clone())).await;
        assert_eq!(reply.status, status, "{more}: {}", reply.body);
        let error = reply.json();
        assert_eq!(error["type"], "error");
        assert_eq!(error["error"]["type"], kind, "{more}");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(part), "{message} lacks {part}");
        assert_eq!(error["request_id"].as_str(), reply.header("request-id"));
    }
    let reply = bench.post_raw(MESSAGES, "{").await;
    assert_eq!((reply.status, reply.json()["type"].clone()), (StatusCode::BAD_REQUEST, json!("error")));
    let reply = bench.get(MESSAGES).await;
    assert_eq!(reply.status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(reply.json()["error"]["type"], "invalid_request_error");
    assert!(bench.stage.requests.lock().unwrap().is_empty(), "nothing reached the engine");
}

#[tokio::test]
async fn a_missing_key_is_told_in_anthropics_words() {
    let options = ServerOptions { api_keys: vec!["secret".into()], ..ServerOptions::default() };
    let bench = Bench::with(options, engine::facts(), one_by_one(tokens("x")));
    let reply = bench.post(MESSAGES, body()).await;
    assert_eq!(reply.status, StatusCode::UNAUTHORIZED);
    assert_eq!(reply.json()["error"]["type"], "authentication_error");
    let request = axum::http::Request::post(MESSAGES)
        .header("content-type", "application/json")
        .header("x-api-key", "secret")
        .body(body().to_string().into())
        .unwrap();
    assert_eq!(bench.send(request).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_an_error_event() {
    let script = Arc::new(|_: &_, _| vec![Act::Step(tokens("Hi")), Act::Fail("device lost")]);
    let bench = Bench::new(script);
    let reply = bench.post(MESSAGES, with(body(), json!({"stream": true}))).await;
    let (name, event) = reply.named_events().pop().unwrap();
    assert_eq!(name, "error");
    assert_eq!(event, json!({"type": "error", "error": {"type": "api_error", "message": "device lost"}}));
}

#[tokio::test]
async fn names_of_agents_models_are_answered_unless_told_not_to() {
    let bench = Bench::saying("x");
    assert_eq!(bench.post(MESSAGES, body()).await.json()["model"], "claude-opus-5");
    let options = ServerOptions { lenient_model_names: LenientModelNames::None, ..ServerOptions::default() };
    let strict = Bench::with(options, engine::facts(), one_by_one(tokens("x")));
    assert_eq!(strict.post(MESSAGES, body()).await.status, StatusCode::NOT_FOUND);
    let options = ServerOptions { lenient_model_names: LenientModelNames::All, ..ServerOptions::default() };
    let any = Bench::with(options, engine::facts(), one_by_one(tokens("x")));
    let reply = any.post(MESSAGES, with(body(), json!({"model": "whatever"}))).await;
    assert_eq!(reply.json()["model"], "whatever");
}

const CALLS: &str = "Looking.\n\n<tool_call>\n<function=find>\n<parameter=city>\nÅrhus 🙂\n</parameter>\n\
                     <parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n\
                     <function=find>\n</function>\n</tool_call>";

fn tools() -> Value {
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
    json!([{"name": "find", "input_schema": {"type": "object", "properties": properties}}])
}

#[tokio::test]
async fn calls_of_tools_are_blocks_of_their_own() {
    for step_tokens in [1, 4, 1000] {
        for ids in [tokens(CALLS), byte_tokens(CALLS)] {
            let body = with(body(), json!({"tools": tools(), "max_tokens": 500}));
            let facts = EngineFacts { max_context_tokens: 1024, ..engine::facts() };
            let bench = Bench::with(ServerOptions::default(), facts, in_steps(ids, step_tokens));
            let (plain, streamed) = bench.both(MESSAGES, body).await;
            assert_eq!(plain["stop_reason"], "tool_use");
            let content = plain["content"].as_array().unwrap();
            assert_eq!(content.len(), 3, "{content:?}");
            assert_eq!(content[0], json!({"type": "text", "text": "Looking."}));
            assert_eq!((&content[1]["type"], &content[1]["name"]), (&json!("tool_use"), &json!("find")));
            assert_eq!(content[1]["input"], json!({"city": "Århus 🙂", "days": 2}));
            assert_eq!(content[2]["input"], json!({}));
            assert_ne!(content[1]["id"], content[2]["id"]);
            let mut accumulated = accumulated(&streamed);
            for (mine, theirs) in accumulated["content"].as_array_mut().unwrap().iter_mut().zip(content) {
                if let Some(id) = theirs.get("id") {
                    mine["id"] = id.clone();
                }
            }
            assert_eq!(without_id(accumulated), without_id(plain));
        }
    }
}

#[tokio::test]
async fn a_forced_call_is_waited_for_like_any_other() {
    let call =
        "<tool_call>\n<function=find>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>";
    let bench = Bench::saying(call);
    let choice = json!({"type": "tool", "name": "find", "disable_parallel_tool_use": true});
    let body = with(body(), json!({"tools": tools(), "tool_choice": choice}));
    let (plain, streamed) = bench.both(MESSAGES, body).await;
    for message in [plain, accumulated(&streamed)] {
        assert_eq!(message["stop_reason"], "tool_use");
        assert_eq!(message["content"][0]["input"], json!({"city": "Oslo"}));
    }
}
