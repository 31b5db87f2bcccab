//! What operators look at and turn: requests in hand, their ends, time limits, the watchdog, facts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use qwill_contract::StepKind;
use qwill_server::{ApiKey, ServerOptions};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::client::{Bench, CHAT, COMPLETIONS, byte_tokens, one_by_one, plain_chat, tokens, with};
use crate::engine::{self, Act};
use crate::logging::capture;
use crate::service::metric;
use crate::sockets::{exchange, get, post};

/// Two tokens, then nothing until the gate opens.
fn holding(options: ServerOptions) -> Bench {
    let acts = vec![Act::Step(byte_tokens("ab")), Act::Hold, Act::Step(byte_tokens("c"))];
    Bench::with(options, engine::facts(), Arc::new(move |_, _| acts.clone()))
}

fn json_in(answer: &str) -> Value {
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error} in {answer}"))
}

fn status(answer: &str) -> u16 {
    answer[9..12].parse().unwrap()
}

async fn look(address: SocketAddr, path: &str) -> Value {
    json_in(&exchange(address, get(path)).await)
}

fn asking(address: SocketAddr, path: &'static str, body: &Value, header: &str) -> JoinHandle<String> {
    let request = post(path, &body.to_string()).replacen("\r\n", &format!("\r\n{header}"), 1);
    tokio::spawn(exchange(address, request))
}

