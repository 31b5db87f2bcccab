//! `/v1/completions`.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::client::{Bench, COMPLETIONS, byte_tokens, one_by_one, tokens, with};
use crate::engine::{self, Act, END_OF_TURN};

fn settled(mut value: Value) -> Value {
    assert!(value["id"].as_str().unwrap().starts_with("cmpl-"));
    value["id"] = "ID".into();
    value["created"] = 0.into();
    value
}

#[tokio::test]
async fn body_snapshot() {
    let bench = Bench::saying(" there was");
    let body = json!({"prompt": "Once", "max_tokens": 2, "logprobs": 1, "echo": true});
    let reply = bench.post(COMPLETIONS, body).await;
    insta::assert_snapshot!(serde_json::to_string_pretty(&settled(reply.json())).unwrap());
}

#[tokio::test]
async fn stream_snapshot() {
    let bench = Bench::saying(" there was");
    let body =
        json!({"prompt": "Once", "echo": true, "stream": true, "stream_options": {"include_usage": true}});
    let events = bench.post(COMPLETIONS, body).await.events();
    let events: Vec<String> = events.into_iter().map(|event| settled(event).to_string()).collect();
    insta::assert_snapshot!(events.join("\n"));
}

#[tokio::test]
async fn all_four_kinds_of_prompt() {
    let bench = Bench::saying("!");
    let ids = tokens("Hello world");
    for (prompt, expected) in [
        (json!("Hello world"), vec![ids.clone()]),
        (json!(["Hello world", "b"]), vec![ids.clone(), tokens("b")]),
        (json!(ids), vec![ids.clone()]),
        (json!([ids, [5, 6]]), vec![ids.clone(), vec![5, 6]]),
        (json!("<|im_start|>user\nx"), vec![tokens("<|im_start|>user\nx")]),
    ] {
        bench.stage.requests.lock().unwrap().clear();
        let reply = bench.post(COMPLETIONS, json!({"prompt": prompt})).await;
        assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
        let choices = reply.json()["choices"].clone();
        assert_eq!(choices.as_array().unwrap().len(), expected.len());
        let mut seen: Vec<(String, Vec<u32>)> = bench
            .stage
            .requests
            .lock()
            .unwrap()
            .iter()
            .map(|request| (request.id.clone(), request.prompt.to_vec()))
            .collect();
        seen.sort();
        assert_eq!(seen.into_iter().map(|(_, prompt)| prompt).collect::<Vec<_>>(), expected);
        assert_eq!(bench.stage.last_request().sampling.max_tokens, 16, "the documented default");
    }
}

#[tokio::test]
async fn several_prompts_and_choices_are_answered_in_order() {
    // The answer names the prompt and the choice; later prompts answer first.
    let script = Arc::new(|request: &qwill_contract::Request, choice: usize| {
        let letter = u8::try_from(choice).unwrap() + b'a';
        let text = format!("{}{}", request.prompt[0], char::from(letter));
        let mut acts = vec![Act::Step(byte_tokens(&text))];
        if request.prompt[0] == 1 {
            acts.insert(0, Act::Hold);
        }
        acts
    });
    let bench = Bench::new(script);
    let body = json!({"prompt": [[1], [2], [3]], "n": 2, "max_tokens": 9});
    let stage = Arc::clone(&bench.stage);
    let opener = std::thread::spawn(move || {
        stage.wait("the other prompts", |stage| stage.ended.load(std::sync::atomic::Ordering::SeqCst) >= 2);
        stage.open_gate();
    });
    let (plain, streamed) = bench.both(COMPLETIONS, body).await;
    opener.join().unwrap();
    let texts: Vec<&str> =
        plain["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["1a", "1b", "2a", "2b", "3a", "3b"]);
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(plain["choices"][index]["index"], index);
        assert_eq!(&streamed.joined(index, "/text"), text);
        assert_eq!(streamed.joined(index, "/finish_reason"), "stop");
    }
    assert_eq!(plain["usage"]["prompt_tokens"], 3);
    assert_eq!(plain["usage"]["completion_tokens"], 6 * 3);
}

