//! What surrounds every request: keys, ids, origins, counting; and the small endpoints.

use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use qwill_server::ServerOptions;
use serde_json::json;

use crate::client::{Bench, CHAT, COMPLETIONS, one_by_one, plain_chat, tokens, with};
use crate::engine;

#[tokio::test]
async fn keys_guard_everything_but_health_and_the_page() {
    let options = ServerOptions { api_keys: vec!["s3cret".into(), "other".into()], ..Default::default() };
    let bench = Bench::with(options, engine::facts(), one_by_one(tokens("ok")));
    let routes = [
        (Method::POST, CHAT, false),
        (Method::POST, COMPLETIONS, false),
        (Method::POST, "/tokenize", false),
        (Method::POST, "/detokenize", false),
        (Method::GET, "/v1/models", false),
        (Method::GET, "/v1/models/tiny", false),
        (Method::GET, "/metrics", false),
        (Method::GET, "/slots", false),
        (Method::GET, "/props", false),
        (Method::GET, "/server_info", false),
        (Method::GET, "/model_info", false),
        (Method::GET, "/tokenizer_info", false),
        (Method::GET, "/v1/loads", false),
        (Method::GET, "/load", false),
        (Method::POST, "/abort_request", false),
        (Method::GET, "/no/such/route", false),
        (Method::GET, "/health", true),
        (Method::GET, "/health/live", true),
        (Method::GET, "/health/ready", true),
        (Method::GET, "/ping", true),
        (Method::GET, "/health_generate", true),
        (Method::GET, "/version", true),
        (Method::GET, "/v1/status", false),
        (Method::GET, "/", true),
        (Method::GET, "/status", true),
        (Method::GET, "/page/chat.js", true),
        (Method::GET, "/page/nothing.js", true),
    ];
    let headers = [
        (None, false),
        (Some(("authorization", "Bearer wrong")), false),
        (Some(("authorization", "Bearer ")), false),
        (Some(("authorization", "Bearer s3cre")), false),
        (Some(("authorization", "Bearer S3CRET")), false),
        (Some(("authorization", "Basic s3cret")), false),
        (Some(("authorization", "s3cret")), false),
        (Some(("x-api-key", "wrong")), false),
        (Some(("authorization", "Bearer s3cret")), true),
        (Some(("authorization", "bearer other")), true),
        (Some(("x-api-key", "s3cret")), true),
        (Some(("x-api-key", "other")), true),
    ];
    for (method, path, open) in &routes {
        for (header, good) in &headers {
            let mut request = Request::builder().method(method.clone()).uri(*path);
            if let Some((name, value)) = header {
                request = request.header(*name, *value);
            }
            let request = request.header("content-type", "application/json");
            let reply = bench.send(request.body(Body::from("{}")).unwrap()).await;
            let denied = reply.status == StatusCode::UNAUTHORIZED;
            assert_eq!(denied, !open && !good, "{method} {path} {header:?}: {}", reply.status);
            if denied {
                assert_eq!(reply.error()["type"], "authentication_error");
                assert_eq!(reply.error()["code"], "invalid_api_key");
                assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
                assert!(!reply.body.contains("s3cret"));
            }
        }
    }
    let requests = bench.stage.requests.lock().unwrap();
    assert!(
        requests.iter().all(|request| request.id == "health"),
        "only /health_generate reaches the engine"
    );
}

#[tokio::test]
async fn every_answer_has_a_request_id() {
    let bench = Bench::saying("ok");
    let sent =
        |value: &str| Request::get("/health").header("x-request-id", value).body(Body::empty()).unwrap();
    assert_eq!(bench.send(sent("trace-1")).await.header("x-request-id"), Some("trace-1"));
    for insane in ["x".repeat(129), String::new(), "a\tb".into()] {
        let id = bench.send(sent(&insane)).await.header("x-request-id").unwrap().to_owned();
        assert!(id.starts_with("req-") && id.len() == 36, "{id}");
    }
    for path in ["/", "/nowhere", "/v1/models", "/metrics"] {
        assert!(bench.get(path).await.header("x-request-id").is_some(), "{path}");
    }
    let failed = bench.post(CHAT, json!({})).await;
    assert!(failed.header("x-request-id").is_some());
}

