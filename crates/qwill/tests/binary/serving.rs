//! Answers over HTTP: the golden ones, streamed and not.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::harness::{Running, golden};

/// A near tie may fall the other way with another summing order; golden/README.md names the bound.
const CLEAR_MARGIN: f64 = 1e-3;

/// Text of a golden answer as a client sees it: thinking and answer apart, end-of-turn token gone.
fn expected(row: &Value) -> (String, String) {
    let answer = row["answer"].as_str().unwrap().trim_end_matches("<|im_end|>");
    if row["enable_thinking"] == false {
        return (String::new(), answer.to_owned());
    }
    match answer.split_once("</think>") {
        Some((thinking, answer)) => (thinking.trim_end().to_owned(), answer.trim_start().to_owned()),
        None => (answer.to_owned(), String::new()),
    }
}

fn chat_request(row: &Value, stream: bool) -> Value {
    assert!(row["margins"].as_array().unwrap().iter().all(|margin| margin.as_f64().unwrap() > CLEAR_MARGIN));
    json!({
        "messages": [{"role": "user", "content": row["question"]}],
        "chat_template_kwargs": {"enable_thinking": row["enable_thinking"]},
        "temperature": 0,
        "max_tokens": row["ids"].as_array().unwrap().len(),
        "stream": stream,
        "stream_options": if stream { json!({"include_usage": true}) } else { Value::Null },
    })
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[test]
fn chats_give_the_golden_answers() {
    let server = Running::start(&[]);
    for row in golden("behaviour.jsonl") {
        let (status, body) = server.post("/v1/chat/completions", &chat_request(&row, false));
        assert_eq!(status, 200, "{body}");
        let message = &body["choices"][0]["message"];
        let (thinking, answer) = expected(&row);
        assert_eq!(text(&message["content"]), answer, "{row}");
        assert_eq!(text(&message["reasoning_content"]).trim_end(), thinking.trim_end(), "{row}");
        assert_eq!(body["choices"][0]["finish_reason"], row["finish"], "{row}");
        assert_eq!(body["usage"]["prompt_tokens"], row["prompt_ids"].as_array().unwrap().len());
        assert_eq!(body["usage"]["completion_tokens"], row["ids"].as_array().unwrap().len());
    }
}

#[test]
fn streamed_chats_give_the_same_text_and_end_in_order() {
    let server = Running::start(&[]);
    for row in golden("behaviour.jsonl") {
        let events: Vec<String> = server.stream("/v1/chat/completions", &chat_request(&row, true)).collect();
        assert_eq!(events.last().unwrap(), "[DONE]");
        let chunks: Vec<Value> =
            events[..events.len() - 1].iter().map(|data| serde_json::from_str(data).unwrap()).collect();
        let joined = |name: &str| -> String {
            chunks.iter().map(|chunk| text(&chunk["choices"][0]["delta"][name])).collect()
        };
        let (thinking, answer) = expected(&row);
        assert_eq!(joined("content"), answer, "{row}");
        assert_eq!(joined("reasoning_content").trim_end(), thinking.trim_end(), "{row}");
        assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
        let reasons: Vec<&str> =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["finish_reason"].as_str()).collect();
        assert_eq!(reasons, [row["finish"].as_str().unwrap()]);
        let usage = &chunks.last().unwrap()["usage"];
        assert_eq!(usage["completion_tokens"], row["ids"].as_array().unwrap().len());
    }
}

