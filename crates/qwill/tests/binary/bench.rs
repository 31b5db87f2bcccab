//! Measuring a server: our own for the figures' sense, scripted ones for everything that can go wrong.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::harness::{Running, qwill, run, stderr};

/// `qwill bench serve`, without warming up.
fn bench(url: &str, arguments: &[&str]) -> Output {
    run(&[&["bench", "serve", "--warm-up", "0", "--url", url], arguments].concat())
}

/// What a prefix cache is for, seen from outside: later questions find what went before, prompts with a common beginning
/// compute it once, and those without find nothing.
#[test]
fn what_comes_back_is_found_in_the_cache() {
    let server = Running::start(&[]);
    let arguments = [
        "--protocol=reuse",
        "--concurrency=2",
        "--prompt-tokens=600",
        "--requests=6",
        "--output-tokens=6",
        "--temperature=0",
        "--json=-",
    ];
    let output = bench(&format!("{}/v1", server.url), &arguments);
    assert!(output.status.success(), "{}", stderr(&output, None));
    let report = report(&output);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    let reuse = |row: usize| &rows[row]["reuse"];
    assert_eq!((&reuse(0)["later_questions"], &reuse(0)["hits"]), (&json!(4), &json!(4)), "{}", reuse(0));
    let turns: Vec<u64> = rows[0]["samples"]
        .as_array()
        .unwrap()
        .iter()
        .map(|sample| sample["turn"].as_u64().unwrap())
        .collect();
    assert_eq!(turns, [0, 0, 1, 1, 2, 2]);
    let cached = |row: usize| reuse(row)["cached_share"].as_f64().unwrap();
    assert!(cached(1) < 0.1, "prompts of their own: {}", cached(1));
    assert!(cached(2) > 0.7, "prompts with a common beginning: {}", cached(2));
    let table = stderr(&output, None);
    assert!(table.contains("2 in turn") && table.contains("not shared") && table.contains("4/4"), "{table}");
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn our_own_server_is_measured_to_the_token() {
    let server = Running::start(&[]);
    let svg = tempfile::NamedTempFile::new().unwrap();
    let arguments = [
        "--protocol=cohort,batch,prefill,long",
        "--concurrency=1,3",
        "--requests=4",
        "--prompt-tokens=40",
        "--output-tokens=6",
        "--seed=7",
        "--json=-",
        &format!("--svg={}", svg.path().display()),
    ];
    let output = bench(&format!("{}/v1", server.url), &arguments);
    assert!(output.status.success(), "{}", stderr(&output, None));

    let report = report(&output);
    let server_facts = &report["conditions"]["server"];
    assert_eq!(server_facts["abilities"], json!({"tokenizer": true, "ignore_eos": true, "min_tokens": true}));
    assert_eq!(server_facts["version"]["name"], "qwill");
    assert!(server_facts["numerics"].as_str().unwrap().contains("kv="), "{server_facts}");
    assert_eq!(report["conditions"]["seed"], 7);
    let rows = report["rows"].as_array().unwrap();
    let names: Vec<(&str, u64)> = rows
        .iter()
        .map(|row| (row["protocol"].as_str().unwrap(), row["concurrency"].as_u64().unwrap()))
        .collect();
    let expected: Vec<(&str, u64)> =
        ["cohort", "batch", "prefill", "long"].iter().flat_map(|&name| [(name, 1), (name, 3)]).collect();
    assert_eq!(names, expected);
    for row in rows {
        check_row(row);
    }

    let table = stderr(&output, None);
    assert_eq!(table.lines().filter(|line| line.starts_with("cohort  ")).count(), 2, "{table}");
    let drawn = std::fs::read_to_string(svg.path()).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("Chats: throughput"), "{drawn}");
}

