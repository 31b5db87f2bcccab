//! What answers tell besides, where a request asks for it.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::client::{Bench, CHAT, COMPLETIONS, byte_tokens, in_steps, plain_chat, tokens, with};
use crate::engine::{CACHED_TOKENS, logprobs_of};

fn thinking_chat() -> Value {
    json!({"messages": [{"role": "user", "content": "2+2?"}]})
}

#[tokio::test]
async fn thinking_is_where_the_request_wants_it() {
    const INLINE: &str = "<think>\nAdd. 🤔\n</think>\n\nIt is 4.";
    for step_tokens in [1, 4, 100] {
        let bench = Bench::new(in_steps(byte_tokens("Add. 🤔\n</think>\n\nIt is 4."), step_tokens));
        for (more, reasoning, content) in [
            (json!({}), "Add. 🤔", "It is 4."),
            (json!({"include_reasoning": false}), "", "It is 4."),
            (json!({"reasoning": {"exclude": true}}), "", "It is 4."),
            (json!({"separate_reasoning": false}), "", INLINE),
        ] {
            let (plain, streamed) = bench.both(CHAT, with(thinking_chat(), more)).await;
            let message = &plain["choices"][0]["message"];
            assert_eq!(message["reasoning_content"].as_str().unwrap_or_default(), reasoning);
            assert_eq!(message["content"], content);
            assert_eq!(streamed.joined(0, "/delta/reasoning_content"), reasoning);
            assert_eq!(streamed.joined(0, "/delta/content"), content);
            let thought = &plain["usage"]["completion_tokens_details"]["reasoning_tokens"];
            assert_eq!(*thought, "Add. 🤔\n</think>".len(), "hidden or not");
        }
    }
}

#[tokio::test]
async fn thinking_alone_is_inline_too() {
    let bench = Bench::new(in_steps(byte_tokens("Hm, hm"), 1));
    let body = with(thinking_chat(), json!({"separate_reasoning": false, "max_tokens": 6}));
    let (plain, streamed) = bench.both(CHAT, body).await;
    assert_eq!(plain["choices"][0]["message"]["content"], "<think>\nHm, hm");
    assert_eq!(streamed.joined(0, "/delta/content"), "<think>\nHm, hm");
}

#[tokio::test]
async fn every_spelling_of_no_thinking() {
    let bench = Bench::saying("4");
    for more in [
        json!({"reasoning_effort": "none"}),
        json!({"reasoning_effort": "off"}),
        json!({"reasoning_effort": "None"}),
        json!({"reasoning": {"effort": "none"}}),
        json!({"reasoning": {"enabled": false}}),
    ] {
        let reply = bench.post(CHAT, with(thinking_chat(), more.clone())).await;
        assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
        assert!(bench.last_prompt().ends_with("<think>\n\n</think>\n\n"), "{more}");
    }
    for effort in ["minimal", "low", "medium", "high", "xhigh", "max", "HIGH"] {
        let reply = bench.post(CHAT, with(thinking_chat(), json!({"reasoning_effort": effort}))).await;
        assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
        assert!(bench.last_prompt().ends_with("<think>\n"), "{effort}");
    }
    let reply = bench.post(CHAT, with(thinking_chat(), json!({"reasoning": {"effort": "hard"}}))).await;
    assert_eq!(
        (reply.status, reply.error()["param"].clone()),
        (StatusCode::BAD_REQUEST, json!("reasoning.effort"))
    );
}

#[tokio::test]
async fn timings_come_where_they_are_asked_for() {
    let bench = Bench::saying("One two three.");
    for (path, body) in [(CHAT, plain_chat()), (COMPLETIONS, json!({"prompt": "x y z", "max_tokens": 20}))] {
        let (plain, streamed) = bench.both(path, body.clone()).await;
        assert_eq!(plain.get("timings"), None);
        assert!(!streamed.body.contains("timings"));
        let (plain, streamed) = bench.both(path, with(body.clone(), json!({"timings": true}))).await;
        let prompt_tokens = bench.stage.last_request().prompt.len();
        let of_last = streamed.events().pop().unwrap()["timings"].clone();
        for timings in [plain["timings"].clone(), of_last] {
            assert_eq!(timings["cache_n"], CACHED_TOKENS);
            assert_eq!(timings["prompt_n"], prompt_tokens - CACHED_TOKENS);
            assert_eq!(timings["predicted_n"], tokens("One two three.").len() + 1);
            for field in ["prompt_ms", "predicted_ms", "prompt_per_second", "predicted_per_token_ms"] {
                assert!(timings[field].as_f64().unwrap() >= 0.0, "{field}");
            }
        }
        let with_timings =
            |events: Vec<Value>| events.iter().filter(|event| event.get("timings").is_some()).count();
        assert_eq!(with_timings(streamed.events()), 1, "only the last chunk");
        let each = bench.post(path, with(body, json!({"timings_per_token": true, "stream": true}))).await;
        assert_eq!(with_timings(each.events()), each.events().len());
    }
}

