//! What operators rely on: keys that change, TLS, requests in hand, an engine that hangs.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::faults::long_answer;
use crate::harness::{PATIENCE, Running, root};

fn with_key(server: &Running, path: &str, key: &str) -> u16 {
    let config = ureq::Agent::config_builder().http_status_as_error(false);
    let agent: ureq::Agent = config.build().into();
    let request = agent.get(format!("{}{path}", server.url)).header("authorization", format!("Bearer {key}"));
    request.call().unwrap().status().as_u16()
}

/// Looks until `done` holds.
fn until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn keys_are_read_again_when_the_process_is_told_to() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "alice sk-alice requests/min=1000\n").unwrap();
    let server = Running::start(&["--api-keys-file", &file.path().display().to_string()]);
    assert_eq!((with_key(&server, "/slots", "sk-alice"), with_key(&server, "/slots", "sk-bob")), (200, 401));
    std::fs::write(file.path(), "bob sk-bob\n").unwrap();
    server.signal("HUP");
    until("bob's key", || with_key(&server, "/slots", "sk-bob") == 200);
    assert_eq!(with_key(&server, "/slots", "sk-alice"), 401);
    // A file that is wrong changes nothing.
    std::fs::write(file.path(), "a b c\n").unwrap();
    server.signal("HUP");
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(with_key(&server, "/slots", "sk-bob"), 200);
    server.signal("TERM");
    let (status, log) = server.wait();
    assert!(status.success(), "{log}");
    assert!(log.contains("read again") && log.contains("left as it was") && log.contains("line 1"), "{log}");
    assert!(!log.contains("sk-"), "{log}");
}

#[test]
fn tls_from_files() {
    let file = |name: &str| root().join("crates/server/tests/server/tls").join(name).display().to_string();
    let server = Running::start(&["--tls-cert", &file("localhost.crt"), "--tls-key", &file("localhost.key")]);
    assert!(
        server.url.starts_with("https://") && server.screen.contains("https://127.0.0.1"),
        "{}",
        server.screen
    );
    if Command::new("curl").arg("--version").output().is_err() {
        println!("skipped: no curl on this machine to speak TLS with");
        return;
    }
    let curl = |arguments: &[&str]| {
        let output =
            Command::new("curl").args(["--silent", "--max-time", "60"]).args(arguments).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let (certificate, health) = (file("localhost.crt"), format!("{}/health", server.url));
    let (good, body) = curl(&["--cacert", &certificate, &health]);
    assert!(good && body.contains("\"ready\":true"), "{body}");
    assert!(!curl(&[&health]).0, "nobody else vouches for it");
    server.signal("TERM");
    assert!(server.wait().0.success());
}

#[test]
fn a_step_that_hangs_is_noticed_told_of_and_survived() {
    let server = Running::start(&["--fault", "hang:20", "--stall-timeout", "1"]);
    let events: Vec<String> = server.stream("/v1/completions", &long_answer()).collect();
    assert_eq!(events.last().unwrap(), "[DONE]");
    let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert_eq!(last["error"]["code"], "engine_stalled", "{last}");
    let (status, health) = server.get("/health");
    let health: Value = serde_json::from_str(&health).unwrap();
    assert_eq!((status, &health["can_generate"]), (503, &json!(false)), "{health}");
    assert!(
        health["stalled_since_unix_s"].is_u64() && health["reason"].as_str().unwrap().contains("no step")
    );
    let (status, body) = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
    assert_eq!((status, &body["error"]["code"]), (503, &json!("engine_stalled")), "{body}");
    until("the engine to go on", || server.get("/health_generate").0 == 200);
    let (status, body) =
        server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2, "ignore_eos": true}));
    assert_eq!((status, &body["usage"]["completion_tokens"]), (200, &json!(2)), "{body}");
    assert_eq!(server.get("/slots").1, "[]");
    server.signal("TERM");
    let (status, log) = server.wait();
    assert!(status.success(), "{log}");
    for part in ["the engine is stuck", "round of 1", "in hand", "the engine goes on"] {
        assert!(log.contains(part), "{part} in {log}");
    }
}

#[test]
fn requests_in_hand_are_seen_and_ended() {
    let server = Running::start(&["--admin-key", "sk-root"]);
    let request =
        json!({"prompt": "Once upon a time", "max_tokens": 20_000, "ignore_eos": true, "stream": true});
    let mut events = server.stream("/v1/completions", &request);
    let first: Value = serde_json::from_str(&events.next().unwrap()).unwrap();
    let slots: Value = serde_json::from_str(&server.get("/slots").1).unwrap();
    assert_eq!(slots[0]["id"].as_str().unwrap(), format!("{}-0", first["id"].as_str().unwrap()));
    assert_eq!((&slots[0]["state"], &slots[0]["max_tokens"]), (&json!("generating"), &json!(20_000)));
    let (status, aborted) = server.post("/abort_request", &json!({"rid": first["id"]}));
    assert_eq!((status, &aborted["aborted"][0]), (200, &first["id"]));
    let rest: Vec<String> = events.collect();
    assert!(rest[rest.len() - 2].contains("\"aborted\"") && rest.len() < 20_000);
    until("free slots", || server.get("/metrics").1.contains("\nqwill_requests_running 0\n"));
    assert_eq!(server.post("/flush_cache", &json!({})).0, 403);
    assert_eq!(server.post("/abort_request", &json!({"rid": "none"})).0, 404);
}