#[test]
fn completions_of_token_ids_continue_them() {
    let server = Running::start(&[]);
    for row in golden("behaviour.jsonl") {
        let request = json!({"prompt": row["prompt_ids"], "temperature": 0, "max_tokens": row["ids"].as_array().unwrap().len()});
        let (status, body) = server.post("/v1/completions", &request);
        assert_eq!(status, 200, "{body}");
        let answer = row["answer"].as_str().unwrap().trim_end_matches("<|im_end|>");
        assert_eq!(text(&body["choices"][0]["text"]), answer);
        let streamed: String = server
            .stream(
                "/v1/completions",
                &json!({"prompt": row["prompt"], "temperature": 0, "max_tokens": 128, "stream": true}),
            )
            .take_while(|data| data != "[DONE]")
            .map(|data| {
                serde_json::from_str::<Value>(&data).unwrap()["choices"][0]["text"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned()
            })
            .collect();
        assert_eq!(streamed, answer);
    }
}

#[test]
fn the_screen_tells_what_runs_and_its_command_works_as_printed() {
    let server = Running::start(&["--served-name", "first,second"]);
    for wanted in [
        "Qwill 0.",
        "model      tiny (embedded): 13.8 M parameters",
        "w16a32 kv=f32 state=f32 cpu",
        "KV tokens, context",
        "ready in",
    ] {
        assert!(server.screen.contains(wanted), "no `{wanted}` in\n{}", server.screen);
    }
    assert!(!server.screen.contains('\u{1b}'), "control characters in a pipe:\n{}", server.screen);
    assert!(server.screen.lines().all(|line| line.chars().count() <= 120), "{}", server.screen);
    let models: Value = serde_json::from_str(&server.get("/v1/models").1).unwrap();
    let names: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|model| text(&model["id"])).collect();
    assert_eq!(names, ["first", "second"]);

    let command = &server.screen[server.screen.find("\ncurl ").unwrap()..];
    if Command::new("curl").arg("--version").output().is_err() {
        println!("skipped: no curl on this machine to run the printed command with");
        return;
    }
    let output = Command::new("sh").args(["-c", command.trim()]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let body: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(body["choices"][0]["message"]["content"], "The capital of Denmark is Copenhagen.");
}

#[test]
fn keys_close_the_server_and_open_it() {
    let server = Running::start(&["--api-key", "secret"]);
    assert!(server.screen.contains("(key required)"), "{}", server.screen);
    assert_eq!(server.get("/v1/models").0, 401);
    assert_eq!(server.get("/health").0, 200);
    let (status, page) = server.get("/");
    assert_eq!(status, 200);
    assert!(page.contains("<title>Qwill</title>") && page.contains("page/chat.js"));
    let mut response = ureq::get(format!("{}/v1/models", server.url))
        .header("authorization", "Bearer secret")
        .call()
        .unwrap();
    assert!(response.body_mut().read_to_string().unwrap().contains("tiny"));
}

#[test]
fn quantised_and_random_models_generate() {
    for arguments in [
        &["--quantize", "int4"][..],
        &["--quantize", "int8", "--activations", "f32", "--kv-type", "bf16"],
        &["--weights", "random", "--geometry", "tiny", "--seed", "3"],
    ] {
        let server = Running::start(arguments);
        let request = json!({"prompt": "The capital", "max_tokens": 5, "ignore_eos": true});
        let (status, body) = server.post("/v1/completions", &request);
        assert_eq!(status, 200, "{arguments:?}: {body}");
        assert_eq!(body["usage"]["completion_tokens"], 5, "{arguments:?}: {body}");
    }
}

#[test]
fn the_json_log_is_one_object_a_line_from_the_start() {
    let mut child =
        crate::harness::qwill(&["serve", "--port", "0", "--log-format", "json", "--max-sequences", "2"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut line = || serde_json::from_str::<Value>(&log.next().unwrap().unwrap()).unwrap();
    let starting = line();
    assert_eq!(starting["message"], "starting");
    assert_eq!((&starting["model"], &starting["sequences"]), (&json!("tiny"), &json!(2)));
    let ready = line();
    assert_eq!(ready["message"], "ready");
    let health = format!("{}/health", ready["url"].as_str().unwrap());
    assert_eq!(ureq::get(health).call().unwrap().status().as_u16(), 200);
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "", "standard output is for people");
}