#[tokio::test]
async fn progress_of_the_prompt_comes_before_its_answer() {
    let bench = Bench::saying("ok");
    for (path, body) in [(CHAT, plain_chat()), (COMPLETIONS, json!({"prompt": "x y z"}))] {
        let asked = with(body, json!({"return_progress": true, "stream": true}));
        let reply = bench.post(path, asked.clone()).await;
        let events = reply.events();
        let total = bench.stage.last_request().prompt.len();
        for (event, processed) in events.iter().zip([CACHED_TOKENS, total]) {
            assert_eq!(event["choices"], json!([]));
            let progress = &event["prompt_progress"];
            let numbers = [&progress["total"], &progress["cache"], &progress["processed"]];
            assert_eq!(numbers, [&json!(total), &json!(CACHED_TOKENS), &json!(processed)]);
            assert!(progress["time_ms"].as_f64().unwrap() >= 0.0);
        }
        assert!(events[2..].iter().all(|event| event.get("prompt_progress").is_none()));
        let plain = bench.post(path, with(asked, json!({"stream": false}))).await;
        assert_eq!(plain.error()["param"], "return_progress");
    }
}

#[tokio::test]
async fn log_probabilities_of_the_prompt() {
    let bench = Bench::saying("ok");
    let body = json!({"prompt": [[5, 6, 7]], "prompt_logprobs": 2, "max_tokens": 1});
    let reply = bench.post(COMPLETIONS, body).await.json();
    let found = &reply["choices"][0]["prompt_logprobs"];
    assert_eq!(found[0], Value::Null);
    for (index, id) in [(1, 6_u32), (2, 7)] {
        let expected = logprobs_of(id, 2);
        let entry = found[index].as_object().unwrap();
        assert_eq!(entry.len(), 2);
        for (rank, (other, logprob)) in expected.top.iter().enumerate() {
            let candidate = &entry[&other.to_string()];
            assert_eq!(candidate["logprob"].as_f64().unwrap() as f32, *logprob);
            assert_eq!(candidate["rank"], rank + 1);
            assert!(candidate["decoded_token"].is_string());
        }
    }
    // Echoed log-probabilities have their own number of alternatives.
    let body =
        json!({"prompt": [[5, 6]], "prompt_logprobs": 3, "logprobs": 1, "echo": true, "max_tokens": 1});
    let choice = bench.post(COMPLETIONS, body).await.json()["choices"][0].clone();
    assert_eq!(choice["logprobs"]["top_logprobs"][1].as_object().unwrap().len(), 1);
    assert_eq!(choice["prompt_logprobs"][1].as_object().unwrap().len(), 3);
    let chat = bench.post(CHAT, with(plain_chat(), json!({"prompt_logprobs": 0}))).await.json();
    assert_eq!(chat["prompt_logprobs"].as_array().unwrap().len(), bench.stage.last_request().prompt.len());
    let reply = bench.post(CHAT, with(plain_chat(), json!({"prompt_logprobs": 1, "stream": true}))).await;
    assert_eq!(reply.error()["param"], "prompt_logprobs");
}

#[tokio::test]
async fn a_long_prompt_is_cut_only_where_asked() {
    let bench = Bench::saying("ok");
    let ids: Vec<u32> = (0..300).collect();
    let body = json!({"prompt": ids, "max_tokens": 6});
    assert_eq!(bench.post(COMPLETIONS, body.clone()).await.error()["code"], "context_length_exceeded");
    for (keep, first) in [(json!(10), 290_u32), (json!(-1), 50)] {
        let more = json!({"truncate_prompt_tokens": keep, "echo": true});
        let reply = bench.post(COMPLETIONS, with(body.clone(), more)).await;
        assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
        let request = bench.stage.last_request();
        assert_eq!((request.prompt[0], *request.prompt.last().unwrap()), (first, 299));
        let echoed = bench.text.tokenizer.decode(&request.prompt, false);
        assert_eq!(reply.json()["choices"][0]["text"], format!("{echoed}ok"));
    }
    let reply = bench.post(COMPLETIONS, with(body, json!({"truncate_prompt_tokens": 0}))).await;
    assert_eq!(reply.error()["param"], "truncate_prompt_tokens");
}
