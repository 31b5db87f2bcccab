//! Who may do what, and how much of it.

use axum::body::Body;
use axum::http::{Request, StatusCode};
use qwill_server::{ApiKey, ServerOptions};
use serde_json::{Value, json};

use crate::client::{Bench, CHAT, COMPLETIONS, Reply, one_by_one, plain_chat, tokens, with};
use crate::engine;
use crate::logging::capture;

fn keyed(file: &str) -> Bench {
    let options = ServerOptions {
        api_keys: ApiKey::parse_file(file).unwrap(),
        admin_key: Some("sk-root".into()),
        ..Default::default()
    };
    Bench::with(options, engine::facts(), one_by_one(tokens("one two three")))
}

async fn ask(bench: &Bench, key: &str, path: &str, body: Value) -> Reply {
    let request = Request::post(path).header("content-type", "application/json").header("x-api-key", key);
    bench.send(request.body(Body::from(body.to_string())).unwrap()).await
}

async fn metrics(bench: &Bench) -> String {
    let request = Request::get("/metrics").header("x-api-key", "sk-root").body(Body::empty()).unwrap();
    bench.send(request).await.body
}

#[tokio::test]
async fn requests_and_tokens_are_counted_by_name_and_no_key_is_shown() {
    let bench = keyed("alice sk-alice\nsk-nameless\n");
    let used = ask(&bench, "sk-alice", CHAT, plain_chat()).await.json()["usage"].clone();
    ask(&bench, "sk-alice", CHAT, plain_chat()).await;
    ask(&bench, "sk-nameless", COMPLETIONS, json!({"prompt": "x", "max_tokens": 2})).await;
    ask(&bench, "sk-root", COMPLETIONS, json!({"prompt": "x", "max_tokens": 2})).await;
    let text = metrics(&bench).await;
    for (name, key, value) in [
        ("requests", "alice", json!(2)),
        ("prompt_tokens", "alice", json!(2 * used["prompt_tokens"].as_u64().unwrap())),
        ("generated_tokens", "alice", json!(2 * used["completion_tokens"].as_u64().unwrap())),
        ("requests", "key-2", json!(1)),
        ("generated_tokens", "key-2", json!(2)),
        ("requests", "admin", json!(1)),
    ] {
        let line = format!("qwill_key_{name}_total{{key=\"{key}\"}} {value}");
        assert!(text.contains(&line), "{line} in\n{text}");
    }
    assert!(!text.contains("sk-"), "{text}");
}

#[tokio::test]
async fn the_log_names_the_holder_and_no_key() {
    let (lines, _guard) = capture();
    let bench = keyed("alice sk-alice\n");
    ask(&bench, "sk-alice", CHAT, plain_chat()).await;
    ask(&bench, "sk-wrong", CHAT, plain_chat()).await;
    ask(&bench, "sk-alice", "/flush_cache", json!({})).await;
    ask(&bench, "sk-root", "/abort_request", json!({"abort_all": true})).await;
    let logged = lines.take();
    assert_eq!(logged[0]["key"], "alice", "{logged:?}");
    assert!(logged.iter().any(|line| line["by"] == "admin"), "{logged:?}");
    assert!(logged.iter().all(|line| !line.to_string().contains("sk-")), "{logged:?}");
}

#[tokio::test]
async fn failed_requests_are_shown_to_whom_they_belong() {
    let bench = keyed("alice sk-alice\nbob sk-bob\n");
    for (key, field) in [("sk-alice", "top_p"), ("sk-bob", "min_p"), ("sk-alice", "temperature")] {
        assert_eq!(ask(&bench, key, CHAT, with(plain_chat(), json!({field: 7}))).await.status, 400);
    }
    for (key, fields) in [
        ("sk-alice", vec!["temperature", "top_p"]),
        ("sk-bob", vec!["min_p"]),
        ("sk-root", vec!["temperature", "min_p", "top_p"]),
    ] {
        let request = Request::get("/v1/status").header("authorization", format!("Bearer {key}"));
        let status = bench.send(request.body(Body::empty()).unwrap()).await.json();
        let messages: Vec<&str> = status["errors"]
            .as_array()
            .unwrap()
            .iter()
            .map(|error| error["message"].as_str().unwrap())
            .collect();
        assert_eq!(messages.len(), fields.len(), "{messages:?}");
        assert!(messages.iter().zip(fields).all(|(message, field)| message.contains(field)), "{messages:?}");
    }
}

