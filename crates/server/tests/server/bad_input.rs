//! Everything a client can get wrong: a 4xx that names the field and the reason, nothing reaches the engine, and
//! the server goes on.

use serde_json::{Value, json};

use crate::bad_rows::{
    Row, chat_rows, completion_rows, form_rows, message_rows, sampling_rows, shared_rows, unsupported_rows,
};
use crate::client::{Bench, CHAT, COMPLETIONS, plain_chat, with};

async fn check(bench: &Bench, path: &str, base: &Value, rows: Vec<Row>) {
    for (fields, status, param, fragment) in rows {
        let reply = bench.post(path, with(base.clone(), fields.clone())).await;
        let context = format!("{path} {fields}: {}", reply.body);
        assert_eq!(reply.status, status, "{context}");
        let error = reply.error();
        assert_eq!(error["param"].as_str(), param, "{context}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(fragment), "{context} lacks {fragment}");
        if let Some(param) = param.filter(|_| status == 400) {
            let field = param.split(['[', '.']).next().unwrap();
            assert!(
                message.contains(field) || fragment.contains("prompt"),
                "{context} does not name {field}"
            );
        }
        assert!(
            error["type"].is_string() && error["code"].is_string() | error["code"].is_null(),
            "{context}"
        );
        assert_eq!(error.as_object().unwrap().len(), 4);
    }
}

#[tokio::test]
async fn every_bad_field_is_named() {
    let bench = Bench::saying("ok");
    let completion = json!({"prompt": "Hi"});
    for rows in [sampling_rows, shared_rows, form_rows, unsupported_rows] {
        check(&bench, CHAT, &plain_chat(), rows()).await;
        check(&bench, COMPLETIONS, &completion, rows()).await;
    }
    check(&bench, CHAT, &plain_chat(), message_rows()).await;
    check(&bench, CHAT, &plain_chat(), chat_rows()).await;
    check(&bench, COMPLETIONS, &completion, completion_rows()).await;
    assert!(bench.stage.requests.lock().unwrap().is_empty(), "the engine saw nothing");
    let reply = bench.post(CHAT, plain_chat()).await;
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "ok");
}

#[tokio::test]
async fn every_field_takes_null_and_refuses_the_wrong_type() {
    const BOOLEANS: &[&str] = &["ignore_eos", "stream", "skip_special_tokens", "return_token_ids"];
    const NUMBERS: &[&str] = &[
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "min_tokens",
        "n",
        "best_of",
    ];
    const LISTS: &[&str] = &["stop_token_ids"];
    let bench = Bench::saying("ok");
    for path in [CHAT, COMPLETIONS] {
        let base = if path == CHAT { plain_chat() } else { json!({"prompt": "x"}) };
        for field in
            [BOOLEANS, NUMBERS, LISTS, &["stop", "logit_bias", "model", "user", "logprobs", "tools"]].concat()
        {
            let reply = bench.post(path, with(base.clone(), json!({field: null}))).await;
            assert_eq!(reply.status, 200, "{field}: null: {}", reply.body);
        }
        let wrong = [json!("NaN"), json!(""), json!({"a": 1}), json!([null]), json!("é".repeat(500))];
        for field in [BOOLEANS, NUMBERS, LISTS].concat() {
            for value in &wrong {
                let reply = bench.post(path, with(base.clone(), json!({field: value}))).await;
                assert_eq!(reply.status, 400, "{field}: {value}: {}", reply.body);
                assert!(reply.error()["param"].as_str().unwrap().starts_with(field));
                assert!(reply.body.len() < 500, "a long value is cut: {}", reply.body);
            }
        }
    }
}

#[tokio::test]
async fn too_long_prompts_have_the_code_that_clients_look_for() {
    let bench = Bench::saying("ok");
    for body in [json!({"prompt": vec![5; 300]}), json!({"prompt": vec![5; 200], "max_tokens": 100})] {
        let error = bench.post(COMPLETIONS, body).await.error();
        assert_eq!(error["code"], "context_length_exceeded");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let full = bench.post(COMPLETIONS, json!({"prompt": vec![5; 255], "max_tokens": 1})).await;
    assert_eq!(full.status, 200, "{}", full.body);
    // A prompt of the whole context can be looked at, but not continued.
    let echo = json!({"prompt": vec![5; 256], "max_tokens": 0, "echo": true});
    let reply = bench.post(COMPLETIONS, echo.clone()).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.json()["usage"]["prompt_tokens"], 256);
    let error = bench.post(COMPLETIONS, with(echo, json!({"prompt": vec![5; 257]}))).await.error();
    assert_eq!(error["code"], "context_length_exceeded");
    assert!(error["message"].as_str().unwrap().contains("at most 256 tokens fits"), "{error}");
}

