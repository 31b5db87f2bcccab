//! What the server itself costs: a long chat before the engine sees it, and a token of a stream, of 64 at once.
//!
//! `cargo run --release -p qwill-server --example overhead [-- MODEL_DIR]`; the tokenizer and the template of
//! `models/tiny` are used unless another directory is given. Processor time of the server's own threads is counted, so
//! other work on the machine blurs the figures only through caches.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement that cannot be made has failed")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use qwill_contract::{
    EngineFacts, EngineHandle, EngineInbox, EngineState, Event, FinishReason, Submission, TokenOut,
    engine_channel,
};
use qwill_server::{Server, ServerOptions, TextModel};
use qwill_text::{ChatTemplate, Markers, Tokenizer};
use serde_json::{Value, json};

const CHAT_TOKENS: usize = 44_000;
const CHATS: usize = 30;
const STREAMS: usize = 64;
const STREAM_TOKENS: usize = 500;
/// As a fast model would.
const STEP: Duration = Duration::from_millis(10);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [word, address] if word == "read" => read_streams(address.parse().unwrap()),
        [directory] => measure(Path::new(directory)),
        _ => measure(&PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny"))),
    }
}

fn measure(directory: &Path) {
    let text = text_model(directory);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (handle, inbox) = engine_channel(facts(&text));
    inbox.load.set_state(EngineState::Ready);
    let (taken, taken_at) = channel();
    let engine = std::thread::spawn(move || run_engine(&inbox, &taken));
    let address = serve(&runtime, handle, text.clone());

    let (body, tokens) = long_chat(&text);
    let mut times: Vec<f64> = (0..CHATS)
        .map(|_| {
            let started = Instant::now();
            let _answer = post(address, &body);
            let (at, prompt_tokens) = taken_at.recv().unwrap();
            assert_eq!(prompt_tokens, tokens);
            at.duration_since(started).as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!(
        "a chat of {tokens} tokens, {} kB: {:.1} ms from the socket to the engine (median of {CHATS}; best {:.1}, worst {:.1})",
        body.len() / 1000,
        times[CHATS / 2],
        times[0],
        times[CHATS - 1]
    );

    let before = server_seconds();
    let mut reader = Command::new(std::env::current_exe().unwrap())
        .args(["read", &address.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut events = String::new();
    reader.stdout.take().unwrap().read_to_string(&mut events).unwrap();
    assert!(reader.wait().unwrap().success());
    let events: usize = events.trim().parse().unwrap();
    let used = server_seconds() - before;
    let tokens = STREAMS * STREAM_TOKENS;
    println!(
        "{STREAMS} streams of {STREAM_TOKENS} tokens, {events} events: {:.1} µs of server time a token",
        used * 1e6 / tokens as f64
    );
    drop(runtime);
    engine.join().unwrap();
}

fn text_model(directory: &Path) -> TextModel {
    let read = |name: &str| std::fs::read(directory.join(name)).unwrap();
    let config = read("tokenizer_config.json");
    let tokenizer = Tokenizer::from_json(&read("tokenizer.json"), Some(&config)).unwrap();
    let template = ChatTemplate::from_tokenizer_config(&config, None).unwrap();
    TextModel { tokenizer: Arc::new(tokenizer), template: Some(Arc::new(template)) }
}

fn facts(text: &TextModel) -> EngineFacts {
    EngineFacts {
        model_names: vec!["measured".into()],
        max_context_tokens: 1 << 20,
        vocab_size: text.tokenizer.vocab_size(),
        eos_token_ids: Vec::new(),
        max_sequences: STREAMS,
        kv_capacity_tokens: 1 << 26,
        queue_capacity: STREAMS,
        numerics: "none".into(),
    }
}

fn serve(runtime: &tokio::runtime::Runtime, engine: EngineHandle, text: TextModel) -> SocketAddr {
    let options = ServerOptions { bind: ([127, 0, 0, 1], 0).into(), ..Default::default() };
    let server = runtime.block_on(Server::bind(options, engine, text)).unwrap();
    let address = server.local_addr();
    runtime.spawn(server.run(std::future::pending()));
    address
}

/// Tells when it takes a request. Requests of one token end at once; the others go on in common steps, when all are
/// there, as in a real engine.
fn run_engine(inbox: &EngineInbox, taken: &Sender<(Instant, usize)>) {
    let mut streams: Vec<Submission> = Vec::new();
    while let Ok(mut submission) = inbox.submissions.recv() {
        inbox.load.waiting.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
        let _ = taken.send((Instant::now(), submission.request.prompt.len()));
        let _ = submission.sink.send(Event::Started { cached_tokens: 0 });
        if submission.request.sampling.max_tokens == 1 {
            send_token(&mut submission, 5);
            end(&mut submission);
            continue;
        }
        streams.push(submission);
        if streams.len() < STREAMS {
            continue;
        }
        for step in 0..STREAM_TOKENS {
            for (index, stream) in streams.iter_mut().enumerate() {
                send_token(stream, 300 + ((step * 31 + index * 17) % 4000) as u32);
            }
            std::thread::sleep(STEP);
        }
        streams.drain(..).for_each(|mut stream| end(&mut stream));
    }
}

fn send_token(submission: &mut Submission, id: u32) {
    let tokens = vec![TokenOut { id, logprobs: None }];
    let _ = submission.sink.send(Event::Tokens { choice: 0, tokens });
}

fn end(submission: &mut Submission) {
    let _ = submission.sink.send(Event::End { choice: 0, reason: FinishReason::Length });
}

/// A conversation of an agent: a long system message, then turns of questions, tool results and code.
fn long_chat(text: &TextModel) -> (String, usize) {
    let body_of = |turns: usize| {
        let mut messages =
            vec![json!({"role": "system", "content": "You are a careful engineer. ".repeat(800)})];
        for turn in 0..turns {
            messages.push(json!({"role": "user", "content": format!("Turn {turn}: why does the build of the parser fail?\n{LOG}")}));
            messages.push(json!({"role": "assistant", "content": format!("Because of line {turn}.\n```rust\n{CODE}```\n")}));
        }
        messages.push(json!({"role": "user", "content": "And now?"}));
        json!({"messages": messages, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": false}})
    };
    let count = |body: &Value| {
        let template = text.template.as_ref().unwrap();
        let kwargs = body["chat_template_kwargs"].as_object().unwrap().clone();
        let input = qwill_text::ChatInput {
            messages: body["messages"].as_array().unwrap(),
            tools: None,
            add_generation_prompt: true,
            kwargs: &kwargs,
        };
        template.render(&input).unwrap().encode(&text.tokenizer).len()
    };
    let turn_tokens = text.tokenizer.encode(&format!("{LOG}{CODE}"), Markers::None).len();
    let mut turns = CHAT_TOKENS / (turn_tokens + 60);
    let mut body = body_of(turns);
    while count(&body) < CHAT_TOKENS {
        turns += 1;
        body = body_of(turns);
    }
    (body.to_string(), count(&body))
}

const LOG: &str = "error[E0308]: mismatched types\n  --> src/parser.rs:117:24\n    |\n117 |     let tokens: Vec<Token> = lex(&source)?;\n    |                 ^^^^^^^^^^ expected `Vec<Token>`, found `Tokens<'_>`\nnote: naïve ümläuts, 日本語 and 🙂 in a path: /home/zoë/projekte/übersetzer\n";
const CODE: &str = "fn parse(source: &str) -> Result<Tree, Error> {\n    let mut stack = Vec::with_capacity(16);\n    for (index, token) in lex(source)?.enumerate() {\n        match token.kind {\n            Kind::Open => stack.push(index),\n            Kind::Close => drop(stack.pop().ok_or(Error::Unbalanced(index))?),\n            _ => {}\n        }\n    }\n    Tree::build(stack)\n}\n";

fn post(address: SocketAddr, body: &str) -> BufReader<TcpStream> {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    BufReader::new(stream)
}

/// In a process of its own: reads all streams to their ends and prints how many events there were.
fn read_streams(address: SocketAddr) {
    let body = json!({
        "messages": [{"role": "user", "content": "Go on."}], "stream": true, "max_tokens": STREAM_TOKENS,
        "chat_template_kwargs": {"enable_thinking": false},
    });
    let readers: Vec<_> = (0..STREAMS)
        .map(|_| {
            let body = body.to_string();
            std::thread::spawn(move || {
                let lines = post(address, &body).lines().map_while(Result::ok);
                lines.filter(|line| line.starts_with("data: {")).count()
            })
        })
        .collect();
    let events: usize = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
    println!("{events}");
}

/// Processor time of the runtime's threads so far, seconds.
fn server_seconds() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().map(|entry| entry.unwrap().path());
    let runtime = threads.filter(|path| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with("tokio"))
    });
    let nanoseconds = |path: PathBuf| -> f64 {
        let text = std::fs::read_to_string(path.join("schedstat")).unwrap_or_default();
        text.split(' ').next().and_then(|field| field.parse().ok()).unwrap_or(0.0)
    };
    runtime.map(nanoseconds).sum::<f64>() * 1e-9
}