#[tokio::test]
async fn a_rate_is_a_429_that_says_when_and_others_are_not_held_up() {
    let bench = keyed("alice sk-alice requests/min=2\nbob sk-bob tokens/min=10\ncarol sk-carol\n");
    let first = ask(&bench, "sk-alice", CHAT, plain_chat()).await;
    assert_eq!(first.status, StatusCode::OK);
    assert_eq!(first.header("x-ratelimit-limit-requests"), Some("2"));
    assert_eq!(first.header("x-ratelimit-remaining-requests"), Some("1"));
    assert_eq!(first.header("x-ratelimit-limit-tokens"), None);
    ask(&bench, "sk-alice", CHAT, plain_chat()).await;
    let refused = ask(&bench, "sk-alice", CHAT, plain_chat()).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS, "{}", refused.body);
    assert_eq!(refused.error()["type"], "rate_limit_error");
    assert_eq!(refused.error()["code"], "rate_limit_exceeded");
    assert_eq!(refused.header("x-ratelimit-remaining-requests"), Some("0"));
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((29..=30).contains(&wait), "one request comes back every 30 s: {wait}");
    assert!(refused.error()["message"].as_str().unwrap().contains("2 requests a minute"));

    // The prompt is longer than what a minute allows: it is taken once, and paid for later.
    let body = json!({"prompt": "one two three four ".repeat(5), "max_tokens": 2});
    assert_eq!(ask(&bench, "sk-bob", COMPLETIONS, body.clone()).await.status, StatusCode::OK);
    let refused = ask(&bench, "sk-bob", COMPLETIONS, body.clone()).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.header("x-ratelimit-remaining-tokens"), Some("0"));
    assert!(refused.header("retry-after").unwrap().parse::<u64>().unwrap() > 1);
    let models = Request::get("/v1/models").header("x-api-key", "sk-bob").body(Body::empty()).unwrap();
    assert_eq!(bench.send(models).await.status, StatusCode::OK, "only generating is limited");
    for key in ["sk-carol", "sk-root"] {
        let reply = ask(&bench, key, COMPLETIONS, body.clone()).await;
        assert_eq!(reply.status, StatusCode::OK);
        assert!(reply.headers.keys().all(|name| !name.as_str().starts_with("x-ratelimit")));
    }
    assert_eq!(bench.stage.requests.lock().unwrap().len(), 5, "what is refused never reaches the engine");
}

#[tokio::test]
async fn named_origins_may_use_the_server() {
    let options = ServerOptions { cors_origins: vec!["https://chat.example".into()], ..Default::default() };
    let bench = Bench::with(options, engine::facts(), one_by_one(tokens("ok")));
    let preflight = |origin: &str| {
        Request::options(CHAT)
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,x-stainless-os")
            .body(Body::empty())
            .unwrap()
    };
    let good = bench.send(preflight("https://chat.example")).await;
    assert_eq!(good.status, StatusCode::NO_CONTENT);
    assert_eq!(good.header("access-control-allow-origin"), Some("https://chat.example"));
    assert_eq!(good.header("access-control-allow-headers"), Some("authorization,x-stainless-os"));
    for origin in ["http://localhost:5173", "https://chat.example.evil", "null"] {
        let reply = bench.send(preflight(origin)).await;
        assert_eq!(reply.header("access-control-allow-origin"), None, "{origin}");
        assert_eq!(reply.header("access-control-allow-headers"), None, "{origin}");
    }
}

#[tokio::test]
async fn keys_are_exchanged_while_the_server_runs() {
    let bench = keyed("alice sk-old\n");
    let options = ServerOptions { api_keys: vec!["sk-old".into()], ..Default::default() };
    let options = ServerOptions { bind: ([127, 0, 0, 1], 0).into(), ..options };
    let server = qwill_server::Server::bind(options, bench.engine.clone(), bench.text.clone()).await.unwrap();
    let (ring, address) = (server.key_ring(), server.local_addr());
    let task = tokio::spawn(server.run(std::future::pending()));
    let status = |key: &'static str| async move {
        let request =
            format!("GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-api-key: {key}\r\n\r\n");
        crate::sockets::exchange(address, request).await[9..12].to_owned()
    };
    assert_eq!((status("sk-old").await, status("sk-new").await), ("200".into(), "401".into()));
    ring.replace(&["sk-new".into()]).unwrap();
    assert_eq!((status("sk-old").await, status("sk-new").await), ("401".into(), "200".into()));
    assert!(ring.replace(&[]).is_err() && ring.replace(&[" ".into()]).is_err());
    assert_eq!((status("").await, status("sk-new").await), ("401".into(), "200".into()));
    task.abort();
}

#[tokio::test]
async fn a_priority_is_passed_on() {
    let bench = Bench::saying("ok");
    for (given, passed) in [(json!(null), 0), (json!(-3), -3), (json!(2_147_483_647), i32::MAX)] {
        bench.post(COMPLETIONS, json!({"prompt": "x", "priority": given})).await;
        assert_eq!(bench.stage.last_request().priority, passed);
    }
    for wrong in [json!(2_147_483_648_i64), json!("high"), json!(1.5)] {
        let reply = bench.post(COMPLETIONS, json!({"prompt": "x", "priority": wrong})).await;
        assert_eq!((reply.status, &reply.error()["param"]), (StatusCode::BAD_REQUEST, &json!("priority")));
    }
}
