//! Many clients at once, most of them ill-behaved: nothing lost, nothing leaked, the same answers afterwards.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::Running;

const CLIENTS: usize = 64;
const REQUESTS: usize = 2_000;
const BODY_LIMIT_BYTES: usize = 1 << 20;
/// Allocator slack and lazily touched caches are not a leak; 2,000 requests that each kept a page would be 190 MB.
const GROWTH_LIMIT_BYTES: u64 = 24 << 20;

/// What a client does.
#[derive(Debug, Clone, Copy)]
enum Behaviour {
    ReadsTheStream,
    LeavesAfterEvents(usize),
    LeavesAtOnce,
    SendsGarbage,
    SendsTooMuch,
    AsksForTheImpossible,
}

/// `SplitMix64`: behaviours are random but the same in every run.
fn random(seed: u64) -> u64 {
    let mut bits = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

fn behaviour(request: usize) -> Behaviour {
    let draw = random(request as u64);
    match draw % 100 {
        0..55 => Behaviour::ReadsTheStream,
        55..75 => Behaviour::LeavesAfterEvents(draw as usize / 100 % 20),
        75..82 => Behaviour::LeavesAtOnce,
        82..90 => Behaviour::SendsGarbage,
        90..94 => Behaviour::SendsTooMuch,
        _ => Behaviour::AsksForTheImpossible,
    }
}

/// Twenty-four different requests: short and long prompts, greedy and drawn, with and without penalties.
fn request(kind: usize) -> Value {
    let questions = [
        "What is the capital of Denmark?",
        "Please work out 310 + 661.",
        "Write a Python function that reverses a string.",
        "Hvad hedder hovedstaden i Frankrig?",
        "Repeat: the quick brown fox jumps over the lazy dog, and then it sleeps.",
        "Name three colours.",
    ];
    let question = questions[kind % questions.len()];
    let long = if kind % 5 == 4 { "Read this first. ".repeat(40) } else { String::new() };
    json!({
        "messages": [{"role": "user", "content": format!("{long}{question}")}],
        "chat_template_kwargs": {"enable_thinking": kind.is_multiple_of(2)},
        "temperature": if kind.is_multiple_of(3) { 0.0 } else { 1.0 },
        "top_k": 20,
        "top_p": 0.95,
        "presence_penalty": if kind % 4 == 1 { 1.0 } else { 0.0 },
        "seed": kind,
        "max_tokens": 8 + kind % 24,
        "stream": true,
        "stream_options": {"include_usage": true},
    })
}

/// What a whole stream said: text of all deltas, and the tokens it reports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Answer {
    text: String,
    completion_tokens: u64,
    finish_reason: String,
}

impl Answer {
    fn add(&mut self, event: &Value) {
        assert!(event.get("error").is_none(), "{event}");
        if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
            self.completion_tokens = tokens;
        }
        for choice in event["choices"].as_array().into_iter().flatten() {
            for part in ["reasoning_content", "content"] {
                self.text.push_str(choice["delta"][part].as_str().unwrap_or_default());
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                assert!(self.finish_reason.is_empty(), "finished twice: {event}");
                reason.clone_into(&mut self.finish_reason);
            }
        }
    }
}

struct Client<'a> {
    address: &'a str,
    references: &'a [Answer],
}