fn check_row(row: &Value) {
    assert_eq!((row["failed"].as_u64(), row["notes"].as_array().map(Vec::len)), (Some(0), Some(0)), "{row}");
    let samples = row["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 4);
    let is_cohort = row["protocol"] == "cohort";
    let wanted = if row["protocol"] == "prefill" { 1 } else { 6 };
    for sample in samples {
        let tokens = sample["completion_tokens"].as_u64().unwrap();
        if is_cohort {
            assert!((1..=6).contains(&tokens), "{sample}");
        } else {
            assert_eq!(tokens, wanted, "{sample}");
            assert_eq!(sample["prompt_tokens"], 40, "{sample}");
        }
        assert!(sample["chunk_us"].as_array().unwrap().len() as u64 <= tokens, "{sample}");
        let times: Vec<u64> =
            sample["chunk_us"].as_array().unwrap().iter().map(|time| time.as_u64().unwrap()).collect();
        assert!(times.is_sorted() && times.last() <= sample["end_us"].as_u64().as_ref(), "{sample}");
    }
    for figure in ["output_tokens_per_s", "prompt_tokens_per_s", "wall_s"] {
        assert!(row[figure].as_f64().unwrap() > 0.0, "{figure}: {row}");
    }
    assert_eq!(row["first_token_ms"]["count"], 4);
    if !is_cohort && wanted > 1 {
        assert_eq!(row["per_token_ms"]["count"], 4);
        assert!(row["decode_tokens_per_s"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn completions_are_measured_too_and_long_rows_are_left_out() {
    let server = Running::start(&["--max-context", "128"]);
    let arguments = [
        "--endpoint=completions",
        "--protocol=prefill",
        "--prompt-tokens=50,1000",
        "--concurrency=1",
        "--requests=1",
    ];
    let output = bench(&server.url, &arguments);
    assert!(output.status.success(), "{}", stderr(&output, None));
    let table = String::from_utf8(output.stdout).unwrap();
    assert_eq!(table.lines().filter(|line| line.trim_start().starts_with("prefill  ")).count(), 1, "{table}");
    assert!(
        table.contains("prefill 1000 C1: not run, 1001 tokens are more than the server's context of 128"),
        "{table}"
    );
}

#[test]
fn a_key_comes_from_the_variable_that_is_named() {
    let server = Running::start(&["--api-key", "sesame"]);
    let refused = bench(&server.url, &["--protocol=cohort"]);
    assert_eq!(refused.status.code(), Some(1));
    let text = stderr(&refused, None);
    assert!(text.contains("the server answered 401") && text.contains("--api-key-env"), "{text}");

    let allowed = qwill(&["bench", "serve", "--url", &server.url, "--warm-up=1", "--json=-"])
        .args(["--protocol=cohort", "--concurrency=1", "--requests=1", "--output-tokens=2"])
        .args(["--api-key-env=THEIR_KEY"])
        .env("THEIR_KEY", "sesame")
        .output()
        .unwrap();
    assert!(allowed.status.success(), "{}", stderr(&allowed, None));
    assert!(!String::from_utf8_lossy(&allowed.stdout).contains("sesame"));
}

#[test]
fn what_cannot_be_measured_says_why() {
    let server = Running::start(&[]);
    for (url, arguments, wanted) in [
        (server.url.as_str(), &["--model=gpt-9"][..], "does not serve `gpt-9`"),
        (&server.url, &["--requests=2"], "2 requests are fewer than the 8"),
        (&server.url, &["--json=/no/such/folder/x.json"], "/no/such/folder/x.json"),
        (&server.url, &["--api-key-env=NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        (&server.url, &["--protocol=prefill", "--prompt-tokens=3"], "no prompt of exactly 3 tokens"),
        (&format!("{}/elsewhere", server.url), &[], "the server answered 404 to /v1/models"),
        ("http://127.0.0.1:9", &[], "is the server running"),
        ("https://example.org/v1", &[], "https is not spoken here"),
        ("127.0.0.1:8000", &[], "cannot be measured"),
    ] {
        let output = bench(url, arguments);
        let text = stderr(&output, None);
        assert_eq!(output.status.code(), Some(1), "{url} {arguments:?}: {text}");
        assert!(text.contains(wanted), "{url} {arguments:?}: {text}");
        assert!(output.stdout.is_empty());
    }
    for (arguments, wanted) in [
        (&["--requests=0"][..], "must be at least 1"),
        (&["--concurrency=1,0"], "must be at least 1"),
        (&["--protocol=speed"], "cohort"),
        (&["--temperature=3"], "between 0 and 2"),
    ] {
        let output = bench(&server.url, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output, None).contains(wanted), "{arguments:?}");
    }
}

/// What a scripted server does with a request for a stream.
#[derive(Clone, Copy)]
enum Script {
    /// A whole answer, one chunk a token.
    Answer,
    /// The connection is closed in the middle.
    Cut,
    /// An error event.
    Fail,
    /// No token counts.
    NoUsage,
    /// A status that is none of 200.
    Busy,
    /// A chunk that is no JSON.
    Garbage,
    /// Nothing, ever.
    Hang,
}

/// A server that counts a token for every word, refuses extensions and answers streams by turns; its address.
fn scripted(scripts: &'static [Script]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let turn = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        for stream in listener.incoming() {
            let (stream, turn) = (stream.unwrap(), std::sync::Arc::clone(&turn));
            std::thread::spawn(move || {
                let mut reader = BufReader::new(stream);
                while let Some((path, body)) = read_request(&mut reader) {
                    let script =
                        || scripts[turn.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % scripts.len()];
                    if !answer(reader.get_mut(), &path, &body, script) {
                        return;
                    }
                }
            });
        }
    });
    url
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<(String, Value)> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line.trim().is_empty() {
            break;
        }
        lines.push(line.trim().to_ascii_lowercase());
    }
    let length = lines.iter().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    let path = lines.first()?.split(' ').nth(1)?.to_owned();
    Some((path, serde_json::from_slice(&body).unwrap_or_default()))
}

/// Whether the connection stays open.
fn answer(stream: &mut TcpStream, path: &str, body: &Value, script: impl FnOnce() -> Script) -> bool {
    let words = body["messages"][0]["content"].as_str().unwrap_or_default().split_whitespace().count();
    let usage = json!({"prompt_tokens": words, "completion_tokens": body["max_tokens"]});
    if path == "/v1/models" {
        return whole(stream, 200, &json!({"data": [{"id": "scripted"}]}));
    }
    if path == "/metrics" {
        let drafts = "vllm:spec_decode_num_drafts_total 5\nvllm:spec_decode_num_accepted_tokens_total 9\n";
        return whole(stream, 200, &drafts);
    }
    if path != "/v1/chat/completions" {
        return whole(stream, 404, &json!({"message": "no such thing"}));
    }
    if body.get("ignore_eos").is_some() || body.get("min_tokens").is_some() {
        return whole(stream, 400, &json!({"error": {"message": "unknown field"}}));
    }
    if body["stream"] != true {
        return whole(stream, 200, &json!({"choices": [], "usage": usage}));
    }
    let script = script();
    if matches!(script, Script::Busy) {
        return whole(stream, 503, &json!({"error": {"message": "busy"}}));
    }
    if matches!(script, Script::Hang) {
        // Until the client goes.
        let _ = stream.read(&mut [0]);
        return false;
    }
    let chunk = |value: &Value| format!("data: {value}\n\n");
    let text = chunk(&json!({"choices": [{"delta": {"content": "x"}, "finish_reason": null}]}));
    let end = chunk(&json!({"choices": [{"delta": {}, "finish_reason": "length"}]}));
    let usage = chunk(&json!({"choices": [], "usage": usage}));
    let tokens = body["max_tokens"].as_u64().unwrap_or(1) as usize;
    let events = match script {
        Script::Answer => text.repeat(tokens) + &end + &usage + "data: [DONE]\n\n",
        Script::Cut => text,
        Script::Fail => text + &chunk(&json!({"error": {"message": "out of pages"}})) + "data: [DONE]\n\n",
        Script::NoUsage => text + &end + "data: [DONE]\n\n",
        Script::Garbage | Script::Busy | Script::Hang => text + "data: {\n\n",
    };
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    let _ = stream.write_all((head.to_owned() + &events).as_bytes());
    false
}

fn whole(stream: &mut TcpStream, status: u16, body: &impl ToString) -> bool {
    let text = body.to_string();
    let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n", text.len());
    stream.write_all((head + &text).as_bytes()).is_ok()
}

#[test]
fn an_interrupt_keeps_the_rows_that_are_complete() {
    let url = scripted(&[Script::Answer, Script::Hang]);
    let mut child = qwill(&["bench", "serve", "--warm-up", "0", "--url", &url])
        .args(["--protocol=prefill", "--prompt-tokens=20,30", "--concurrency=1", "--requests=1", "--json=-"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The second row's only request is never answered; its line says that it has begun.
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("2 of 2")));
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let mut json = String::new();
    child.stdout.take().unwrap().read_to_string(&mut json).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    let report: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(report["interrupted"], true);
    assert_eq!(report["rows"].as_array().map(Vec::len), Some(1));
    let rest: String = lines.map(|line| line + "\n").collect();
    assert!(rest.contains("interrupted"), "{rest}");
}

const ROWS: [&str; 5] =
    ["--protocol=batch", "--prompt-tokens=20", "--output-tokens=3", "--concurrency=2", "--json=-"];

#[test]
fn a_plain_server_is_measured_with_what_it_has() {
    let url = scripted(&[Script::Answer]);
    let output = bench(&url, &[&ROWS[..], &["--requests=4"]].concat());
    assert!(output.status.success(), "{}", stderr(&output, None));
    let report = report(&output);
    assert_eq!(
        report["conditions"]["server"]["abilities"],
        json!({"tokenizer": false, "ignore_eos": false, "min_tokens": false})
    );
    let row = &report["rows"][0];
    // Lengths were found by counting answers' usage alone; every connection was closed after its answer.
    assert_eq!(
        (row["prompt_tokens"]["min"].as_f64(), row["prompt_tokens"]["max"].as_f64()),
        (Some(20.0), Some(20.0))
    );
    assert_eq!(row["completion_tokens"]["mean"], 3.0);
    assert_eq!((row["failed"].as_u64(), row["tokens_per_chunk"].as_f64()), (Some(0), Some(1.0)));
}

#[test]
fn failed_requests_are_counted_and_named() {
    let url = scripted(&[
        Script::Answer,
        Script::Cut,
        Script::Fail,
        Script::NoUsage,
        Script::Busy,
        Script::Garbage,
    ]);
    let output = bench(&url, &[&ROWS[..], &["--requests=12"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output, None);
    assert!(text.contains("10 of 12 requests failed"), "{text}");
    for wanted in [
        "2 failed: the connection ended before the answer did",
        "2 failed: the server reports: out of pages",
        "2 failed: the answer has no `usage`",
        "2 failed: the server answered 503 to /v1/chat/completions: busy",
        "2 failed: a chunk cannot be read",
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    let row = &report(&output)["rows"][0];
    assert_eq!((row["failed"].as_u64(), row["samples"].as_array().map(Vec::len)), (Some(10), Some(12)));
    assert_eq!(row["completion_tokens"]["count"], 2);
}