#[tokio::test]
async fn pages_of_this_machine_may_use_the_server_and_no_others() {
    let bench = Bench::saying("ok");
    let preflight = |origin: &str| {
        Request::options(CHAT)
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .body(Body::empty())
            .unwrap()
    };
    let good = bench.send(preflight("http://localhost:5173")).await;
    assert_eq!(good.status, StatusCode::NO_CONTENT);
    assert_eq!(good.header("allow"), Some("POST"), "of this path");
    assert_eq!(good.header("access-control-allow-origin"), Some("http://localhost:5173"));
    assert!(good.header("access-control-allow-headers").unwrap().contains("authorization"));
    let bad = bench.send(preflight("https://evil.example")).await;
    assert_eq!(bad.header("access-control-allow-origin"), None);
    let get = |origin: &str| Request::get("/v1/models").header("origin", origin).body(Body::empty()).unwrap();
    let good = bench.send(get("http://127.0.0.1:1")).await;
    assert_eq!(good.header("access-control-allow-origin"), Some("http://127.0.0.1:1"));
    assert_eq!(bench.send(get("null")).await.header("access-control-allow-origin"), None);
}

#[tokio::test]
async fn an_open_server_of_this_machine_answers_to_no_other_name() {
    let ask = |host: &'static str, uri: &'static str| {
        Request::get(uri).header("host", host).body(Body::empty()).unwrap()
    };
    let bench = Bench::saying("ok");
    for host in ["localhost:18020", "127.0.0.1", "[::1]:18020"] {
        assert_eq!(bench.send(ask(host, "/v1/models")).await.status, StatusCode::OK, "{host}");
    }
    // A page whose name was made to resolve to this machine is of that name's origin, whatever it asks for.
    for uri in ["/", "/v1/models", "/health", "/metrics", "/nowhere"] {
        let reply = bench.send(ask("rebound.example:18020", uri)).await;
        assert_eq!(reply.status, StatusCode::FORBIDDEN, "{uri}");
        assert_eq!(reply.error()["code"], "host_not_allowed");
        assert_eq!(reply.error()["type"], "permission_error");
        assert!(reply.error()["message"].as_str().unwrap().contains("rebound.example"), "{}", reply.body);
    }
    let absolute = ask("localhost", "http://rebound.example/v1/models");
    assert_eq!(bench.send(absolute).await.status, StatusCode::FORBIDDEN);
    let post =
        Request::post(CHAT).header("host", "rebound.example").header("content-type", "application/json");
    let reply = bench.send(post.body(Body::from(plain_chat().to_string())).unwrap()).await;
    assert_eq!(reply.status, StatusCode::FORBIDDEN);
    assert!(bench.stage.requests.lock().unwrap().is_empty(), "the engine saw nothing");

    let named = ServerOptions { allowed_hosts: vec!["rebound.example".into()], ..Default::default() };
    let keyed = ServerOptions { api_keys: vec!["k".into()], ..Default::default() };
    let wide = ServerOptions { bind: ([0, 0, 0, 0], 0).into(), allow_no_key: true, ..Default::default() };
    for (options, path, status) in
        [(named, "/v1/models", 200), (keyed, "/v1/models", 401), (wide, "/v1/models", 200)]
    {
        let bench = Bench::with(options, engine::facts(), one_by_one(tokens("ok")));
        assert_eq!(bench.send(ask("rebound.example:18020", path)).await.status, status);
    }
}

#[tokio::test]
async fn a_model_name_that_is_no_text_is_an_error_like_others() {
    let reply = Bench::saying("ok").get("/v1/models/%ff").await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert_eq!((&reply.error()["param"], &reply.error()["code"]), (&json!("model"), &json!("invalid_value")));
}

