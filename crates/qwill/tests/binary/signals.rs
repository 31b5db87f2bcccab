//! The end: what runs may finish, and nothing is left behind.

use serde_json::{Value, json};

use crate::harness::Running;

/// An answer long enough to be still running when the signal arrives.
fn long_answer() -> Value {
    json!({"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true, "temperature": 0, "stream": true})
}

#[test]
fn a_running_answer_is_finished_after_sigterm() {
    let server = Running::start(&[]);
    let mut events = server.stream("/v1/completions", &long_answer());
    events.next().unwrap();
    server.signal("TERM");
    let rest: Vec<String> = events.collect();
    assert_eq!(rest.last().unwrap(), "[DONE]");
    let last: Value = serde_json::from_str(&rest[rest.len() - 2]).unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length", "{last}");
    let (status, log) = server.wait();
    assert!(status.success(), "{status}\n{log}");
    assert!(log.contains("shutting down"), "{log}");
}

#[test]
fn an_idle_server_ends_at_once_on_either_signal() {
    for signal in ["TERM", "INT"] {
        let server = Running::start(&[]);
        let started = std::time::Instant::now();
        server.signal(signal);
        let (status, log) = server.wait();
        assert!(status.success(), "{status}\n{log}");
        assert!(started.elapsed().as_secs() < 10, "{signal}: {:?}", started.elapsed());
    }
}

#[test]
fn the_time_to_drain_is_bounded() {
    let server = Running::start(&["--drain-timeout", "0"]);
    let request =
        json!({"prompt": "Once upon a time", "max_tokens": 20_000, "ignore_eos": true, "stream": true});
    let mut events = server.stream("/v1/completions", &request);
    events.next().unwrap();
    server.signal("TERM");
    let rest: Vec<String> = events.collect();
    assert!(rest.len() < 20_000);
    let (status, log) = server.wait();
    assert!(status.success(), "{status}\n{log}");
}

#[test]
fn a_second_signal_ends_at_once() {
    let server = Running::start(&[]);
    let request =
        json!({"prompt": "Once upon a time", "max_tokens": 20_000, "ignore_eos": true, "stream": true});
    let mut events = server.stream("/v1/completions", &request);
    events.next().unwrap();
    server.signal("TERM");
    // The first signal must be taken before the second comes, or they are one; a refused request shows it.
    while server.get("/health").0 == 200 {}
    server.signal("TERM");
    let (status, log) = server.wait();
    assert_eq!(status.code(), Some(130), "{log}");
    assert!(log.contains("second signal"), "{log}");
}
