//! Several servers behind the SMG gateway (docs/scale-out.md): streams, conversations that stay where they are known,
//! a server that dies and one that is drained.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{self, PATIENCE, Running};

/// Conversations in the test of affinity: more than workers, so that each gets some.
const TALKS: usize = 4;
/// Rounds of new talks after which both servers have had some.
const MOST_ROUNDS: usize = 16;

/// The gateway in a process of its own; killed when dropped.
struct Gateway {
    child: Child,
    url: String,
}

impl Gateway {
    /// Starts it in front of these servers and waits until it takes all for ready; `None` where there is no gateway.
    fn start(policy: &str, workers: &[&str]) -> Option<Self> {
        let program = std::env::var_os("QWILL_SMG").map_or_else(|| PathBuf::from("smg"), PathBuf::from);
        let (port, metrics_port) = (free_port(), free_port());
        let spawned = Command::new(program)
            .args(["launch", "--host", "127.0.0.1", "--port", &port, "--prometheus-port", &metrics_port])
            .args(["--policy", policy, "--log-level", "warn", "--worker-urls"])
            .args(workers)
            .args(["--worker-startup-check-interval", "1"])
            .args(["--health-check-interval-secs", "1", "--health-success-threshold", "1"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = match spawned {
            Ok(child) => child,
            Err(_) if std::env::var_os("QWILL_SMG").is_none() => {
                eprintln!("skipped: no smg (`pip install smg`, or QWILL_SMG=/path/to/smg)");
                return None;
            }
            Err(error) => panic!("QWILL_SMG: {error}"),
        };
        let gateway = Self { child, url: format!("http://127.0.0.1:{port}") };
        gateway.wait_for(workers.len());
        Some(gateway)
    }

    /// Waits until so many servers are healthy.
    fn wait_for(&self, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let healthy = harness::try_get(&format!("{}/workers", self.url)).map_or(0, |workers| {
                let all = workers["workers"].as_array().cloned().unwrap_or_default();
                all.iter()
                    .filter(|worker| worker["is_healthy"] == true && worker["status"] == "ready")
                    .count()
            });
            if healthy == count {
                return;
            }
            thread::sleep(Duration::from_millis(100));
        }
        panic!("the gateway does not see {count} healthy servers");
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

/// A long system prompt that no other conversation begins with, and so many turns.
fn talk(number: usize, turns: usize) -> Value {
    let facts: Vec<String> =
        (0..16).map(|fact| format!("Fact {fact} of talk {number} is {}.", number * 16 + fact)).collect();
    let mut messages = vec![json!({"role": "system", "content": facts.join(" ")})];
    for turn in 0..turns {
        messages.push(json!({"role": "user", "content": format!("Question {turn} of talk {number}?")}));
        messages.push(json!({"role": "assistant", "content": "Yes."}));
    }
    messages.push(json!({"role": "user", "content": "And what is the capital of Denmark?"}));
    json!(messages)
}

fn request(messages: &Value, max_tokens: usize) -> Value {
    json!({
        "model": "tiny", "messages": messages, "max_tokens": max_tokens, "ignore_eos": true, "temperature": 0,
    })
}

/// What came of a stream.
#[derive(Debug, PartialEq)]
struct Streamed {
    text: String,
    finish: String,
    completion_tokens: u64,
}

/// Streams an answer to its end.
fn stream(url: &str, messages: &Value, max_tokens: usize) -> Streamed {
    let mut body = request(messages, max_tokens);
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let mut streamed = Streamed { text: String::new(), finish: String::new(), completion_tokens: 0 };
    let mut is_done = false;
    for data in harness::stream(&format!("{url}/v1/chat/completions"), &body) {
        if data == "[DONE]" {
            is_done = true;
            continue;
        }
        let chunk: Value = serde_json::from_str(&data).unwrap();
        assert!(chunk["error"].is_null(), "{chunk}");
        let choice = &chunk["choices"][0];
        streamed.text += choice["delta"]["content"].as_str().unwrap_or_default();
        streamed.finish += choice["finish_reason"].as_str().unwrap_or_default();
        streamed.completion_tokens =
            chunk["usage"]["completion_tokens"].as_u64().unwrap_or(streamed.completion_tokens);
    }
    assert!(is_done, "no [DONE] after {streamed:?}");
    streamed
}

/// All talks at once; what `ask` makes of each.
fn at_once<T: Send>(ask: impl Fn(usize) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let ask = &ask;
        let running: Vec<_> = (0..TALKS).map(|number| scope.spawn(move || ask(number))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn running(server: &Running) -> u64 {
    let (_, health) = server.get("/health");
    serde_json::from_str::<Value>(&health).unwrap()["running"].as_u64().unwrap()
}

/// Requests that a server has answered, by its own count.
fn answered(server: &Running) -> u64 {
    let (_, metrics) = server.get("/metrics");
    let lines = metrics.lines().filter(|line| line.contains("/v1/chat/completions") && line.contains("200"));
    let counts = lines.filter(|line| line.starts_with("qwill_http_requests_total"));
    counts.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as u64
}

#[test]
fn replicas_behind_a_gateway_are_one_server() {
    let first = Running::start(&["--memory", "700MiB"]);
    let second = Running::start(&["--memory", "700MiB"]);
    let Some(gateway) = Gateway::start("cache_aware", &[&first.url, &second.url]) else { return };
    let url = gateway.url.as_str();

    // Affinity: a second turn finds what the first one left, although every server has a cache of its own.
    let ask = |number: usize, turns: usize| {
        let (status, answer) =
            harness::post(&format!("{url}/v1/chat/completions"), &request(&talk(number, turns), 4));
        assert_eq!(status, 200, "{answer}");
        let tokens = |value: &Value| value.as_u64().unwrap();
        let usage = &answer["usage"];
        (tokens(&usage["prompt_tokens"]), tokens(&usage["prompt_tokens_details"]["cached_tokens"]))
    };
    let first_turns = at_once(|number| ask(number, 0));
    // Where new talks go is the gateway's choice, and of a few at once it may give all to one server.
    let counts = || [answered(&first), answered(&second)];
    let has_idle = || counts().contains(&0);
    (1..MOST_ROUNDS).take_while(|_| has_idle()).for_each(|round| {
        at_once(|number| ask(1000 * round + number, 0));
    });
    assert!(!has_idle(), "one server did all: {:?}", counts());
    let second_turns = at_once(|number| ask(number, 1));
    for (number, ((before, _), (_, cached))) in first_turns.iter().zip(&second_turns).enumerate() {
        assert!(cached * 10 >= before * 8, "talk {number}: {cached} of {before} tokens were found");
    }

    drop(gateway);

    // From here on both servers get some of every few requests.
    let gateway = Gateway::start("round_robin", &[&first.url, &second.url]).unwrap();
    let url = gateway.url.as_str();

    // Streams: the text is that of a server that is asked directly.
    let streams = |url: &str, talks_from: usize, max_tokens: usize| {
        at_once(|number| stream(url, &talk(talks_from + number, 0), max_tokens))
    };
    let expected = streams(&first.url, 0, 48);
    assert_eq!(streams(url, 0, 48), expected);
    assert!(expected.iter().all(|answer| answer.completion_tokens == 48 && answer.finish == "length"));

    // A server dies: whoever asks then is answered by the other one.
    let port = second.url.rsplit(':').next().unwrap().to_owned();
    second.signal("KILL");
    let (status, _) = second.wait();
    assert!(!status.success());
    assert_eq!(streams(url, 0, 48), expected);

    // It comes back and is used again.
    let second = Running::start(&["--memory", "700MiB", "--port", &port]);
    gateway.wait_for(2);

    // A server is drained: what it has begun ends whole, what comes then goes to the other one. New talks, so that both
    // servers get some.
    let (begun, meanwhile) = thread::scope(|scope| {
        let begun = scope.spawn(|| streams(url, 100, 96));
        let deadline = Instant::now() + PATIENCE;
        while running(&second) == 0 {
            assert!(Instant::now() < deadline, "the server that came back gets no work");
            thread::sleep(Duration::from_millis(5));
        }
        second.signal("TERM");
        let meanwhile = streams(url, 200, 48);
        (begun.join().unwrap(), meanwhile)
    });
    let (status, log) = second.wait();
    assert!(status.success(), "{log}");
    assert_eq!(begun, streams(&first.url, 100, 96));
    assert!(begun.iter().all(|answer| answer.completion_tokens == 96));
    assert_eq!(meanwhile, streams(&first.url, 200, 48));
}
