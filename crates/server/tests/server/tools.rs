//! Tool calls in `/v1/chat/completions`.

use std::sync::Arc;

use qwill_contract::EngineFacts;
use qwill_server::ServerOptions;
use serde_json::{Value, json};

use crate::client::{Bench, CHAT, Reply, byte_tokens, in_steps, one_by_one, plain_chat, tokens, with};
use crate::engine::{self, Act, END_OF_TURN, Script};

const OSLO: &str =
    "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>";

fn tools() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "x": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "z": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "y": {"$ref": "#/$defs/Ids"},
        },
        "$defs": {"Ids": {"type": "array"}},
    });
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    json!([tool("f"), tool("g")])
}

fn bench(script: Script) -> Bench {
    let facts = EngineFacts { max_context_tokens: 8192, kv_capacity_tokens: 32768, ..engine::facts() };
    Bench::with(ServerOptions::default(), facts, script)
}

fn saying(text: &str) -> Bench {
    bench(one_by_one(tokens(text)))
}

/// A chat with the tools, without thinking.
fn chat() -> Value {
    with(plain_chat(), json!({"tools": tools()}))
}

/// Name and arguments of each call in a message.
fn calls(message: &Value) -> Vec<(String, Value)> {
    let read = |call: &Value| {
        assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
        assert_eq!(call["type"], "function");
        let arguments = call["function"]["arguments"].as_str().unwrap();
        (call["function"]["name"].as_str().unwrap().to_owned(), serde_json::from_str(arguments).unwrap())
    };
    message["tool_calls"].as_array().map(|calls| calls.iter().map(read).collect()).unwrap_or_default()
}

/// The calls of a choice of a stream, put together as clients do; what must come once does.
fn streamed_calls(reply: &Reply, index: usize) -> Vec<(String, Value)> {
    let mut calls: Vec<(String, String, String)> = Vec::new();
    for event in reply.events() {
        for choice in event["choices"].as_array().unwrap().iter().filter(|choice| choice["index"] == index) {
            let Some(parts) = choice["delta"]["tool_calls"].as_array() else { continue };
            assert_eq!(parts.len(), 1);
            let (part, function) = (&parts[0], &parts[0]["function"]);
            let at = part["index"].as_u64().unwrap() as usize;
            if at == calls.len() {
                assert_eq!(part["type"], "function");
                let text = |value: &Value| value.as_str().unwrap().to_owned();
                calls.push((text(&part["id"]), text(&function["name"]), String::new()));
            } else {
                assert_eq!(at, calls.len() - 1, "calls come one after the other");
                assert!(
                    part.get("id").is_none() && part.get("type").is_none() && function.get("name").is_none()
                );
            }
            calls[at].2.push_str(function["arguments"].as_str().unwrap());
        }
    }
    let ids: std::collections::HashSet<&String> = calls.iter().map(|call| &call.0).collect();
    assert!(ids.len() == calls.len() && ids.iter().all(|id| id.starts_with("call_")));
    calls.into_iter().map(|(_, name, text)| (name, serde_json::from_str(&text).unwrap())).collect()
}

/// Sends the request plain and streamed; message and finish reason, which must agree.
async fn answer(bench: &Bench, body: Value) -> (Value, String) {
    let (plain, streamed) = bench.both(CHAT, body).await;
    let choice = &plain["choices"][0];
    let message = choice["message"].clone();
    assert_eq!(streamed_calls(&streamed, 0), calls(&message));
    assert_eq!(streamed.joined(0, "/delta/content"), message["content"].as_str().unwrap_or_default());
    let reasoning = message["reasoning"].as_str().unwrap_or_default();
    assert_eq!(streamed.joined(0, "/delta/reasoning"), reasoning);
    let finish = choice["finish_reason"].as_str().unwrap().to_owned();
    assert_eq!(streamed.joined(0, "/finish_reason"), finish);
    let events = streamed.events();
    assert_eq!(events.last().unwrap()["choices"][0]["delta"], json!({}), "the finish comes alone");
    (message, finish)
}