#[tokio::test]
async fn bodies_that_are_no_json_object() {
    let bench = Bench::saying("ok");
    let good = plain_chat().to_string();
    let mut bodies: Vec<(Vec<u8>, &str)> = vec![
        (b"".to_vec(), "empty"),
        (b"   ".to_vec(), "empty"),
        (b"null".to_vec(), "must be a JSON object, got null"),
        (b"[]".to_vec(), "must be a JSON object"),
        (b"\"text\"".to_vec(), "must be a JSON object"),
        (b"42".to_vec(), "must be a JSON object"),
        (b"{\"temperature\": NaN}".to_vec(), "not valid JSON"),
        (b"{\"temperature\": 1e999}".to_vec(), "out of range"),
        (b"{\"temperature\": 1,}".to_vec(), "not valid JSON"),
        (b"{/*x*/}".to_vec(), "not valid JSON"),
        (b"\xef\xbb\xbf{}".to_vec(), "not valid JSON"),
        (b"{\"prompt\":\"\xc4\xe3\xba\xc3\"}".to_vec(), "not valid UTF-8"),
        (b"\xff\xfe{\x00}\x00".to_vec(), "not valid UTF-8"),
        (b"{\"prompt\":\"\\ud800\"}".to_vec(), "not valid JSON"),
        (b"{\"n\":1,\"n\":2}".to_vec(), "`n` is there twice"),
        (format!("{{\"metadata\":{}", "[".repeat(10_000)).into_bytes(), "recursion limit"),
        (format!("{{\"metadata\":{}", "{\"a\":".repeat(10_000)).into_bytes(), "recursion limit"),
    ];
    for end in (1..good.len()).step_by(3) {
        bodies.push((good.as_bytes()[..end].to_vec(), "not valid JSON"));
    }
    for (body, fragment) in bodies {
        for path in [CHAT, COMPLETIONS, "/tokenize", "/detokenize"] {
            let reply = bench.post_raw(path, body.clone()).await;
            assert_eq!(reply.status, 400, "{}", reply.body);
            assert!(
                reply.error()["message"].as_str().unwrap().contains(fragment),
                "{} {fragment}",
                reply.body
            );
        }
    }
    assert!(bench.stage.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn content_types_and_encodings() {
    use axum::body::Body;
    use axum::http::Request;
    let bench = Bench::saying("ok");
    let send = |name: &'static str, value: &'static str| {
        let mut request = Request::post(CHAT);
        if name != "content-type" {
            request = request.header("content-type", "application/json; charset=utf-8");
        }
        if !value.is_empty() {
            request = request.header(name, value);
        }
        bench.send(request.body(Body::from(plain_chat().to_string())).unwrap())
    };
    assert_eq!(send("x-nothing", "special").await.status, 200);
    assert_eq!(send("content-encoding", "identity").await.status, 200);
    for (name, value, fragment) in [
        ("content-type", "", "got \"none\""),
        ("content-type", "text/plain", "got \"text/plain\""),
        ("content-type", "application/x-www-form-urlencoded", "must be `application/json`"),
        ("content-encoding", "gzip", "\"gzip\" is not supported"),
    ] {
        let reply = send(name, value).await;
        assert_eq!(reply.status, 415, "{}", reply.body);
        assert!(reply.error()["message"].as_str().unwrap().contains(fragment), "{}", reply.body);
    }
}

#[tokio::test]
async fn strict_servers_refuse_unknown_fields() {
    let options = qwill_server::ServerOptions { strict_params: true, ..Default::default() };
    let bench = Bench::with(options, crate::engine::facts(), crate::client::one_by_one(vec![5]));
    for (fields, param) in [
        (json!({"made_up": 1}), "made_up"),
        (json!({"messages": [{"role": "user", "content": "x", "mood": "good"}]}), "messages[].mood"),
        (json!({"stream": true, "stream_options": {"often": true}}), "stream_options.often"),
    ] {
        let reply = bench.post(CHAT, with(plain_chat(), fields)).await;
        assert_eq!(reply.status, 400, "{}", reply.body);
        assert_eq!(reply.error()["param"], param);
        assert_eq!(reply.error()["code"], "unknown_parameter");
    }
    let fine = json!({"user": "u", "store": true, "made_up": null, "max_tokens": 1});
    assert_eq!(bench.post(CHAT, with(plain_chat(), fine)).await.status, 200);
}
