//! `/v1/responses`.

use std::sync::Arc;

use axum::http::StatusCode;
use qwill_contract::EngineFacts;
use qwill_server::ServerOptions;
use serde_json::{Value, json};

use crate::client::{Bench, RESPONSES, Reply, byte_tokens, in_steps, one_by_one, tokens, with};
use crate::engine::{self, Act, CACHED_TOKENS};

fn plain() -> Value {
    json!({"model": "tiny", "input": "Hi", "reasoning": {"effort": "none"}})
}

fn thinking() -> Value {
    json!({"model": "tiny", "input": "2+2?"})
}

/// The names of a stream's events, repeated ones once; their numbers must count from zero.
fn order(reply: &Reply) -> Vec<String> {
    let events = reply.named_events();
    for (number, (name, event)) in events.iter().enumerate() {
        assert_eq!(
            (event["type"].as_str(), event["sequence_number"].as_u64()),
            (Some(&**name), Some(number as u64))
        );
    }
    let mut names: Vec<String> = events.into_iter().map(|(name, _)| name).collect();
    names.dedup();
    names
}

/// The response in the last event.
fn last_response(reply: &Reply) -> Value {
    reply.named_events().pop().unwrap().1["response"].clone()
}

/// What differs from run to run is replaced.
fn settled(mut response: Value) -> Value {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let created = response["created_at"].as_u64().unwrap();
    assert!((now - 60..=now).contains(&created), "{created} are no seconds of today");
    assert!(response["id"].as_str().unwrap().starts_with("resp_"));
    for field in ["id", "created_at", "completed_at"] {
        response[field].take();
    }
    for item in response["output"].as_array_mut().unwrap() {
        item["id"].take();
    }
    response
}