fn f(arguments: Value) -> (String, Value) {
    ("f".to_owned(), arguments)
}

#[tokio::test]
async fn calls_are_returned_at_any_cut() {
    let text = format!("Hm. 🤔\n</think>\n\nLet me see.\n\n{OSLO}\n{}", OSLO.replace("Oslo", "Ås 🙂"));
    for step_tokens in [1, 2, 3, 4, 5, 6, 1000] {
        for ids in [tokens(&text), byte_tokens(&text)] {
            let bench = bench(in_steps(ids, step_tokens));
            let body = with(chat(), json!({"enable_thinking": true}));
            let (message, finish) = answer(&bench, body).await;
            assert_eq!(message["content"], "Let me see.");
            assert_eq!(message["reasoning_content"], "Hm. 🤔");
            assert_eq!(calls(&message), [f(json!({"city": "Oslo"})), f(json!({"city": "Ås 🙂"}))]);
            assert_eq!(finish, "tool_calls");
        }
    }
}

#[tokio::test]
async fn an_answer_of_calls_has_no_content_and_counts_its_tokens() {
    let bench = saying(OSLO);
    let reply = bench.post(CHAT, chat()).await.json();
    let message = &reply["choices"][0]["message"];
    assert_eq!(message["content"], Value::Null);
    assert!(message.as_object().unwrap().contains_key("content"));
    assert_eq!(reply["usage"]["completion_tokens"], tokens(OSLO).len() + 1);
    let text = saying("None needed.").post(CHAT, chat()).await.json();
    assert!(text["choices"][0]["message"].get("tool_calls").is_none());
}

#[tokio::test]
async fn a_call_in_open_thinking_is_a_call() {
    let bench = saying(&format!("plan {OSLO}"));
    let body = with(chat(), json!({"enable_thinking": true}));
    let (message, finish) = answer(&bench, body.clone()).await;
    assert_eq!(message["reasoning_content"], "plan ");
    assert_eq!(calls(&message), [f(json!({"city": "Oslo"}))]);
    assert_eq!(finish, "tool_calls");
    let usage = bench.post(CHAT, body).await.json()["usage"].clone();
    let thinking = usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() as usize;
    assert!(thinking > 0 && thinking < tokens(&format!("plan {OSLO}")).len(), "{thinking}");
}

#[tokio::test]
async fn values_follow_the_schema() {
    let text = "<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>\n<parameter=z>\nnull\n</parameter>\n\
                <parameter=y>\n[true, null, False]\n</parameter>\n</function>\n</tool_call>";
    let (message, _) = answer(&saying(text), chat()).await;
    assert_eq!(calls(&message), [f(json!({"x": 3, "z": null, "y": [true, null, false]}))]);
}

#[tokio::test]
async fn arguments_stream_while_they_are_written() {
    let value = "All work and no play. ".repeat(91)[..2000].to_owned();
    let text = OSLO.replace("Oslo", &value);
    let pieces: Vec<Vec<u32>> = {
        let chars: Vec<char> = text.chars().collect();
        chars.chunks(text.len().div_ceil(100)).map(|part| tokens(&part.iter().collect::<String>())).collect()
    };
    let script: Script = Arc::new(move |_, _| pieces.iter().cloned().map(Act::Step).collect());
    let reply = bench(script).post(CHAT, with(chat(), json!({"stream": true}))).await;
    assert_eq!(streamed_calls(&reply, 0), [f(json!({"city": value}))]);
    let deltas = reply.body.matches("\"arguments\":").count();
    assert!(deltas >= 50, "{deltas}");
}