#[tokio::test]
async fn echo_with_logprobs_covers_prompt_and_answer() {
    let bench = Bench::new(one_by_one(byte_tokens("é!")));
    let prompt = [tokens("Héllo"), byte_tokens("é")].concat();
    let body = json!({"prompt": prompt, "echo": true, "logprobs": 2, "max_tokens": 3});
    let (plain, streamed) = bench.both(COMPLETIONS, body).await;
    let choice = &plain["choices"][0];
    assert_eq!(choice["text"], "Hélloéé!");
    let all = [prompt.clone(), byte_tokens("é!")].concat();
    let logprobs = &choice["logprobs"];
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().unwrap().len(), all.len(), "{list}");
    }
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    for (index, &id) in all.iter().enumerate().skip(1) {
        let truth = engine::logprobs_of(id, 2).logprob;
        let found = &logprobs["token_logprobs"][index];
        assert_eq!((found.as_f64().unwrap() as f32).to_bits(), truth.to_bits());
        // Greedy clients compare the token's value with the best one, bit for bit.
        let top = logprobs["top_logprobs"][index].as_object().unwrap();
        let best = top.values().map(|value| value.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert_eq!(best, found.as_f64().unwrap());
    }
    let offsets: Vec<u64> =
        logprobs["text_offset"].as_array().unwrap().iter().map(|offset| offset.as_u64().unwrap()).collect();
    // Both bytes of a cut character begin where the character does.
    assert_eq!(offsets[offsets.len() - 5..], [5, 5, 6, 6, 7]);
    assert_eq!(streamed.joined(0, "/text"), "Hélloéé!");
    let mut joined = Vec::new();
    for event in streamed.events() {
        joined.extend(event["choices"][0]["logprobs"]["tokens"].as_array().cloned().unwrap_or_default());
    }
    assert_eq!(Value::Array(joined), logprobs["tokens"]);
}

#[tokio::test]
async fn echo_alone_scores_a_prompt() {
    let bench = Bench::saying("never said");
    let body =
        json!({"prompt": "Hello world", "echo": true, "max_tokens": 0, "logprobs": 1, "temperature": 0});
    let (plain, streamed) = bench.both(COMPLETIONS, body).await;
    assert_eq!(plain["choices"][0]["text"], "Hello world");
    assert_eq!(plain["choices"][0]["finish_reason"], "length");
    assert_eq!(plain["usage"]["completion_tokens"], 0);
    let tokens = tokens("Hello world").len();
    assert_eq!(plain["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), tokens);
    assert_eq!(streamed.joined(0, "/text"), "Hello world");
    assert_eq!(bench.stage.last_request().prompt_logprobs, Some(1));
}

#[tokio::test]
async fn no_logprobs_of_the_prompt_without_echo() {
    let bench = Bench::saying("ok");
    let reply = bench.post(COMPLETIONS, json!({"prompt": "a", "logprobs": 0})).await.json();
    assert_eq!(bench.stage.last_request().prompt_logprobs, None);
    let logprobs = &reply["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["ok", "<|im_end|>"]));
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 1, "the token itself");
}

#[tokio::test]
async fn stop_tokens_end_without_a_trace_in_the_text() {
    let ids = tokens("one two");
    let last = *ids.last().unwrap();
    let bench = Bench::saying("one two three");
    let body = json!({"prompt": "x", "stop_token_ids": [last], "return_token_ids": true});
    let reply = bench.post(COMPLETIONS, body.clone()).await.json();
    assert_eq!(reply["choices"][0]["text"], "one");
    assert_eq!(reply["choices"][0]["token_ids"], json!(ids));
    assert_eq!(reply["choices"][0]["prompt_token_ids"], json!(tokens("x")));
    let shown = bench.post(COMPLETIONS, with(body, json!({"include_stop_str_in_output": true}))).await.json();
    assert_eq!(shown["choices"][0]["text"], "one two");
}

#[tokio::test]
async fn ignored_ends_of_turn_go_on() {
    let ids = [tokens("a"), vec![END_OF_TURN], tokens("b")].concat();
    let bench = Bench::new(one_by_one(ids));
    let body = json!({"prompt": "x", "ignore_eos": true, "max_tokens": 3});
    let reply = bench.post(COMPLETIONS, body).await.json();
    assert_eq!(reply["choices"][0]["text"], "ab");
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["usage"]["completion_tokens"], 3);
}