#[tokio::test]
async fn unknown_routes_and_methods_are_explained() {
    let bench = Bench::saying("ok");
    let reply = bench.get("/v1/nowhere").await;
    assert_eq!(reply.status, StatusCode::NOT_FOUND);
    assert!(reply.error()["message"].as_str().unwrap().contains("POST /v1/chat/completions"));
    for path in ["/v1/embeddings", "/v1/images/generations", "/v1/audio/speech"] {
        let reply = bench.post(path, json!({})).await;
        assert_eq!(reply.status, StatusCode::NOT_FOUND);
        assert!(reply.error()["message"].as_str().unwrap().contains("generates text"), "{}", reply.body);
    }
    for (method, path) in [(Method::GET, CHAT), (Method::DELETE, "/v1/models"), (Method::PUT, "/tokenize")] {
        let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
        let reply = bench.send(request).await;
        assert_eq!(reply.status, StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(reply.error()["code"], "method_not_allowed");
        assert!(reply.header("allow").is_some());
    }
}

#[tokio::test]
async fn models_are_listed_with_their_context() {
    let bench = Bench::saying("ok");
    let list = bench.get("/v1/models").await.json();
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|model| model["id"].clone()).collect();
    assert_eq!(ids, ["tiny", "team/alias"]);
    assert_eq!(list["models"], json!([]));
    let one = bench.get("/v1/models/team/alias").await.json();
    assert_eq!(one["id"], "team/alias");
    assert_eq!((&one["max_model_len"], &one["context_length"]), (&json!(256), &json!(256)));
    let none = bench.get("/v1/models/gpt-5").await;
    assert_eq!(none.status, StatusCode::NOT_FOUND);
    assert_eq!(none.error()["code"], "model_not_found");
}

#[tokio::test]
async fn a_ready_server_is_healthy() {
    let bench = Bench::saying("ok");
    let health = bench.get("/health").await;
    assert_eq!(health.status, StatusCode::OK);
    let body = health.json();
    assert_eq!(
        (&body["live"], &body["ready"], &body["can_generate"]),
        (&json!(true), &json!(true), &json!(true))
    );
    assert_eq!(body["state"], "ready");
    let version = bench.get("/version").await.json();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
}

