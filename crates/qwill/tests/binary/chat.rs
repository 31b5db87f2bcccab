//! The terminal chat, its input and output piped.

use std::io::{Read, Write};
use std::process::{Command, Output, Stdio};

use crate::harness::{Running, qwill};

fn chat(arguments: &[&str], input: &str) -> Output {
    let mut child = qwill(&["chat"])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_embedded_model_talks_without_a_server() {
    let output = chat(
        &[],
        "What is the capital of Denmark?\n/reset\nHvad hedder hovedstaden i Frankrig?\n/quit\nnever sent\n",
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(
        text(&output.stdout),
        "The capital of Denmark is Copenhagen.\nThe conversation is forgotten.\nHovedstaden i Frankrig er Paris.\n"
    );
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn thinking_is_shown_apart() {
    let server = Running::start(&[]);
    let output = chat(&["--url", &server.url, "--thinking", "true"], "Please work out 310 + 661.\n");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let out = text(&output.stdout);
    assert!(out.starts_with("[thinking]\nones: 0 + 1 = 1."), "{out}");
    assert!(out.ends_with("\n[answer]\n310 + 661 = 971\n"), "{out}");
}

#[test]
fn a_conversation_is_remembered_by_the_client() {
    let server = Running::start(&["--log-format", "text"]);
    let output =
        chat(&["--url", &server.url, "--temperature", "0", "--max-tokens", "20"], "Hello.\nAgain.\n");
    assert!(output.status.success(), "{}", text(&output.stderr));
    server.signal("TERM");
    let (_, log) = server.wait();
    let prompts: Vec<usize> = log
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("prompt_tokens=").or(word.strip_prefix("prompt="))?.parse().ok())
        .collect();
    assert_eq!(prompts.len(), 2, "{log}");
    assert!(prompts[1] > prompts[0] + 5, "the second question was sent alone: {prompts:?}");
}

#[test]
fn mistakes_are_reported_and_the_conversation_goes_on() {
    let server = Running::start(&["--api-key", "k"]);
    let refused = chat(&["--url", &server.url], "Hello.\n");
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        text(&refused.stderr).contains("hint: give the server's key with --api-key"),
        "{}",
        text(&refused.stderr)
    );

    let output = chat(
        &["--url", &server.url, "--api-key", "k", "--max-tokens", "1000000"],
        "/nonsense\nWhat is the capital of Denmark?\n",
    );
    assert!(output.status.success());
    let errors = text(&output.stderr);
    assert!(errors.contains("unknown command /nonsense"), "{errors}");
    assert!(errors.contains("the server answered 400"), "{errors}");
}

#[test]
fn an_interrupt_stops_the_answer_and_not_the_program() {
    let server = Running::start(&[]);
    let mut child = qwill(&["chat", "--url", &server.url, "--thinking", "true"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = child.stdout.take().unwrap();
    // Counts on and on: it would run to the end of the context.
    input.write_all(b"Sort these words alphabetically: stone, apple, river.\n").unwrap();
    let mut begun = [0; 40];
    output.read_exact(&mut begun).unwrap();
    assert!(text(&begun).starts_with("[thinking]\n"), "{}", text(&begun));
    let kill = format!("kill -INT {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    input.write_all(b"/thinking off\nWhat is the capital of Denmark?\n").unwrap();
    drop(input);
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(rest.ends_with("\nThe capital of Denmark is Copenhagen.\n"), "{rest}");
    assert!(rest.len() < 20_000, "it was not stopped: {} bytes", rest.len());
}
