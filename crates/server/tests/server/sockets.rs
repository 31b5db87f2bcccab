//! What only sockets show: disconnects, time limits, bodies that never end, connections that are used again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use qwill_server::ServerOptions;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::client::{Bench, CHAT, COMPLETIONS, byte_tokens, plain_chat, with};
use crate::engine::{Act, Stage};

const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn post(path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
         connection: close\r\n\r\n{body}"
    )
}

pub(crate) fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
}

pub(crate) fn get_keeping(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")
}

pub(crate) async fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.unwrap()
}

/// Sends a request and reads until the server closes.
pub(crate) async fn exchange(address: SocketAddr, request: String) -> String {
    let mut stream = connect(address).await;
    stream.write_all(request.as_bytes()).await.unwrap();
    read_to_end(&mut stream).await
}

async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.expect("the server did not close").unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Reads until `text` has come.
async fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let mut bytes = Vec::new();
    while !String::from_utf8_lossy(&bytes).contains(text) {
        let mut buffer = [0; 4096];
        let count = timeout(PATIENCE, stream.read(&mut buffer)).await.expect("silence").unwrap();
        assert!(count > 0, "closed before {text:?} in {}", String::from_utf8_lossy(&bytes));
        bytes.extend_from_slice(&buffer[..count]);
    }
    String::from_utf8(bytes).unwrap()
}

/// Sends a request and reads one JSON answer, leaving the connection open.
pub(crate) async fn round_trip(stream: &mut TcpStream, request: &str) -> String {
    stream.write_all(request.as_bytes()).await.unwrap();
    read_until(stream, "}").await
}

async fn wait(stage: &Arc<Stage>, wait: impl FnOnce(&Stage) + Send + 'static) {
    let stage = Arc::clone(stage);
    tokio::task::spawn_blocking(move || wait(&stage)).await.unwrap();
}

/// Says one word and then waits for the gate.
fn holding() -> Bench {
    Bench::new(Arc::new(|_, _| {
        vec![Act::Step(byte_tokens("word ")), Act::Hold, Act::Step(byte_tokens("end"))]
    }))
}

