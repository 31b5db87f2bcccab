//! The one line of each request.

use std::io::Write;
use std::sync::{Arc, Mutex, Once};

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use crate::client::{Bench, CHAT, COMPLETIONS, plain_chat, with};

#[derive(Clone, Default)]
pub(crate) struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Lines {
    /// What was logged since the last call.
    pub(crate) fn take(&self) -> Vec<Value> {
        let bytes = std::mem::take(&mut *self.0.lock().unwrap());
        let text = String::from_utf8(bytes).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Wants every line, for all threads, before anything is logged. Whether a place in the code logs at all is decided when
/// it is first reached; a thread that nobody listens to would decide against it, for the tests that do listen as well.
pub(crate) fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let nowhere =
            tracing_subscriber::fmt().with_max_level(tracing::Level::INFO).with_writer(std::io::sink);
        tracing::subscriber::set_global_default(nowhere.finish()).unwrap();
    });
}

/// Logs of this thread as JSON lines; the tests' runtime has no other that handles requests.
pub(crate) fn capture() -> (Lines, tracing::subscriber::DefaultGuard) {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_max_level(tracing::Level::INFO)
        .with_writer(move || writer.clone())
        .finish();
    (lines, tracing::subscriber::set_default(subscriber))
}

#[tokio::test]
async fn one_line_for_each_request_and_no_prompt_in_it() {
    const SECRET: &str = "xylophone";
    let (lines, _guard) = capture();
    let bench = Bench::saying("one two three");
    let body = json!({"messages": [{"role": "user", "content": SECRET}], "enable_thinking": false});
    let request =
        Request::post(CHAT).header("content-type", "application/json").header("x-request-id", "trace-7");
    let reply = bench.send(request.body(Body::from(body.to_string())).unwrap()).await.json();
    let logged = lines.take();
    assert_eq!(logged.len(), 1, "{logged:?}");
    let line = &logged[0];
    assert_eq!(line["message"], "request");
    assert_eq!(line["id"], "trace-7");
    assert_eq!(line["endpoint"], CHAT);
    assert_eq!(line["model"], "tiny");
    assert_eq!(line["status"], 200);
    assert_eq!(line["finish"], "stop");
    assert_eq!(line["prompt_tokens"], reply["usage"]["prompt_tokens"]);
    assert_eq!(line["generated_tokens"], reply["usage"]["completion_tokens"]);
    assert_eq!(line["cached_tokens"], 2);
    for time in ["queue_ms", "ttft_ms", "tokens_per_s", "total_ms"] {
        assert!(line[time].as_f64().is_some_and(|value| value >= 0.0), "{time} in {line}");
    }
    assert!(!line.to_string().contains(SECRET));

    bench.post(CHAT, with(plain_chat(), json!({"stream": true, "max_tokens": 1}))).await;
    let logged = lines.take();
    assert_eq!((logged.len(), &logged[0]["finish"]), (1, &json!("length")));
    assert_eq!(logged[0]["stream"], true);

    bench.post(COMPLETIONS, json!({"prompt": SECRET, "temperature": 9})).await;
    let logged = lines.take();
    assert_eq!((logged.len(), &logged[0]["status"]), (1, &json!(400)));
    assert_eq!(logged[0]["finish"], "error");
    assert!(logged[0]["error"].as_str().unwrap().contains("`temperature`"));
    assert!(!logged[0].to_string().contains(SECRET));
}

#[tokio::test]
async fn an_unknown_field_is_warned_about_once() {
    let (lines, _guard) = capture();
    let bench = Bench::saying("ok");
    for _ in 0..3 {
        bench.post(COMPLETIONS, json!({"prompt": "x", "brand_new": 1, "max_tokens": 1})).await;
    }
    let logged = lines.take();
    let warnings: Vec<&Value> = logged.iter().filter(|line| line["level"] == "WARN").collect();
    assert_eq!(warnings.len(), 1, "{logged:?}");
    assert!(warnings[0]["field"].as_str().unwrap().contains("brand_new"));
}

#[tokio::test]
async fn refusals_quote_the_client_to_the_client_only() {
    const SECRET: &str = "xylophone";
    let (lines, _guard) = capture();
    let bench = Bench::saying("ok");
    let arguments = json!({"function": {"name": "f", "arguments": SECRET}});
    for fields in [
        json!({"messages": SECRET}),
        json!({"messages": [{"role": SECRET, "content": "x"}]}),
        json!({"messages": [{"role": "user", "content": {"text": SECRET}}]}),
        json!({"messages": [{"role": "assistant", "content": null, "tool_calls": [arguments]}]}),
        json!({"messages": [{"role": "user", "content": [{"type": SECRET}]}]}),
        json!({"tool_choice": SECRET}),
        json!({"response_format": SECRET}),
        json!({"stop": {"a": SECRET}}),
        json!({"logit_bias": {SECRET: 1}}),
    ] {
        let reply = bench.post(CHAT, with(plain_chat(), fields.clone())).await;
        assert!(reply.status == 400 && reply.body.contains(SECRET), "{fields}: {}", reply.body);
        let logged = lines.take();
        assert_eq!(logged.len(), 1, "{logged:?}");
        assert!(logged[0]["error"].as_str().is_some_and(|text| !text.is_empty()), "{logged:?}");
        assert!(!logged[0].to_string().contains(SECRET), "{fields}: {logged:?}");
    }
    for body in [format!("{{\"{SECRET}\": 1, \"{SECRET}\": 2}}"), format!("\"{SECRET}\"")] {
        assert!(bench.post_raw(CHAT, body).await.body.contains(SECRET));
        assert!(!lines.take()[0].to_string().contains(SECRET));
    }
}
