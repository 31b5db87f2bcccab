//! The terminal chat, its input and output piped.

use std::io::Write;
use std::process::{Output, Stdio};

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