impl Client<'_> {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_mins(2))).unwrap();
        stream
    }

    fn send(&self, body: &[u8], declared_bytes: usize) -> TcpStream {
        let mut stream = self.connect();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             connection: close\r\ncontent-length: {declared_bytes}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        // A server that refuses by the header alone may close before the body is through.
        let _ = stream.write_all(body);
        stream
    }

    fn status(stream: TcpStream) -> (u16, BufReader<TcpStream>) {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("not an answer: {line:?}")), reader)
    }

    fn expect(&self, request: usize, body: &[u8], declared_bytes: usize, expected: u16) {
        let (status, mut reader) = Self::status(self.send(body, declared_bytes));
        let mut rest = String::new();
        let _ = reader.read_to_string(&mut rest);
        assert_eq!(status, expected, "request {request}: {rest}");
        assert!(rest.contains("\"error\""), "request {request}: {rest}");
    }

    /// Reads events until the end, or until `most` have come.
    fn read(&self, kind: usize, most: usize) -> Option<Answer> {
        let body = request(kind).to_string();
        loop {
            let (status, reader) = Self::status(self.send(body.as_bytes(), body.len()));
            if status == 429 {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            assert_eq!(status, 200);
            let mut answer = Answer::default();
            let lines = reader.lines().map(|line| line.unwrap());
            // Chunk sizes of the transfer coding stand between; events are the lines that say so.
            let events = lines.filter_map(|line| line.strip_prefix("data: ").map(str::to_owned));
            for (index, event) in events.enumerate() {
                if event == "[DONE]" {
                    return Some(answer);
                }
                if index == most {
                    return None;
                }
                answer.add(&serde_json::from_str(&event).unwrap());
            }
            panic!("a stream without an end");
        }
    }

    fn run(&self, request_index: usize) {
        let kind = random(request_index as u64 ^ 0xabcd) as usize % self.references.len();
        match behaviour(request_index) {
            Behaviour::ReadsTheStream => {
                assert_eq!(self.read(kind, usize::MAX).as_ref(), Some(&self.references[kind]), "kind {kind}");
            }
            Behaviour::LeavesAfterEvents(events) => {
                self.read(kind, events);
            }
            Behaviour::LeavesAtOnce => {
                let body = request(kind).to_string();
                drop(self.send(body.as_bytes(), body.len()));
            }
            Behaviour::SendsGarbage => {
                let body = b"{\"messages\": [{\"role\"";
                self.expect(request_index, body, body.len(), 400);
            }
            Behaviour::SendsTooMuch => {
                self.expect(request_index, &vec![b' '; BODY_LIMIT_BYTES + 1], BODY_LIMIT_BYTES + 1, 413);
            }
            Behaviour::AsksForTheImpossible => {
                let mut body = request(kind);
                body["top_p"] = json!(17);
                let body = body.to_string();
                self.expect(request_index, body.as_bytes(), body.len(), 400);
            }
        }
    }
}

fn gauge(server: &Running, name: &str) -> f64 {
    let (_, text) = server.get("/metrics");
    let line = text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    line.unwrap_or_else(|| panic!("no {name} in\n{text}")).rsplit(' ').next().unwrap().parse().unwrap()
}

/// Waits until nothing runs, waits or is held.
fn settle(server: &Running) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let gauges =
        ["qwill_requests_running", "qwill_requests_waiting", "qwill_kv_pages_used", "qwill_state_slots_used"];
    loop {
        let left: Vec<_> = gauges.iter().map(|name| (name, gauge(server, name))).collect();
        if left.iter().all(|(_, value)| *value == 0.0) {
            return;
        }
        assert!(Instant::now() < deadline, "{left:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn resident_bytes(server: &Running) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn storm(client: &Client<'_>, requests: std::ops::Range<usize>) {
    let next = AtomicUsize::new(requests.start);
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                loop {
                    let request = next.fetch_add(1, Ordering::Relaxed);
                    if request >= requests.end {
                        return;
                    }
                    client.run(request);
                }
            });
        }
    });
}

#[test]
fn a_storm_of_clients_leaves_nothing_behind() {
    let limit = BODY_LIMIT_BYTES.to_string();
    let server = Running::start(&["--body-limit", &limit, "--queue", "48", "--log-level", "error"]);
    let address = server.url.strip_prefix("http://").unwrap().to_owned();
    let alone = Client { address: &address, references: &[] };
    let references: Vec<Answer> = (0..24).map(|kind| alone.read(kind, usize::MAX).unwrap()).collect();
    assert!(references.iter().all(|answer| answer.completion_tokens > 0 && !answer.finish_reason.is_empty()));

    let client = Client { address: &address, references: &references };
    storm(&client, 0..REQUESTS / 2);
    settle(&server);
    let after_half = resident_bytes(&server);
    storm(&client, REQUESTS / 2..REQUESTS);
    settle(&server);
    let after_all = resident_bytes(&server);
    println!("resident: {} MB after half, {} MB after all", after_half >> 20, after_all >> 20);
    assert!(after_all < after_half + GROWTH_LIMIT_BYTES, "{after_half} bytes grew to {after_all}");

    for (kind, reference) in references.iter().enumerate() {
        assert_eq!(client.read(kind, usize::MAX).as_ref(), Some(reference), "kind {kind} afterwards");
    }
}