#[tokio::test]
async fn text_streams_although_there_are_tools() {
    let text = "So it goes on, word after word, with a < b and more. ".repeat(4);
    let ids = tokens(&text);
    let steps: Vec<Act> = ids.chunks(ids.len().div_ceil(50)).map(|step| Act::Step(step.to_vec())).collect();
    let count = steps.len();
    let reply =
        bench(Arc::new(move |_, _| steps.clone())).post(CHAT, with(chat(), json!({"stream": true}))).await;
    assert_eq!(reply.joined(0, "/delta/content"), text);
    let deltas = reply.events().len() - 2;
    assert!(deltas * 10 >= count * 9, "{deltas} of {count}");
}

#[tokio::test]
async fn slightly_wrong_calls_are_understood_or_text() {
    for text in [
        OSLO.replace("</function>\n", ""),
        OSLO.replace("</parameter>\n", ""),
        OSLO.replace("\n</tool_call>", ""),
        OSLO.replace("=f>", " name=\"f\">").replace("=city>", " name=\"city\">"),
        OSLO.replace("<function=f>", "< function = f >").replace("</parameter>", "</ parameter >"),
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>".to_owned(),
    ] {
        let (message, finish) = answer(&saying(&text), chat()).await;
        assert_eq!(calls(&message), [f(json!({"city": "Oslo"}))], "{text}");
        assert_eq!(finish, "tool_calls");
    }
    for text in [OSLO.replace("=f>", "=h>"), "<tool_call>\n<function=f".into(), "<tool_call>\nf()".into()] {
        let (message, finish) = answer(&saying(&text), chat()).await;
        assert_eq!(message["content"], text);
        assert_eq!(finish, "stop");
    }
}

#[tokio::test]
async fn characters_cut_by_tokens_come_whole() {
    let text = OSLO.replace("Oslo", "a🙂b");
    let emoji = text.find('🙂').unwrap();
    for first in 1..4 {
        let bytes = byte_tokens(&text);
        let (before, rest) = bytes.split_at(emoji + first);
        let steps = [Act::Step(before.to_vec()), Act::Step(rest.to_vec())];
        let (message, _) = answer(&bench(Arc::new(move |_, _| steps.to_vec())), chat()).await;
        assert_eq!(calls(&message), [f(json!({"city": "a🙂b"}))]);
        // Cut off within the character: what there is, as JSON.
        let body = with(chat(), json!({"max_tokens": before.len()}));
        let (message, finish) = answer(&bench(one_by_one(bytes)), body).await;
        assert_eq!(calls(&message), [f(json!({"city": "a\u{fffd}"}))]);
        assert_eq!(finish, "length");
    }
}

#[tokio::test]
async fn a_call_that_is_asked_for_may_be_thought_about() {
    const CALL: &str =
        "<tool_call>\n<function=g>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>";
    for (choice, finish) in
        [(json!({"type": "function", "function": {"name": "g"}}), "stop"), (json!("required"), "tool_calls")]
    {
        for (thinking, said) in [(true, format!("g it is\n</think>\n\n{CALL}")), (false, CALL.to_owned())] {
            let bench = saying(&said);
            let fields = json!({"tool_choice": choice, "enable_thinking": thinking});
            let (message, ended) = answer(&bench, with(chat(), fields)).await;
            assert_eq!(calls(&message), [("g".to_owned(), json!({"city": "Oslo"}))]);
            assert_eq!(message["content"], Value::Null);
            let thought = if thinking { json!("g it is") } else { Value::Null };
            assert_eq!(message["reasoning_content"], thought);
            assert_eq!(ended, finish, "\"stop\" as OpenAI has it for a named function");
            // The prompt is the one of a free choice.
            let asked = bench.stage.last_request().prompt;
            answer(&bench, with(chat(), json!({"enable_thinking": thinking}))).await;
            assert_eq!(asked, bench.stage.last_request().prompt);
        }
    }
}