#[tokio::test]
async fn body_snapshot() {
    let bench = Bench::saying("Add them up.\n</think>\n\nIt is 4.");
    let body = with(
        thinking(),
        json!({"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0, "max_output_tokens": 60}),
    );
    let reply = bench.post(RESPONSES, body).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    insta::assert_snapshot!(serde_json::to_string_pretty(&settled(reply.json())).unwrap());
    assert!(bench.last_prompt().starts_with("<|im_start|>system\nBe brief.<|im_end|>"));
}

#[tokio::test]
async fn events_come_in_their_order() {
    let bench = Bench::new(in_steps(tokens("Add them up.\n</think>\n\nIt is 4."), 2));
    let reply = bench.post(RESPONSES, with(thinking(), json!({"stream": true}))).await;
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(order(&reply), expected);
    assert!(!reply.body.contains("[DONE]"));
    let first = &reply.named_events()[0].1["response"];
    assert_eq!((first["status"].as_str(), &first["output"]), (Some("in_progress"), &json!([])));
}

#[tokio::test]
async fn a_client_that_asks_for_summaries_gets_the_thinking_there() {
    let bench = Bench::saying("Add them up.\n</think>\n\nIt is 4.");
    let body = with(thinking(), json!({"reasoning": {"effort": "high", "summary": "auto"}}));
    let (plain, streamed) = bench.both(RESPONSES, body).await;
    assert_eq!(plain["output"][0]["summary"], json!([{"type": "summary_text", "text": "Add them up."}]));
    assert_eq!(plain["output"][0]["content"], Value::Null);
    let expected = [
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
    ];
    assert_eq!(order(&streamed)[3..7], expected);
}

#[tokio::test]
async fn the_stream_adds_up_to_the_response_at_any_cut() {
    let text = "Ein Gedanke 🤔\n</think>\n\nnaïve 👩‍👩‍👧 family";
    for step_tokens in [1, 3, 100] {
        for ids in [tokens(text), byte_tokens(text)] {
            let bench = Bench::new(in_steps(ids, step_tokens));
            let (plain, streamed) = bench.both(RESPONSES, with(thinking(), json!({"store": false}))).await;
            assert_eq!(settled(last_response(&streamed)), settled(plain.clone()));
            // Deltas, the text that is done, and the item all say the same, under one id.
            for (index, kind) in [(0, "reasoning_text"), (1, "output_text")] {
                let of_item = |name: &str| {
                    let name = format!("response.{kind}.{name}");
                    let events = streamed.named_events().into_iter();
                    events.filter(move |(is, _)| *is == name).map(|(_, event)| event).collect::<Vec<_>>()
                };
                let deltas = of_item("delta");
                let joined: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
                let item = &last_response(&streamed)["output"][index];
                assert_eq!(item["content"][0]["text"], joined);
                assert_eq!(of_item("done")[0]["text"], joined);
                for event in deltas.iter().chain(&of_item("done")) {
                    assert_eq!((&event["item_id"], &event["output_index"]), (&item["id"], &json!(index)));
                    assert_eq!(event["content_index"], 0);
                }
            }
        }
    }
}

#[tokio::test]
async fn a_response_that_was_cut_short_is_incomplete() {
    let bench = Bench::new(one_by_one(byte_tokens("on and on")));
    let (plain, streamed) = bench.both(RESPONSES, with(plain(), json!({"max_output_tokens": 4}))).await;
    for response in [plain, last_response(&streamed)] {
        assert_eq!(response["status"], "incomplete");
        assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
        assert_eq!(response["output"][0]["status"], "incomplete");
        assert_eq!(response["output"][0]["content"][0]["text"], "on a");
    }
    assert_eq!(order(&streamed).last().map(String::as_str), Some("response.incomplete"));
}

#[tokio::test]
async fn usage_has_its_own_names() {
    let bench = Bench::saying("Hm.\n</think>\n\nYes.");
    let usage = bench.post(RESPONSES, thinking()).await.json()["usage"].clone();
    let (input, output) =
        (bench.stage.last_request().prompt.len(), tokens("Hm.\n</think>\n\nYes.").len() + 1);
    assert_eq!(
        usage,
        json!({
            "input_tokens": input,
            "input_tokens_details": {"cached_tokens": CACHED_TOKENS, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": tokens("Hm.\n</think>").len()},
            "total_tokens": input + output,
        })
    );
}

#[tokio::test]
async fn all_kinds_of_items_reach_the_prompt() {
    let facts = EngineFacts { max_context_tokens: 1024, ..engine::facts() };
    let bench = Bench::with(ServerOptions::default(), facts, one_by_one(tokens("ok")));
    let body = json!({
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "First rule."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look it up."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "need tool"}],
             "encrypted_content": "opaque"},
            {"type": "function_call", "call_id": "c1", "namespace": "web", "name": "find",
             "arguments": "{\"b\":1,\"a\":\"x\"}"},
            {"type": "function_call", "call_id": "c2", "name": "shell", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "found"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "There.", "annotations": [], "logprobs": []}]},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [
            {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": false},
            {"type": "namespace", "name": "web", "description": "d", "tools": [
                {"type": "function", "name": "find", "parameters": {"type": "object"}},
            ]},
            {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
            {"type": "web_search"},
            {"type": "image_generation"},
            {"type": "tool_search"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": false,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "truncation": "auto",
    });
    let reply = bench.post(RESPONSES, body.clone()).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    let prompt = bench.last_prompt();
    for part in [
        "Be brief.",
        "First rule.",
        "<|im_start|>user\nLook it up.<|im_end|>",
        "<function=web__find>",
        "<function=shell>",
        "<tool_response>\nfound\n</tool_response>\n<tool_response>\ndone\n</tool_response>",
        "There.",
        "<|im_start|>user\nAnd now?<|im_end|>",
    ] {
        assert!(prompt.contains(part), "{part:?} is not in {prompt}");
    }
    assert!(!prompt.contains("patch") && !prompt.contains("image_generation"), "{prompt}");
    assert_eq!(reply.json()["tools"], body["tools"]);
    let count = bench.post("/v1/responses/input_tokens", body).await.json();
    let tokens = bench.stage.last_request().prompt.len();
    assert_eq!(count, json!({"object": "response.input_tokens", "input_tokens": tokens}));
}

#[tokio::test]
async fn a_probe_without_input_is_answered() {
    let bench = Bench::saying("x");
    for body in [
        json!({"input": [], "max_output_tokens": 1}),
        json!({"input": "", "max_output_tokens": 1}),
        json!({"instructions": "i", "input": [], "max_output_tokens": 1, "stream": true}),
    ] {
        let reply = bench.post(RESPONSES, body).await;
        assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    }
}

#[tokio::test]
async fn a_conversation_goes_on_from_what_was_kept() {
    let bench = Bench::saying("Hm.\n</think>\n\nIt is 4.");
    let first = bench.post(RESPONSES, with(thinking(), json!({"instructions": "Only now."}))).await.json();
    let streamed = bench
        .post(RESPONSES, json!({"previous_response_id": first["id"], "input": "Sure?", "stream": true}))
        .await;
    let second = last_response(&streamed);
    assert_eq!(second["previous_response_id"], first["id"]);
    let prompt = bench.last_prompt();
    let (question, answer) = (prompt.find("2+2?").unwrap(), prompt.find("It is 4.").unwrap());
    assert!(question < answer && answer < prompt.find("Sure?").unwrap(), "{prompt}");
    assert!(!prompt.contains("Only now."), "instructions are for one response: {prompt}");
    bench.post(RESPONSES, json!({"previous_response_id": second["id"], "input": "Really?"})).await;
    let prompt = bench.last_prompt();
    for part in ["2+2?", "Sure?", "Really?"] {
        assert!(prompt.contains(part), "{prompt}");
    }
    let shown = bench.get(&format!("/v1/responses/{}", second["id"].as_str().unwrap())).await;
    let mut expected = second.clone();
    expected["completed_at"].take();
    let mut found = shown.json();
    found["completed_at"].take();
    assert_eq!(found, expected);
}

#[tokio::test]
async fn what_is_kept_can_be_looked_at_and_deleted() {
    let bench = Bench::saying("ok");
    let id = bench.post(RESPONSES, plain()).await.json()["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/responses/{id}");
    let items = bench.get(&format!("{path}/input_items")).await.json();
    assert_eq!(items["object"], "list");
    assert_eq!(items["data"][0]["content"], json!([{"type": "input_text", "text": "Hi"}]));
    let deleted = bench.delete(&path).await;
    assert_eq!(deleted.json(), json!({"id": id, "object": "response", "deleted": true}));
    for reply in [bench.get(&path).await, bench.delete(&path).await] {
        assert_eq!(
            (reply.status, reply.error()["code"].clone()),
            (StatusCode::NOT_FOUND, json!("response_not_found"))
        );
    }
    let reply = bench.post(RESPONSES, with(plain(), json!({"previous_response_id": id}))).await;
    assert_eq!(reply.status, StatusCode::NOT_FOUND);
    assert_eq!(reply.error()["param"], "previous_response_id");
    let unkept = bench.post(RESPONSES, with(plain(), json!({"store": false}))).await.json();
    assert_eq!(unkept["store"], false);
    let reply = bench.get(&format!("/v1/responses/{}", unkept["id"].as_str().unwrap())).await;
    assert_eq!(reply.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn responses_are_found_by_whom_they_were_made_for() {
    let options = ServerOptions { api_keys: vec!["one".into(), "two".into()], ..ServerOptions::default() };
    let bench = Bench::with(options, engine::facts(), one_by_one(tokens("x")));
    let ask = async |key: &str, method: &str, path: &str, body: Value| {
        let request = axum::http::Request::builder().method(method).uri(path);
        let request = request.header("authorization", format!("Bearer {key}"));
        let request = request.header("content-type", "application/json").body(body.to_string().into());
        bench.send(request.unwrap()).await
    };
    let id = ask("one", "POST", RESPONSES, plain()).await.json()["id"].clone();
    let path = format!("/v1/responses/{}", id.as_str().unwrap());
    let goes_on = with(plain(), json!({"previous_response_id": id}));
    for (key, status) in [("two", 404), ("one", 200)] {
        assert_eq!(ask(key, "GET", &path, Value::Null).await.status, status);
        assert_eq!(ask(key, "POST", RESPONSES, goes_on.clone()).await.status, status);
        assert_eq!(ask(key, "DELETE", &path, Value::Null).await.status, status);
    }
}

#[tokio::test]
async fn the_oldest_response_makes_room() {
    let options = ServerOptions { stored_responses: 2, ..ServerOptions::default() };
    let bench = Bench::with(options, engine::facts(), one_by_one(tokens("x")));
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(bench.post(RESPONSES, plain()).await.json()["id"].as_str().unwrap().to_owned());
    }
    let mut found = Vec::new();
    for id in &ids {
        found.push(bench.get(&format!("/v1/responses/{id}")).await.status.as_u16());
    }
    assert_eq!(found, [404, 200, 200]);
}

#[tokio::test]
async fn log_probabilities_are_of_the_text() {
    let bench = Bench::saying("Hm.\n</think>\n\nYes.");
    let body = with(thinking(), json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2}));
    let (plain, streamed) = bench.both(RESPONSES, body).await;
    let logprobs = plain["output"][1]["content"][0]["logprobs"].clone();
    let text: String =
        logprobs.as_array().unwrap().iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert!(text.contains("Yes.") && !text.contains("Hm"), "{text}");
    assert_eq!(logprobs[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(last_response(&streamed)["output"][1]["content"][0]["logprobs"], logprobs);
}

#[tokio::test]
async fn errors_name_the_clients_own_fields() {
    let bench = Bench::saying("x");
    for (more, status, param) in [
        (json!({"input": 7}), 400, "input"),
        (json!({"input": null}), 400, "input"),
        (json!({"input": [{"role": "robot", "content": "x"}]}), 400, "input[0].role"),
        (json!({"input": [{"type": "function_call_output", "call_id": "c"}]}), 400, "input[0].output"),
        (
            json!({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}),
            400,
            "input[0].arguments",
        ),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), 400, "input[0]"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            400,
            "input[0].content[0].type",
        ),
        (json!({"max_output_tokens": 0}), 400, "max_output_tokens"),
        (json!({"max_output_tokens": 100_000}), 400, "max_output_tokens"),
        (json!({"reasoning": {"effort": "very"}}), 400, "reasoning.effort"),
        (json!({"reasoning": {"summary": "long"}}), 400, "reasoning.summary"),
        (json!({"text": {"format": {"type": "poem"}}}), 400, "text.format.type"),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "a", "schema": 1}}}),
            400,
            "text.format.schema",
        ),
        (json!({"tools": [{"type": "function"}]}), 400, "tools[0].name"),
        (json!({"truncation": "some"}), 400, "truncation"),
        (json!({"background": true}), 400, "background"),
        (json!({"conversation": "conv_1"}), 400, "conversation"),
        (json!({"n": 2}), 400, "n"),
        (json!({"model": "llama"}), 404, "model"),
    ] {
        let reply = bench.post(RESPONSES, with(plain(), more.clone())).await;
        assert_eq!(reply.status, status, "{more}: {}", reply.body);
        assert_eq!(reply.error()["param"], param, "{more}: {}", reply.body);
    }
    assert!(bench.stage.requests.lock().unwrap().is_empty(), "nothing reached the engine");
}