#[tokio::test]
async fn leaving_cancels_at_once_in_every_phase() {
    let bench = holding();
    let listening = bench.listen(ServerOptions::default()).await;
    let bodies = [
        (CHAT, with(plain_chat(), json!({"stream": true}))),
        (CHAT, plain_chat()),
        (CHAT, with(plain_chat(), json!({"stream": true, "n": 3}))),
        (COMPLETIONS, json!({"prompt": ["a", "b"], "stream": true})),
        (COMPLETIONS, json!({"prompt": ["a", "b"]})),
    ];
    let mut cancelled = 0;
    let mut seen = 0;
    for (path, body) in bodies {
        let requests = if path == CHAT { 1 } else { 2 };
        for queued in [false, true] {
            for reset in [false, true] {
                if queued {
                    bench.stage.pause();
                }
                let mut stream = connect(listening.address).await;
                stream.write_all(post(path, &body.to_string()).as_bytes()).await.unwrap();
                seen += requests;
                if queued {
                    while bench.engine.load().snapshot().waiting < requests {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                } else {
                    wait(&bench.stage, move |stage| stage.wait_requests(seen)).await;
                }
                if reset {
                    stream.set_zero_linger().unwrap();
                }
                drop(stream);
                if queued {
                    // The flag is set while the request waits: the engine finds it at its first look.
                    tokio::time::sleep(Duration::from_millis(30)).await;
                }
                bench.stage.go_on();
                cancelled += requests;
                wait(&bench.stage, move |stage| stage.wait_cancelled(cancelled)).await;
            }
        }
    }
    // A request is told as cancelled a moment before it counts as ended.
    let all_ended = move |stage: &Stage| stage.ended.load(Ordering::SeqCst) == cancelled;
    wait(&bench.stage, move |stage| stage.wait("ended requests", all_ended)).await;
    let load = bench.engine.load().snapshot();
    assert_eq!((load.waiting, load.running), (0, 0));
    let metrics = exchange(listening.address, get("/metrics")).await;
    assert!(metrics.contains("reason=\"cancelled\"} 12"), "{metrics}");
}

#[tokio::test]
async fn silence_is_filled_with_comments() {
    let bench = Bench::new(Arc::new(|_, _| vec![Act::Hold, Act::Step(byte_tokens("late"))]));
    let options = ServerOptions { keep_alive: Duration::from_millis(20), ..Default::default() };
    let listening = bench.listen(options).await;
    bench.stage.pause();
    let mut stream = connect(listening.address).await;
    let body = with(plain_chat(), json!({"stream": true})).to_string();
    stream.write_all(post(CHAT, &body).as_bytes()).await.unwrap();
    let queued = read_until(&mut stream, ": waiting").await;
    assert!(queued.contains("200 OK") && !queued.contains("data:"), "{queued}");
    bench.stage.go_on();
    wait(&bench.stage, |stage| stage.wait_requests(1)).await;
    read_until(&mut stream, ": waiting").await;
    bench.stage.open_gate();
    let rest = read_until(&mut stream, "[DONE]").await;
    assert!(rest.contains("late") || rest.contains("\"content\":\"l"), "{rest}");
}

#[tokio::test]
async fn plain_answers_have_no_comments() {
    let bench = holding();
    let options = ServerOptions { keep_alive: Duration::from_millis(5), ..Default::default() };
    let listening = bench.listen(options).await;
    let answer = tokio::spawn(exchange(listening.address, post(CHAT, &plain_chat().to_string())));
    wait(&bench.stage, |stage| stage.wait_requests(1)).await;
    tokio::time::sleep(Duration::from_millis(30)).await;
    bench.stage.open_gate();
    let answer = answer.await.unwrap();
    assert!(answer.contains("word end") && !answer.contains(": waiting"), "{answer}");
}

#[tokio::test]
async fn huge_bodies_get_their_answer_without_being_read() {
    const MIB: usize = 1 << 20;
    let bench = Bench::saying("ok");
    let options = ServerOptions { body_limit_bytes: MIB, ..Default::default() };
    let listening = bench.listen(options).await;
    let head = |length: &str| {
        format!(
            "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{length}\r\n\r\n"
        )
    };
    // A declared length is refused before the first byte of the body.
    let mut stream = connect(listening.address).await;
    stream.write_all(head("content-length: 104857600").as_bytes()).await.unwrap();
    let start = Instant::now();
    let answer = read_until(&mut stream, "}}").await;
    assert!(start.elapsed() < Duration::from_secs(1));
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("connection: close"), "{answer}");
    assert!(answer.contains("has 104857600 bytes, the limit is 1048576 bytes"), "{answer}");

    // A client that sends it all first still gets the answer, not a reset.
    let mut stream = connect(listening.address).await;
    stream.write_all(head("content-length: 104857600").as_bytes()).await.unwrap();
    let block = vec![b' '; MIB];
    for _ in 0..100 {
        stream.write_all(&block).await.unwrap();
    }
    assert!(read_to_end(&mut stream).await.starts_with("HTTP/1.1 413"));

    // So does one that declares nothing, in chunks.
    let mut stream = connect(listening.address).await;
    stream.write_all(head("transfer-encoding: chunked").as_bytes()).await.unwrap();
    for _ in 0..8 {
        stream.write_all(format!("{MIB:x}\r\n").as_bytes()).await.unwrap();
        stream.write_all(&block).await.unwrap();
        stream.write_all(b"\r\n").await.unwrap();
    }
    let answer = read_to_end(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("the limit is 1048576"), "{answer}");

    // At the limit a body is fine, one byte more is not.
    let body = plain_chat().to_string();
    let padded = |bytes: usize| format!("{body}{}", " ".repeat(bytes - body.len()));
    let good = exchange(listening.address, post(CHAT, &padded(MIB))).await;
    assert!(good.starts_with("HTTP/1.1 200"), "{good}");
    let bad = exchange(listening.address, post(CHAT, &padded(MIB + 1))).await;
    assert!(bad.starts_with("HTTP/1.1 413"), "{bad}");
}