/// Looks until `done` holds.
async fn until(address: SocketAddr, path: &str, done: impl Fn(&Value) -> bool) -> Value {
    let start = Instant::now();
    loop {
        let seen = look(address, path).await;
        if done(&seen) {
            return seen;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{seen}");
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

fn states(slots: &Value) -> Vec<&str> {
    slots.as_array().unwrap().iter().map(|slot| slot["state"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn slots_show_who_runs_and_no_text() {
    let bench = holding(ServerOptions::default());
    let listening = bench.listen(ServerOptions::default()).await;
    let address = listening.address;
    assert_eq!(look(address, "/slots").await, json!([]));
    let body = with(plain_chat(), json!({"stream": true, "priority": 4, "max_tokens": 9}));
    let first = asking(address, CHAT, &body, "x-request-id: trace-1\r\n");
    until(address, "/slots", |slots| states(slots) == ["generating"]).await;
    bench.stage.pause();
    let second = asking(address, COMPLETIONS, &json!({"prompt": ["x", "yy"], "n": 2}), "");
    let slots = until(address, "/slots", |slots| states(slots) == ["generating", "waiting", "waiting"]).await;
    let slot = &slots[0];
    assert_eq!(slot["request_id"], "trace-1");
    assert!(slot["id"].as_str().unwrap().starts_with("chatcmpl-"), "{slot}");
    for (field, value) in [
        ("key", json!("anybody")),
        ("endpoint", json!(CHAT)),
        ("is_processing", json!(true)),
        ("stream", json!(true)),
        ("priority", json!(4)),
        ("choices", json!(1)),
        ("cached_tokens", json!(engine::CACHED_TOKENS)),
        ("generated_tokens", json!(2)),
        ("max_tokens", json!(9)),
        ("processed_tokens", slot["prompt_tokens"].clone()),
    ] {
        assert_eq!(slot[field], value, "{field} in {slot}");
    }
    assert!(slot["age_s"].as_f64().unwrap() >= slot["silent_s"].as_f64().unwrap());
    assert_eq!((&slots[1]["choices"], &slots[2]["generated_tokens"]), (&json!(2), &json!(0)));
    assert!(!slots.to_string().contains("Hi"), "no text of prompts: {slots}");
    bench.stage.go_on();
    bench.stage.open_gate();
    assert_eq!(status(&first.await.unwrap()), 200);
    assert_eq!(status(&second.await.unwrap()), 200);
    until(address, "/slots", |slots| states(slots).is_empty()).await;
}

#[tokio::test]
async fn a_request_is_aborted_by_its_owner_or_the_admin_and_by_nobody_else() {
    let options = || ServerOptions {
        api_keys: ApiKey::parse_file("alice sk-alice\nbob sk-bob").unwrap(),
        admin_key: Some("sk-root".into()),
        ..Default::default()
    };
    let bench = holding(options());
    let listening = bench.listen(options()).await;
    let address = listening.address;
    let abort = |key: &'static str, body: Value| async move {
        let answer =
            asking(address, "/abort_request", &body, &format!("x-api-key: {key}\r\n")).await.unwrap();
        (status(&answer), json_in(&answer))
    };
    let ask = |id: &str, stream: bool| {
        let body = with(plain_chat(), json!({"stream": stream}));
        asking(address, CHAT, &body, &format!("x-api-key: sk-alice\r\nx-request-id: {id}\r\n"))
    };
    let (streamed, plain, third) = (ask("one", true), ask("two", false), ask("three", false));
    let stage = Arc::clone(&bench.stage);
    tokio::task::spawn_blocking(move || stage.wait_requests(3)).await.unwrap();

    let (refused, error) = abort("sk-bob", json!({"rid": "one"})).await;
    assert_eq!((refused, &error["error"]["code"]), (404, &json!("request_not_found")));
    assert_eq!(abort("sk-bob", json!({"abort_all": true})).await, (200, json!({"aborted": []})));
    assert_eq!(abort("sk-alice", json!({"rid": "one"})).await.1["aborted"].as_array().unwrap().len(), 1);
    let answer = streamed.await.unwrap();
    assert!(answer.contains("\"code\":\"aborted\"") && answer.contains("data: [DONE]"), "{answer}");
    assert_eq!(abort("sk-root", json!({"request_id": "two"})).await.0, 200);
    let answer = plain.await.unwrap();
    assert_eq!(status(&answer), 409, "{answer}");
    assert!(answer.contains("aborted by admin"), "{answer}");
    assert_eq!(abort("sk-alice", json!({"abort_all": true})).await.1["aborted"].as_array().unwrap().len(), 1);
    assert_eq!(status(&third.await.unwrap()), 409);
    bench.stage.wait_cancelled(3);
    for wrong in [json!({}), json!({"rid": ""}), json!({"rid": 5}), json!({"abort_all": "yes"})] {
        assert_eq!(abort("sk-alice", wrong.clone()).await.0, 400, "{wrong}");
    }
}

#[tokio::test]
async fn a_request_whose_time_is_over_ends_where_it_is() {
    let bench = holding(ServerOptions::default());
    let limited = |body: Value| with(body, json!({"max_time_s": 0.05}));
    let reply = bench.post(CHAT, limited(plain_chat())).await.json();
    assert_eq!(reply["choices"][0]["message"]["content"], "ab");
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["usage"]["completion_tokens"], 2);
    let streamed = bench.post(CHAT, limited(with(plain_chat(), json!({"stream": true, "n": 2})))).await;
    assert_eq!(
        (streamed.joined(0, "/delta/content"), streamed.joined(1, "/delta/content")),
        ("ab".into(), "ab".into())
    );
    assert_eq!(streamed.joined(0, "/finish_reason"), "length");
    bench.stage.wait_cancelled(2);

    bench.stage.pause();
    let started = Instant::now();
    let reply = bench.post(CHAT, limited(plain_chat())).await;
    assert_eq!(reply.status, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(reply.error()["code"], "timeout");
    assert!(reply.error()["message"].as_str().unwrap().contains("while it waited"), "{}", reply.body);
    assert!(started.elapsed() < Duration::from_secs(5));
    bench.stage.go_on();
    bench.stage.wait_cancelled(3);
    let metrics = bench.get("/metrics").await.body;
    assert!(metrics.contains("reason=\"timeout\"} 2"), "{metrics}");
    for wrong in [json!(0), json!(-1), json!(1e9), json!("soon")] {
        let reply = bench.post(COMPLETIONS, json!({"prompt": "x", "max_time_s": wrong})).await;
        assert_eq!((reply.status, &reply.error()["param"]), (StatusCode::BAD_REQUEST, &json!("max_time_s")));
    }
}

#[tokio::test]
async fn the_servers_own_limits_hold_for_everybody() {
    let short = Duration::from_millis(50);
    let bench = holding(ServerOptions { request_timeout: Some(short), ..Default::default() });
    let reply = bench.post(CHAT, with(plain_chat(), json!({"max_time_s": 1000}))).await;
    assert_eq!(reply.json()["choices"][0]["finish_reason"], "length");

    let bench = holding(ServerOptions { queue_timeout: Some(short), ..Default::default() });
    bench.stage.pause();
    let reply = bench.post(CHAT, plain_chat()).await;
    assert_eq!(reply.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(reply.error()["code"], "queue_timeout");
    assert!(reply.header("retry-after").is_some());
    bench.stage.go_on();
    bench.stage.wait_cancelled(1);
    // What runs is not touched by it.
    let running = tokio::spawn(bench.router.clone().oneshot_post(CHAT, plain_chat()));
    tokio::time::sleep(2 * short).await;
    bench.stage.open_gate();
    assert_eq!(running.await.unwrap(), StatusCode::OK);
}

/// A request on a router of its own.
trait OneshotPost {
    fn oneshot_post(self, path: &str, body: Value) -> impl Future<Output = StatusCode> + Send + 'static;
}

impl OneshotPost for axum::Router {
    fn oneshot_post(self, path: &str, body: Value) -> impl Future<Output = StatusCode> + Send + 'static {
        let request = axum::http::Request::post(path).header("content-type", "application/json");
        let request = request.body(axum::body::Body::from(body.to_string())).unwrap();
        async move { tower::ServiceExt::oneshot(self, request).await.unwrap().status() }
    }
}

#[tokio::test]
async fn a_full_queue_says_when_a_place_should_be_free() {
    let bench = Bench::saying("ok");
    bench.stage.pause();
    let overflow = json!({"prompt": [[1], [2], [3], [4], [5]]});
    let mut waits = Vec::new();
    for _ in 0..3 {
        let started = Instant::now();
        let reply = bench.post(COMPLETIONS, overflow.clone()).await;
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
        assert_eq!(reply.error()["code"], "queue_full", "{}", reply.body);
        let wait: u64 = reply.header("retry-after").unwrap().parse().unwrap();
        let message = reply.error()["message"].as_str().unwrap().to_owned();
        assert!(message.contains("queue holds 4") && message.contains(&format!("in {wait} s")), "{message}");
        waits.push(wait);
        // Those of the refused request that had a place leave it.
        bench.stage.go_on();
        bench.stage.wait("an empty queue", |_| bench.engine.load().snapshot().waiting == 0);
        bench.stage.pause();
    }
    assert!(waits.is_sorted() && waits[0] >= 1, "whoever comes later is told to come later: {waits:?}");
}

#[tokio::test]
async fn a_stuck_engine_ends_its_requests_and_is_told_of() {
    let (lines, _guard) = capture();
    let options = || ServerOptions { stall_timeout: Duration::from_millis(100), ..Default::default() };
    let bench = holding(options());
    let listening = bench.listen(options()).await;
    let address = listening.address;
    bench.engine.load().step_begins(StepKind::Round, 3);
    let streamed =
        asking(address, CHAT, &with(plain_chat(), json!({"stream": true})), "x-request-id: stuck\r\n");
    let answer = streamed.await.unwrap();
    assert!(answer.contains("engine_stalled") && answer.contains("data: [DONE]"), "{answer}");
    // The engine would go on with nobody listening; here it is made to look stuck.
    bench.stage.wait_cancelled(1);
    bench.engine.load().running.store(1, Ordering::SeqCst);
    let health = until(address, "/health", |health| health["can_generate"] == false).await;
    assert!(health["reason"].as_str().unwrap().contains("no step for"), "{health}");
    assert!(health["stalled_since_unix_s"].as_u64().is_some_and(|since| since > 1_700_000_000), "{health}");
    assert_eq!(status(&exchange(address, get("/ping")).await), 503);
    let refused = until_stalled(address).await;
    assert!(
        refused.contains("engine_stalled") && refused.to_lowercase().contains("retry-after"),
        "{refused}"
    );

    let logged = lines.take();
    let told: Vec<&Value> = logged.iter().filter(|line| line["level"] == "ERROR").collect();
    assert!(told[0]["message"].as_str().unwrap().contains("stuck"), "{told:?}");
    assert_eq!((&told[0]["step"], &told[0]["running"]), (&json!("round of 3"), &json!(1)));
    assert_eq!((&told[1]["request"], &told[1]["state"]), (&json!("stuck"), &json!("generating")), "{told:?}");
    assert!(!logged.iter().any(|line| line.to_string().contains("\"Hi\"")));

    bench.engine.load().running.store(0, Ordering::SeqCst);
    bench.engine.load().step_done();
    until(address, "/health", |health| health["can_generate"] == true).await;
    bench.stage.open_gate();
    let start = Instant::now();
    while status(&exchange(address, post(CHAT, &plain_chat().to_string())).await) != 200 {
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    let metrics = exchange(address, get("/metrics")).await;
    assert!(metric(&metrics, "qwill_stalls_total ") >= 1.0, "{metrics}");
}

#[tokio::test]
async fn a_server_that_is_told_to_ends_when_its_engine_is_stuck() {
    let options = || ServerOptions {
        stall_timeout: Duration::from_millis(50),
        exit_on_failure: true,
        ..Default::default()
    };
    let bench = holding(options());
    let listening = bench.listen(options()).await;
    let answer = asking(listening.address, CHAT, &plain_chat(), "").await.unwrap();
    assert!(answer.contains("engine_stalled"), "who was served is told: {answer}");
    bench.stage.wait_cancelled(1);
    // The engine would go on with nobody listening; here it is made to look stuck.
    bench.engine.load().running.store(1, Ordering::SeqCst);
    let ended =
        timeout(Duration::from_secs(20), listening.task).await.expect("the server does not end").unwrap();
    let error = ended.expect_err("it ends with an error").to_string();
    assert!(error.contains("the engine is stuck"), "{error}");
}

/// Asks until the server refuses.
async fn until_stalled(address: SocketAddr) -> String {
    loop {
        let answer = exchange(address, post(COMPLETIONS, r#"{"prompt":"x","max_tokens":1}"#)).await;
        if status(&answer) == 503 {
            return answer;
        }
    }
}

#[tokio::test]
async fn health_generate_really_generates() {
    let bench = Bench::saying("ok");
    let before = bench.stage.requests.lock().unwrap().len();
    let reply = bench.get("/health_generate").await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    let request = bench.stage.last_request();
    assert_eq!((request.sampling.max_tokens, request.priority, request.prompt.len()), (1, i32::MIN, 1));
    for _ in 0..10 {
        bench.get("/health_generate").await;
    }
    assert_eq!(bench.stage.requests.lock().unwrap().len(), before + 1, "one token proves it for a while");

    let failing = Bench::new(Arc::new(|_, _| vec![Act::Fail("NaN in the logits")]));
    let reply = failing.get("/health_generate").await;
    assert_eq!(reply.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        (&reply.json()["can_generate"], &reply.json()["reason"]),
        (&json!(false), &json!("NaN in the logits"))
    );
    assert_eq!(failing.get("/health").await.status, StatusCode::OK, "only asking shows it");
}

#[tokio::test]
async fn the_admin_empties_the_cache() {
    let options = ServerOptions { admin_key: Some("sk-root".into()), ..Default::default() };
    let bench = Bench::with(options, engine::facts(), one_by_one(tokens("ok")));
    let flush = |key: &str| {
        axum::http::Request::post("/flush_cache")
            .header("x-api-key", key)
            .body(axum::body::Body::empty())
            .unwrap()
    };
    let reply = bench.send(flush("anything")).await;
    assert_eq!((reply.status, &reply.error()["code"]), (StatusCode::FORBIDDEN, &json!("admin_key_needed")));
    assert_eq!(bench.stage.flushes.load(Ordering::SeqCst), 0);
    let reply = bench.send(flush("sk-root")).await;
    assert_eq!((reply.status, reply.json()), (StatusCode::OK, json!({"flushed": true})));
    assert_eq!(bench.stage.flushes.load(Ordering::SeqCst), 1);
    let none = Bench::saying("ok").send(flush("sk-root")).await;
    assert_eq!(none.status, StatusCode::FORBIDDEN);
    assert!(none.error()["message"].as_str().unwrap().contains("--admin-key"));
}

#[tokio::test]
async fn the_server_tells_what_it_is_in_the_words_of_others() {
    let bench = Bench::saying("ok");
    bench.post(CHAT, plain_chat()).await;
    let facts = |path: &'static str| async { bench.get(path).await.json() };
    let props = facts("/props").await;
    assert_eq!(props["default_generation_settings"]["n_ctx"], 256);
    assert_eq!((&props["total_slots"], &props["model_alias"]), (&json!(4), &json!("tiny")));
    assert!(props["chat_template"].as_str().unwrap().contains("<|im_start|>"));
    assert_eq!(props["eos_token"], "<|im_end|>");
    assert_eq!(props["modalities"]["vision"], false);
    for path in ["/server_info", "/get_server_info"] {
        let info = facts(path).await;
        assert_eq!((&info["context_length"], &info["max_running_requests"]), (&json!(256), &json!(4)));
        assert_eq!((&info["page_size"], &info["max_total_num_tokens"]), (&json!(64), &json!(1024)));
        assert_eq!((&info["status"], &info["version"]), (&json!("ready"), &json!(env!("CARGO_PKG_VERSION"))));
    }
    for path in ["/model_info", "/get_model_info"] {
        assert_eq!(
            (&facts(path).await["model_path"], &facts(path).await["is_generation"]),
            (&json!("tiny"), &json!(true))
        );
    }
    let tokenizer = facts("/tokenizer_info").await;
    assert_eq!((&tokenizer["eos_token"], &tokenizer["vocab_size"]), (&json!("<|im_end|>"), &json!(8192)));
    bench.stage.wait("idle", |stage| stage.ended.load(Ordering::SeqCst) == 1);
    let loads = facts("/v1/loads").await;
    assert_eq!(
        (&loads["loads"][0]["num_running_reqs"], &loads["aggregate"]["total_reqs"]),
        (&json!(0), &json!(0))
    );
    assert!(loads["loads"][0]["cache_hit_rate"].as_f64().unwrap() > 0.0, "{loads}");
    assert_eq!(facts("/get_load").await[0]["num_reqs"], 0);
    assert_eq!(facts("/load").await["server_load"], 0);
    assert_eq!(bench.get("/ping").await.status, StatusCode::OK);
    assert_eq!(facts("/version").await["numerics"], "f32 scripted");
}

#[tokio::test]
async fn prompts_are_logged_only_where_somebody_asked_for_it() {
    let (lines, _guard) = capture();
    let bench = Bench::saying("one two");
    bench.post(CHAT, plain_chat()).await;
    assert_eq!(lines.take().len(), 1);
    let options = ServerOptions { log_prompts: true, ..Default::default() };
    let bench = Bench::with(options, engine::facts(), one_by_one(tokens("one two")));
    bench.post(CHAT, plain_chat()).await;
    let logged = lines.take();
    let text = |message: &str| {
        let line = logged.iter().find(|line| line["message"] == message).unwrap();
        line["text"].as_str().unwrap().to_owned()
    };
    assert!(text("prompt").contains("<|im_start|>user\nHi<|im_end|>"), "{logged:?}");
    assert_eq!(text("answer"), "one two");
}