#[tokio::test]
async fn the_pages_and_their_files_come_with_a_strict_policy() {
    let bench = Bench::saying("ok");
    for (path, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/status", "text/html; charset=utf-8"),
        ("/page/chat.js", "text/javascript; charset=utf-8"),
        ("/page/style.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ] {
        let file = bench.get(path).await;
        assert_eq!(file.status, StatusCode::OK, "{path}");
        assert_eq!(file.header("content-type"), Some(kind), "{path}");
        assert_eq!(file.header("x-content-type-options"), Some("nosniff"), "{path}");
        let policy = file.header("content-security-policy").unwrap();
        assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    }
    for path in ["/page/", "/page/none.js", "/page/%ff", "/page/..%2frouter.rs", "/status/"] {
        let missing = bench.get(path).await;
        assert_eq!(missing.status, StatusCode::NOT_FOUND, "{path}");
        assert_eq!(missing.error()["code"], "not_found", "{path}");
    }
}

#[tokio::test]
async fn the_status_tells_what_runs_what_was_done_and_what_failed() {
    let memory = vec![qwill_server::MemoryPart { section: "weights".into(), name: "all".into(), bytes: 7 }];
    let options = ServerOptions { memory, ..Default::default() };
    let bench = Bench::with(options, engine::facts(), one_by_one(tokens("one two three")));
    let status = bench.get("/v1/status").await;
    assert_eq!(status.status, StatusCode::OK);
    let before = status.json();
    assert_eq!(before["models"], json!(["tiny", "team/alias"]));
    assert_eq!(before["health"]["ready"], true);
    assert_eq!(before["requests"], json!({"running": 0, "waiting": 0, "max_running": 4, "max_waiting": 4}));
    assert_eq!(before["kv"], json!({"used": 0, "total": 16, "total_tokens": 1024}));
    assert_eq!(before["memory"], json!([{"section": "weights", "name": "all", "bytes": 7}]));
    assert_eq!(before["errors"], json!([]));
    assert_eq!(before["tokens"]["cached"], 0);

    bench.post(CHAT, plain_chat()).await;
    let secret = with(plain_chat(), json!({"temperature": "my secret"}));
    assert_eq!(bench.post(CHAT, secret).await.status, StatusCode::BAD_REQUEST);
    let after = bench.get("/v1/status").await;
    assert_eq!(after.json()["tokens"]["cached"], engine::CACHED_TOKENS);
    let errors = after.json()["errors"].clone();
    assert_eq!(errors.as_array().unwrap().len(), 1);
    assert_eq!((&errors[0]["endpoint"], &errors[0]["status"]), (&json!(CHAT), &json!(400)));
    assert!(errors[0]["message"].as_str().unwrap().contains("temperature"));
    assert!(errors[0]["request_id"].as_str().unwrap().starts_with("req-"));
    assert!(!after.body.contains("my secret"), "{}", after.body);
}

#[tokio::test]
async fn an_engine_without_progress_cannot_generate() {
    let options = ServerOptions { stall_timeout: std::time::Duration::from_millis(20), ..Default::default() };
    let bench = Bench::with(options, engine::facts(), one_by_one(Vec::new()));
    bench.engine.load().running.store(1, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(bench.get("/health").await.status, StatusCode::OK);
    tokio::time::sleep(std::time::Duration::from_millis(40)).await;
    let stalled = bench.get("/health").await;
    assert_eq!(stalled.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(stalled.json()["can_generate"], false);
    assert_eq!(stalled.json()["ready"], true);
    bench.engine.load().step_done();
    assert_eq!(bench.get("/health").await.status, StatusCode::OK);
}

/// The value of a metric line that begins with `name`.
pub(crate) fn metric(text: &str, name: &str) -> f64 {
    let line =
        text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in\n{text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn metrics_count_everything_once() {
    let bench = Bench::saying("one two three");
    for _ in 0..3 {
        bench.post(CHAT, plain_chat()).await;
    }
    bench.post(CHAT, with(plain_chat(), json!({"stream": true, "max_tokens": 1}))).await;
    bench.post(CHAT, with(plain_chat(), json!({"n": 0}))).await;
    bench.get("/v1/models").await;
    bench.get("/some/where").await;
    bench.stage.wait("idle", |stage| stage.ended.load(std::sync::atomic::Ordering::SeqCst) == 4);
    let reply = bench.get("/metrics").await;
    assert!(reply.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    let text = reply.body;
    let chat = r#"endpoint="/v1/chat/completions""#;
    assert_eq!(metric(&text, &format!("qwill_http_requests_total{{{chat},status=\"200\"}}")), 4.0);
    assert_eq!(metric(&text, &format!("qwill_http_requests_total{{{chat},status=\"400\"}}")), 1.0);
    assert_eq!(metric(&text, r#"qwill_http_requests_total{endpoint="other",status="404"}"#), 1.0);
    assert_eq!(metric(&text, &format!("qwill_requests_finished_total{{{chat},reason=\"stop\"}}")), 3.0);
    assert_eq!(metric(&text, &format!("qwill_requests_finished_total{{{chat},reason=\"length\"}}")), 1.0);
    assert_eq!(metric(&text, &format!("qwill_requests_finished_total{{{chat},reason=\"refused\"}}")), 1.0);
    let words = tokens("one two three").len() as f64;
    assert_eq!(metric(&text, "qwill_generated_tokens_total"), 3.0 * (words + 1.0) + 1.0);
    assert_eq!(metric(&text, "qwill_time_to_first_token_seconds_count"), 4.0);
    assert_eq!(metric(&text, "qwill_inter_token_seconds_count"), 3.0 * words);
    assert_eq!(metric(&text, "qwill_queue_seconds_count"), 4.0);
    assert_eq!(metric(&text, "qwill_cached_prompt_tokens_total"), 8.0);
    for (gauge, value) in [
        ("qwill_requests_running", 0.0),
        ("qwill_requests_waiting", 0.0),
        ("qwill_kv_pages_used", 0.0),
        ("qwill_kv_pages_total", 16.0),
        ("qwill_state_slots_total", 4.0),
        ("qwill_ready", 1.0),
    ] {
        assert_eq!(metric(&text, &format!("{gauge} ")), value, "{gauge}");
    }
    assert!(metric(&text, "qwill_uptime_seconds") > 0.0);
    assert!(text.contains("numerics=\"f32 scripted\""));
    // Every metric says what it is.
    for line in text.lines().filter(|line| line.starts_with("# TYPE ")) {
        let name = line.split(' ').nth(2).unwrap();
        assert!(text.contains(&format!("# HELP {name} ")), "{name} has no help");
    }
    assert!(text.contains("qwill_request_seconds_bucket"), "times are histograms");
}