#[tokio::test]
async fn chunked_bodies_are_read() {
    let bench = Bench::saying("ok");
    let listening = bench.listen(ServerOptions::default()).await;
    let body = plain_chat().to_string();
    let (one, two) = body.split_at(20);
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\
         connection: close\r\n\r\n{:x}\r\n{one}\r\n{:x}\r\n{two}\r\n0\r\n\r\n",
        one.len(),
        two.len()
    );
    let answer = exchange(listening.address, request).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn slow_clients_are_cut_off_and_hold_up_nobody() {
    let bench = Bench::saying("ok");
    let options = ServerOptions { read_timeout: Duration::from_secs(1), ..Default::default() };
    let listening = bench.listen(options).await;
    let mut heads = Vec::new();
    let mut bodies = Vec::new();
    for _ in 0..64 {
        let mut head = connect(listening.address).await;
        head.write_all(b"GET /health HT").await.unwrap();
        heads.push(head);
        let mut body = connect(listening.address).await;
        let request = post(CHAT, &plain_chat().to_string());
        body.write_all(&request.as_bytes()[..request.len() - 5]).await.unwrap();
        bodies.push(body);
    }
    let start = Instant::now();
    let health = exchange(listening.address, get("/health")).await;
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");
    assert!(start.elapsed() < Duration::from_millis(900), "{:?}", start.elapsed());
    for mut body in bodies {
        let answer = read_to_end(&mut body).await;
        assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("stopped arriving"), "{answer}");
    }
    for mut head in heads {
        read_to_end(&mut head).await;
    }
}

#[tokio::test]
async fn a_flood_of_connections_waits_outside() {
    let bench = Bench::saying("ok");
    let read_timeout = Duration::from_millis(300);
    let options = ServerOptions { max_connections: 3, read_timeout, ..Default::default() };
    let listening = bench.listen(options).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut stream = connect(listening.address).await;
        round_trip(&mut stream, &get_keeping("/version")).await;
        held.push(stream);
    }
    // The system takes the fourth, the server does not look at it.
    let mut fourth = connect(listening.address).await;
    fourth.write_all(get("/version").as_bytes()).await.unwrap();
    let mut byte = [0];
    assert!(
        timeout(Duration::from_millis(200), fourth.read(&mut byte)).await.is_err(),
        "an answer beyond the cap"
    );
    drop(held.pop());
    assert!(read_to_end(&mut fourth).await.starts_with("HTTP/1.1 200"));
    // Who only holds a connection open loses it in the end, so a flood cannot keep others out.
    let flood: Vec<TcpStream> =
        futures_util::future::join_all((0..3).map(|_| connect(listening.address))).await;
    let late = exchange(listening.address, get("/version")).await;
    assert!(late.starts_with("HTTP/1.1 200"), "{late}");
    drop((flood, held));
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off() {
    // More text than socket buffers hold.
    let bench = Bench::with(
        ServerOptions::default(),
        qwill_contract::EngineFacts {
            max_context_tokens: 200_000,
            kv_capacity_tokens: 200_000,
            ..crate::engine::facts()
        },
        Arc::new(|_, _| {
            let step = Act::Step(byte_tokens("abcdefgh").repeat(16));
            std::iter::repeat_n(step, 1000).chain([Act::Hold]).collect()
        }),
    );
    let options = ServerOptions { write_timeout: Duration::from_millis(100), ..Default::default() };
    let listening = bench.listen(options).await;
    let mut stream = connect(listening.address).await;
    let body = with(plain_chat(), json!({"stream": true, "logprobs": true, "top_logprobs": 20})).to_string();
    stream.write_all(post(CHAT, &body).as_bytes()).await.unwrap();
    wait(&bench.stage, |stage| stage.wait_cancelled(1)).await;
}