#[tokio::test]
async fn one_call_ends_the_answer_where_several_are_not_wanted() {
    let twice = format!("{OSLO}\n{OSLO}");
    let script = move |text: &str| {
        let mut acts: Vec<Act> = tokens(text).into_iter().map(|id| Act::Step(vec![id])).collect();
        acts.push(Act::Hold);
        acts
    };
    let acts = script(&twice);
    let bench = bench(Arc::new(move |_, _| acts.clone()));
    let body = with(chat(), json!({"parallel_tool_calls": false, "n": 2}));
    let (plain, streamed) = bench.both(CHAT, body).await;
    for index in 0..2 {
        assert_eq!(calls(&plain["choices"][index]["message"]), [f(json!({"city": "Oslo"}))]);
        assert_eq!(plain["choices"][index]["finish_reason"], "tool_calls");
        assert_eq!(streamed_calls(&streamed, index).len(), 1);
    }
    bench.stage.wait_cancelled(2);
    let most = tokens(&twice).len() * 2;
    assert!(plain["usage"]["completion_tokens"].as_u64().unwrap() < most as u64);
}

#[tokio::test]
async fn without_tools_to_call_everything_is_text() {
    let bench = saying(OSLO);
    for fields in [json!({"tool_choice": "none"}), json!({"tools": []}), json!({"tools": null})] {
        let (message, finish) = answer(&bench, with(chat(), fields)).await;
        assert_eq!(message["content"], OSLO);
        assert_eq!(finish, "stop");
    }
}

#[tokio::test]
async fn stop_strings_look_at_content_only() {
    let bench = saying(&format!("Os{OSLO}lo then Oslo again"));
    let (message, finish) = answer(&bench, with(chat(), json!({"stop": ["Oslo"]}))).await;
    assert_eq!(calls(&message), [f(json!({"city": "Oslo"}))]);
    assert_eq!(message["content"], "Oslo then ");
    assert_eq!(finish, "tool_calls");
}

#[tokio::test]
async fn a_call_that_is_cut_short_is_json_and_says_length() {
    let bytes = byte_tokens(OSLO);
    let until = OSLO.find("lo\n</par").unwrap();
    let body = with(chat(), json!({"max_tokens": until}));
    let (message, finish) = answer(&bench(one_by_one(bytes)), body).await;
    assert_eq!(calls(&message), [f(json!({"city": "Os"}))]);
    assert_eq!(finish, "length");
}

#[tokio::test]
async fn functions_are_answered_in_their_own_words() {
    let bench = saying(&format!("{OSLO}\n{OSLO}"));
    let function = json!({"name": "f", "parameters": {"properties": {"city": {"type": "string"}}}});
    let history = json!([
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": "{\"city\": \"Ås\"}"}},
        {"role": "function", "name": "f", "content": "sun"},
    ]);
    let body = with(plain_chat(), json!({"functions": [function], "messages": history}));
    let (plain, streamed) = bench.both(CHAT, body).await;
    let choice = &plain["choices"][0];
    assert_eq!(choice["message"]["function_call"], json!({"name": "f", "arguments": "{\"city\": \"Oslo\"}"}));
    assert!(choice["message"].get("tool_calls").is_none());
    assert_eq!(choice["finish_reason"], "function_call");
    assert_eq!(streamed.joined(0, "/delta/function_call/name"), "f");
    assert_eq!(streamed.joined(0, "/delta/function_call/arguments"), "{\"city\": \"Oslo\"}");
    let prompt = bench.text.tokenizer.decode(&bench.stage.last_request().prompt, false);
    assert!(
        prompt.contains("<parameter=city>\nÅs\n</parameter>") && prompt.contains("sun\n</tool_response>")
    );
}

#[tokio::test]
async fn the_end_of_turn_after_a_call_is_no_text() {
    let script: Script = Arc::new(|_, _| {
        let ids = [tokens(OSLO), vec![END_OF_TURN]].concat();
        vec![Act::Step(ids)]
    });
    let (message, finish) = answer(&bench(script), chat()).await;
    assert_eq!((message["content"].clone(), finish.as_str()), (Value::Null, "tool_calls"));
}
