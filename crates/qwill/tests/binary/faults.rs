//! A device that fails in mid-serving: whoever it hits gets an error, `/health` says so, and the end has a code.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{PATIENCE, Running};

/// An answer that is still running when the device fails.
pub(crate) fn long_answer() -> Value {
    json!({"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true, "temperature": 0, "stream": true})
}

/// Streams an answer in which the device fails for good, and checks everything after that.
pub(crate) fn ends_in_failure(server: Running, words: &str) {
    let events: Vec<String> = server.stream("/v1/completions", &long_answer()).collect();
    assert_eq!(events.last().unwrap(), "[DONE]");
    let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert!(last["error"]["message"].as_str().unwrap().contains(words), "{last}");

    // The request is told first; then the engine finds out whether the device still works.
    let deadline = Instant::now() + PATIENCE;
    while server.get("/health").0 == 200 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let (status, health) = server.get("/health");
    let health: Value = serde_json::from_str(&health).unwrap();
    assert_eq!(status, 503, "{health}");
    assert_eq!(
        (&health["state"], &health["live"], &health["can_generate"]),
        (&json!("failed"), &json!(false), &json!(false))
    );
    let reason = health["reason"].as_str().unwrap();
    assert!(reason.contains(words) && reason.contains("restart"), "{reason}");
    for path in ["/health/live", "/health/ready"] {
        assert_eq!(server.get(path).0, 503, "{path}");
    }
    let (status, body) = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
    assert_eq!((status, &body["error"]["code"]), (503, &json!("engine_failed")), "{body}");

    server.signal("TERM");
    let (status, log) = server.wait();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("the engine has failed"), "{log}");
}

#[test]
fn a_lost_device_makes_the_server_unhealthy_and_its_end_a_failure() {
    ends_in_failure(Running::start(&["--fault", "lost:20"]), "step 20");
}

#[test]
fn a_server_that_is_told_to_ends_with_its_device() {
    let server = Running::start(&["--fault", "lost:20", "--exit-on-failure"]);
    let events: Vec<String> = server.stream("/v1/completions", &long_answer()).collect();
    let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert!(last["error"]["message"].as_str().unwrap().contains("step 20"), "who was served is told: {last}");
    let (status, log) = server.wait();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("error: the engine has failed") && log.contains("step 20"), "{log}");
}

#[test]
fn a_panic_makes_the_server_unhealthy_and_its_end_a_failure() {
    ends_in_failure(Running::start(&["--fault", "panic:20"]), "--fault panic:20");
}

#[test]
fn a_step_that_fails_once_costs_its_requests_and_nothing_else() {
    let server = Running::start(&["--fault", "once:20"]);
    let events: Vec<String> = server.stream("/v1/completions", &long_answer()).collect();
    let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert!(last["error"]["message"].as_str().unwrap().contains("step 20"), "{last}");
    assert_eq!(server.get("/health").0, 200);
    let again: Vec<String> = server.stream("/v1/completions", &long_answer()).collect();
    let last: Value = serde_json::from_str(&again[again.len() - 2]).unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length", "{last}");
    server.signal("TERM");
    let (status, log) = server.wait();
    assert!(status.success(), "{log}");
    assert!(log.contains("--fault once:20"), "{log}");
}