#[tokio::test]
async fn connections_are_used_again_and_requests_may_be_pipelined() {
    let bench = Bench::saying("ok");
    let listening = bench.listen(ServerOptions::default()).await;
    let mut stream = connect(listening.address).await;
    for _ in 0..3 {
        let answer = round_trip(&mut stream, &get_keeping("/health")).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    // An error answer leaves the connection usable when the body was read.
    let request = post(CHAT, "{\"n\":0}").replace("connection: close\r\n", "");
    let answer = round_trip(&mut stream, &request).await;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    let three = [get_keeping("/version"), request, get("/version")].concat();
    stream.write_all(three.as_bytes()).await.unwrap();
    let answers = read_to_end(&mut stream).await;
    let statuses: Vec<&str> =
        answers.match_indices("HTTP/1.1 ").map(|(at, _)| &answers[at + 9..at + 12]).collect();
    assert_eq!(statuses, ["200", "400", "200"], "{answers}");
}

#[tokio::test]
async fn broken_http_is_answered_and_survived() {
    let bench = Bench::saying("ok");
    let listening = bench.listen(ServerOptions::default()).await;
    let many_headers = "x: y\r\n".repeat(300);
    for (request, status) in [
        ("NONSENSE\r\n\r\n".to_owned(), "400"),
        ("GET / HTTP/9.9\r\n\r\n".to_owned(), "400"),
        (format!("GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n", "a".repeat(1 << 17)), "414"),
        (format!("GET / HTTP/1.1\r\n{many_headers}\r\n"), "431"),
        (format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "a".repeat(1 << 20)), "431"),
    ] {
        let mut stream = connect(listening.address).await;
        let _ = stream.write_all(request.as_bytes()).await;
        let answer = read_to_end(&mut stream).await;
        let shown: String = answer.chars().take(200).collect();
        assert!(answer.starts_with("HTTP/1.1 4"), "{status}: {shown}");
    }
    let health = exchange(listening.address, get("/health")).await;
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_clients_with_random_departures() {
    let text = "one two three four five six";
    let script =
        Arc::new(move |_: &_, _| byte_tokens(text).into_iter().map(|id| Act::Step(vec![id])).collect());
    let facts = qwill_contract::EngineFacts { queue_capacity: 64, ..crate::engine::facts() };
    let bench = Bench::with(ServerOptions::default(), facts, script);
    let listening = bench.listen(ServerOptions::default()).await;
    let address = listening.address;
    let clients = (0..200_u64).map(|number| {
        tokio::spawn(async move {
            let body = with(plain_chat(), json!({"stream": number % 2 == 0})).to_string();
            let mut stream = connect(address).await;
            stream.write_all(post(CHAT, &body).as_bytes()).await.unwrap();
            if number % 3 == 0 {
                tokio::time::sleep(Duration::from_micros(number * 37 % 5000)).await;
                return;
            }
            let answer = read_to_end(&mut stream).await;
            if answer.starts_with("HTTP/1.1 429") {
                return;
            }
            let content: String = answer
                .lines()
                .filter_map(|line| {
                    line.strip_prefix("data: ").or_else(|| line.starts_with('{').then_some(line))
                })
                .filter_map(|data| serde_json::from_str::<serde_json::Value>(data).ok())
                .map(|chunk| {
                    let choice = &chunk["choices"][0];
                    let text =
                        choice.pointer("/delta/content").or_else(|| choice.pointer("/message/content"));
                    text.and_then(|text| text.as_str()).unwrap_or_default().to_owned()
                })
                .collect();
            assert_eq!(content, text, "{answer}");
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        let load = bench.engine.load().snapshot();
        if (load.running, load.waiting) == (0, 0) {
            break;
        }
        assert!(Instant::now() < deadline, "{load:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
