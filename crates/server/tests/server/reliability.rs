//! What bad, slow and impatient clients do to others: nothing.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use qwill_contract::EngineFacts;
use qwill_server::ServerOptions;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::{Bench, CHAT, COMPLETIONS, byte_tokens, plain_chat, with};
use crate::engine::{self, Act};
use crate::sockets::{connect, exchange, get, post};

const PATIENCE: Duration = Duration::from_secs(30);

/// An answer of at most so many begins a call.
const CALLING_TOKENS: usize = 51;

/// A known request is answered as always, and nothing is left in hand.
async fn all_is_well(bench: &Bench, address: SocketAddr) {
    let start = Instant::now();
    loop {
        let load = bench.engine.load().snapshot();
        let slots = exchange(address, get("/slots")).await;
        if (load.running, load.waiting) == (0, 0) && slots.ends_with("[]") {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{load:?} {slots}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let answer = exchange(address, post(COMPLETIONS, r#"{"prompt":[9,9,9,9,9,9,9],"max_tokens":3}"#)).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"text\":\"abc\""), "{answer}");
}

/// Answers `abc`; a prompt of fewer tokens than seven waits somewhere on the way, and so do [`CALLING_TOKENS`], within the
/// arguments of a call.
fn waiting_somewhere() -> Bench {
    let script = Arc::new(|request: &qwill_contract::Request, _: usize| {
        let text = |text: &str| Act::Step(byte_tokens(text));
        match request.prompt.len() {
            _ if request.sampling.max_tokens == CALLING_TOKENS => {
                vec![text("<tool_call>\n<function=look>\n<parameter=at>\nhalf of"), Act::Hold]
            }
            1 => vec![Act::Hold],
            2 => vec![text("a"), Act::Hold],
            3 => vec![text("<think>hm"), Act::Hold],
            _ => vec![text("abc"), text(" and more")],
        }
    });
    Bench::new(script)
}

#[derive(Debug, Clone, Copy)]
enum Leaving {
    Close,
    Reset,
    HalfClose,
}

#[tokio::test]
async fn whoever_leaves_is_forgotten_whatever_was_going_on() {
    let bench = waiting_somewhere();
    let listening = bench.listen(ServerOptions::default()).await;
    let address = listening.address;
    let mut left = 0;
    let prompt = |tokens: usize| json!({"prompt": vec![7; tokens], "max_tokens": 50});
    let tool = json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}});
    let calling = with(plain_chat(), json!({"tools": [tool], "max_tokens": CALLING_TOKENS}));
    let phases = [
        ("in the queue", COMPLETIONS, prompt(1)),
        ("in the prompt", COMPLETIONS, prompt(1)),
        ("after the first token", COMPLETIONS, prompt(2)),
        ("within thinking", COMPLETIONS, prompt(3)),
        ("within a call", CHAT, calling),
        ("within a grammar", COMPLETIONS, with(prompt(2), json!({"regex": "[a-z]+"}))),
        ("one of several choices", COMPLETIONS, with(prompt(2), json!({"n": 3}))),
    ];
    for (phase, path, body) in phases {
        for stream in [false, true] {
            for leaving in [Leaving::Close, Leaving::Reset, Leaving::HalfClose] {
                let queued = phase == "in the queue";
                if queued {
                    bench.stage.pause();
                }
                let body = with(body.clone(), json!({"stream": stream}));
                let mut client = connect(address).await;
                client.write_all(post(path, &body.to_string()).as_bytes()).await.unwrap();
                let wanted = if queued { "\"waiting\"" } else { "\"is_processing\":true" };
                let start = Instant::now();
                while !exchange(address, get("/slots")).await.contains(wanted) {
                    assert!(start.elapsed() < PATIENCE, "{phase}, {leaving:?}");
                }
                match leaving {
                    Leaving::Close => drop(client),
                    Leaving::Reset => {
                        client.set_zero_linger().unwrap();
                        drop(client);
                    }
                    Leaving::HalfClose => {
                        client.shutdown().await.unwrap();
                        let mut rest = Vec::new();
                        tokio::time::timeout(PATIENCE, client.read_to_end(&mut rest)).await.unwrap().ok();
                    }
                }
                let start = Instant::now();
                while !exchange(address, get("/slots")).await.ends_with("[]") {
                    assert!(start.elapsed() < PATIENCE, "{phase}, {leaving:?}");
                }
                bench.stage.go_on();
                left += 1;
                let stage = Arc::clone(&bench.stage);
                tokio::task::spawn_blocking(move || stage.wait_cancelled(left)).await.unwrap();
            }
        }
    }
    assert_eq!(left, 7 * 2 * 3);
    all_is_well(&bench, address).await;
    let metrics = exchange(address, get("/metrics")).await;
    for (path, cancelled) in [(COMPLETIONS, 6 * 2 * 3), (CHAT, 2 * 3)] {
        let counted = format!("{{endpoint=\"{path}\",reason=\"cancelled\"}} {cancelled}\n");
        assert!(metrics.contains(&counted), "{metrics}");
    }
}

#[tokio::test]
async fn a_full_queue_refuses_the_rest_and_what_can_never_run_does_not_wait() {
    let bench = waiting_somewhere();
    let listening = bench.listen(ServerOptions::default()).await;
    let address = listening.address;
    let capacity = engine::facts().queue_capacity;
    for factor in [1, 2, 4] {
        bench.stage.pause();
        let request = || post(COMPLETIONS, r#"{"prompt":[9,9,9,9,9,9,9],"max_tokens":3}"#);
        let clients: Vec<_> =
            (0..factor * capacity).map(|_| tokio::spawn(exchange(address, request()))).collect();
        let start = Instant::now();
        let refusals = (factor - 1) * capacity;
        let finished = |clients: &[tokio::task::JoinHandle<String>]| {
            clients.iter().filter(|one| one.is_finished()).count()
        };
        while bench.engine.load().snapshot().waiting < capacity || finished(&clients) < refusals {
            assert!(start.elapsed() < PATIENCE, "refusals do not wait");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        // One more, one that could never run, and one that is wrong: each gets its own answer at once.
        let full = exchange(address, request()).await;
        assert!(full.starts_with("HTTP/1.1 429") && full.contains("retry-after: "), "{full}");
        let long = json!({"prompt": vec![9; 300], "max_tokens": 3}).to_string();
        let impossible = exchange(address, post(COMPLETIONS, &long)).await;
        assert!(
            impossible.starts_with("HTTP/1.1 400") && impossible.contains("context_length_exceeded"),
            "{impossible}"
        );
        let wrong = exchange(address, post(COMPLETIONS, r#"{"prompt":"x","top_p":7}"#)).await;
        assert!(wrong.starts_with("HTTP/1.1 400"), "{wrong}");
        bench.stage.go_on();
        let mut statuses = Vec::new();
        for client in clients {
            statuses.push(client.await.unwrap()[9..12].to_owned());
        }
        statuses.sort();
        let expected = [vec!["200"; capacity], vec!["429"; refusals]].concat();
        assert_eq!(statuses, expected, "{factor} times the queue");
    }
    all_is_well(&bench, address).await;
}

/// Answers a prompt of one token with more than sockets hold, and others with a few hundred tokens.
fn long_answers() -> Bench {
    let facts = EngineFacts { max_context_tokens: 200_000, kv_capacity_tokens: 800_000, ..engine::facts() };
    let facts = EngineFacts { queue_capacity: 64, ..facts };
    let script = Arc::new(move |request: &qwill_contract::Request, _: usize| {
        let long = Act::Step(byte_tokens("abcdefgh").repeat(16));
        match request.prompt.len() {
            1 => std::iter::repeat_n(long, 1000).chain([Act::Hold]).collect(),
            2 => byte_tokens("abc").into_iter().cycle().take(300).map(|id| Act::Step(vec![id])).collect(),
            _ => vec![Act::Step(byte_tokens("abc"))],
        }
    });
    Bench::with(ServerOptions::default(), facts, script)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_reads_slowly_or_never_holds_up_nobody_and_is_cut_off() {
    const NEVER: usize = 8;
    const SLOW: usize = 32;
    let bench = long_answers();
    let options = ServerOptions { write_timeout: Duration::from_millis(300), ..Default::default() };
    let listening = bench.listen(options).await;
    let address = listening.address;
    let body = |prompt_tokens: usize, max_tokens: usize, logprobs: usize| {
        let prompt = vec![5; prompt_tokens];
        json!({"prompt": prompt, "max_tokens": max_tokens, "stream": true, "logprobs": logprobs}).to_string()
    };
    let begin = async || {
        let mut client = small_window(address).await;
        client.write_all(post(COMPLETIONS, &body(1, 150_000, 20)).as_bytes()).await.unwrap();
        client
    };
    let mut never = Vec::new();
    for _ in 0..NEVER {
        never.push(begin().await);
    }
    let mut slow = Vec::new();
    for _ in 0..SLOW {
        let mut client = begin().await;
        slow.push(tokio::spawn(async move {
            let mut byte = [0];
            while client.read(&mut byte).await.is_ok_and(|count| count > 0) {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }));
    }
    // Somebody who reads gets the whole answer meanwhile.
    let answer = tokio::time::timeout(PATIENCE, exchange(address, post(COMPLETIONS, &body(2, 300, 1)))).await;
    let answer = answer.expect("the answer is held up");
    assert_eq!(answer.matches("\"finish_reason\":\"length\"").count(), 1);
    assert!(answer.contains("data: [DONE]"));
    // The silent ones are cut off, and nothing more is generated for them.
    let start = Instant::now();
    while bench.stage.cancelled.load(Ordering::SeqCst) < NEVER {
        assert!(start.elapsed() < 2 * PATIENCE, "the silent are not cut off");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    slow.iter().for_each(tokio::task::JoinHandle::abort);
    drop(never);
    for client in slow {
        let _ = client.await;
    }
    all_is_well(&bench, address).await;
}

/// A connection that takes in little before it is read from.
async fn small_window(address: SocketAddr) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(address).await.unwrap()
}

#[tokio::test]
async fn trickling_heads_and_half_open_connections_are_cut_off() {
    let bench = waiting_somewhere();
    let options = ServerOptions { read_timeout: Duration::from_secs(1), ..Default::default() };
    let listening = bench.listen(options).await;
    let address = listening.address;
    let half_open = futures_util::future::join_all((0..256).map(|_| connect(address))).await;
    let trickling: Vec<_> = (0..64)
        .map(|_| {
            tokio::spawn(async move {
                let mut client = connect(address).await;
                let mut buffer = [0; 256];
                let head =
                    b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
                for byte in head {
                    // Once cut off, what is sent is thrown away for a moment, so that an answer could be read.
                    let sent = client.write_all(&[*byte]).await;
                    let read =
                        tokio::time::timeout(Duration::from_millis(100), client.read(&mut buffer)).await;
                    if sent.is_err() || matches!(read, Ok(Ok(0) | Err(_))) {
                        return true;
                    }
                }
                false
            })
        })
        .collect();
    let answer = exchange(address, post(CHAT, &plain_chat().to_string())).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for client in trickling {
        assert!(client.await.unwrap(), "a head that trickles in for eight seconds is cut off after one");
    }
    for mut client in half_open {
        let mut bytes = Vec::new();
        let _ = tokio::time::timeout(PATIENCE, client.read_to_end(&mut bytes)).await.expect("still open");
    }
    all_is_well(&bench, address).await;
}

#[tokio::test]
async fn large_bodies_are_read_or_refused_and_never_more() {
    let bench = waiting_somewhere();
    let listening =
        bench.listen(ServerOptions { read_timeout: Duration::from_secs(2), ..Default::default() }).await;
    let address = listening.address;
    let message = json!({"role": "user", "content": "a"});
    let tool = |number: usize| json!({"type": "function", "function": {"name": format!("f{number}")}});
    let tools: Vec<Value> = (0..100_000).map(tool).collect();
    let bodies = [
        (
            "messages",
            with(plain_chat(), json!({"messages": vec![message.clone(); 100_000]})),
            "context_length_exceeded",
        ),
        (
            "a million messages",
            with(plain_chat(), json!({"messages": vec![message; 1_000_000]})),
            "body_too_large",
        ),
        ("tools", with(plain_chat(), json!({"tools": tools})), "context_length_exceeded"),
        ("string", json!({"prompt": "word ".repeat(400_000)}), "context_length_exceeded"),
        ("too much", json!({"prompt": "word ".repeat(10_000_000)}), "body_too_large"),
    ];
    for (what, body, code) in bodies {
        let path = if body.get("prompt").is_some() { COMPLETIONS } else { CHAT };
        let answer = exchange(address, post(path, &body.to_string())).await;
        let shown: String = answer.chars().take(400).collect();
        assert!(answer.starts_with("HTTP/1.1 4") && answer.contains(code), "{what}: {shown}");
    }
    // A length that promises more than comes, and one that promises less.
    let body = plain_chat().to_string();
    let more = post(CHAT, &body).replace(&format!("content-length: {}", body.len()), "content-length: 9000");
    let answer = exchange(address, more).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    let less = post(CHAT, &body).replace(&format!("content-length: {}", body.len()), "content-length: 20");
    let answer = exchange(address, less).await;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    all_is_well(&bench, address).await;
}