#[tokio::test]
async fn a_failure_in_mid_stream_ends_it_as_failed() {
    let script = Arc::new(|_: &_, _| vec![Act::Step(tokens("Hi")), Act::Fail("device lost")]);
    let bench = Bench::new(script);
    let reply = bench.post(RESPONSES, with(plain(), json!({"stream": true}))).await;
    assert_eq!(order(&reply).last().map(String::as_str), Some("response.failed"));
    let response = last_response(&reply);
    assert_eq!(response["status"], "failed");
    assert_eq!(response["error"], json!({"code": "server_error", "message": "device lost"}));
    assert_eq!(response["output"][0]["status"], "incomplete");
    let id = response["id"].as_str().unwrap();
    assert_eq!(bench.get(&format!("/v1/responses/{id}")).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn calls_of_functions_are_items_of_their_own() {
    const CALLS: &str = "Looking.\n\n<tool_call>\n<function=web__find>\n<parameter=city>\nÅrhus 🙂\n</parameter>\n\
                         </function>\n</tool_call>\n<tool_call>\n<function=shell>\n</function>\n</tool_call>";
    let tools = json!([
        {"type": "function", "name": "shell", "parameters": {"type": "object"}},
        {"type": "namespace", "name": "web", "tools": [
            {"type": "function", "name": "find",
             "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
        ]},
    ]);
    for step_tokens in [1, 4, 1000] {
        let facts = EngineFacts { max_context_tokens: 1024, ..engine::facts() };
        let script = in_steps(byte_tokens(CALLS), step_tokens);
        let bench = Bench::with(ServerOptions::default(), facts, script);
        let (plain, streamed) = bench.both(RESPONSES, with(plain(), json!({"tools": tools}))).await;
        let output = plain["output"].as_array().unwrap();
        assert_eq!(output[0]["content"][0]["text"], "Looking.");
        let call = |index: usize| {
            let item = &output[index];
            (
                item["type"].as_str(),
                item["namespace"].as_str(),
                item["name"].as_str(),
                item["arguments"].as_str(),
            )
        };
        let arguments = serde_json::from_str::<Value>(call(1).3.unwrap()).unwrap();
        assert_eq!(arguments, json!({"city": "Århus 🙂"}));
        assert_eq!((call(1).0, call(1).1, call(1).2), (Some("function_call"), Some("web"), Some("find")));
        assert_eq!(call(2), (Some("function_call"), None, Some("shell"), Some("{}")));
        let names = order(&streamed);
        let of_call = [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ];
        assert_eq!(names[8..12], of_call, "{names:?}");
        let events = streamed.named_events();
        let joined: String = events
            .iter()
            .filter(|(name, event)| name.ends_with("arguments.delta") && event["output_index"] == 1)
            .map(|(_, event)| event["delta"].as_str().unwrap())
            .collect();
        assert_eq!(Some(joined.as_str()), call(1).3);
        // The call is known when the conversation goes on, under the name that the model has used.
        let outputs = json!([
            {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "sun"},
            {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "done"},
        ]);
        bench.post(RESPONSES, json!({"previous_response_id": plain["id"], "input": outputs})).await;
        let prompt = bench.last_prompt();
        assert!(prompt.contains("<function=web__find>"), "{prompt}");
        assert!(prompt.contains("<tool_response>\nsun\n</tool_response>"), "{prompt}");
    }
}
