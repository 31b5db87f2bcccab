//! Settings from flags, variables and a file; what `serve --check` says about them.

use std::net::TcpListener;
use std::process::Output;

use serde_json::Value;

use crate::harness::{Running, qwill, run, stderr};

fn file(lines: &str) -> tempfile::NamedTempFile {
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), lines).unwrap();
    file
}

/// `serve --check` with a file, further arguments and variables.
fn check(lines: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let file = file(lines);
    let mut command = qwill(&["serve", "--check", "--config", &file.path().display().to_string()]);
    command.args(arguments).envs(variables.iter().copied()).output().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(output, None)))
}

fn setting<'a>(json: &'a Value, key: &str) -> &'a Value {
    json["settings"].as_array().unwrap().iter().find(|setting| setting["key"] == key).unwrap()
}

fn finding<'a>(json: &'a Value, name: &str) -> &'a Value {
    json["findings"].as_array().unwrap().iter().find(|finding| finding["name"] == name).unwrap()
}

#[test]
fn every_setting_is_printed_with_its_origin() {
    let output = check(
        "max-sequences = 3\nport = 1\nqueue = 7\napi-key = \"of-the-file\"\n",
        &["--port", "0", "--json"],
        &[("QWILL_QUEUE", "8"), ("QWILL_MEMORY", "1GiB")],
    );
    assert!(output.status.success(), "{}", stderr(&output, None));
    let json = json(&output);
    for (key, value, origin) in [
        ("port", "0", "flag"),
        ("queue", "8", "environment"),
        ("memory", "1GiB", "environment"),
        ("max-sequences", "3", "file"),
        ("body-limit", "32MiB", "default"),
        ("device", "cpu", "environment"),
    ] {
        let found = setting(&json, key);
        assert_eq!((&found["values"][0], &found["origin"]), (&value.into(), &origin.into()), "{found}");
    }
    let key = setting(&json, "api-key");
    assert_eq!(
        (&key["values"], &key["is_set"], &key["origin"]),
        (&Value::Null, &true.into(), &"file".into())
    );
    assert!(!String::from_utf8(output.stdout).unwrap().contains("of-the-file"), "a key is nobody's business");
    assert!(finding(&json, "memory")["found"].as_str().unwrap().contains("3 sequences"), "{json}");
    assert_eq!(finding(&json, "template")["level"], "ok");
    assert_eq!(json["problems"], 0);
}

#[test]
fn the_table_is_for_people() {
    let output = check("port = 0\nmemory = \"1GiB\"\n", &["--max-context", "4096"], &[("QWILL_PROT", "1")]);
    assert!(output.status.success(), "{}", stderr(&output, None));
    let text = String::from_utf8(output.stdout).unwrap();
    let line = |key: &str| {
        let line = text.lines().find(|line| line.split(' ').next() == Some(key));
        line.unwrap_or_else(|| panic!("no {key} in\n{text}")).split_whitespace().collect::<Vec<_>>()
    };
    assert_eq!(line("max-context")[1..], ["4096", "--max-context"]);
    assert!(line("port")[2].ends_with(".toml:1"), "{text}");
    assert_eq!(line("queue")[1..], ["128", "default"]);
    assert_eq!(line("chat-template")[1..], ["-", "default"]);
    assert!(text.contains("QWILL_PROT is set, but there is no such setting"), "{text}");
    assert!(text.ends_with("The server would start.\n"), "{text}");
}

#[test]
fn problems_are_all_told_and_end_with_code_1() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output =
        check("memory = \"16MiB\"\napi-keys-file = \"no/such/file\"\n", &["--port", &port, "--json"], &[]);
    assert_eq!(output.status.code(), Some(1));
    let json = json(&output);
    for name in ["port", "keys", "model"] {
        assert_eq!(finding(&json, name)["level"], "problem", "{json}");
    }
    assert_eq!(json["problems"], 3);
    assert!(stderr(&output, None).contains("would not start"));
}

#[test]
fn a_wrong_setting_ends_with_code_2_and_is_named() {
    let output = check("prot = 1\n", &[], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output, None).contains(".toml:1: there is no setting `prot`: did you mean `port`?"));
    let output = check("", &[], &[("QWILL_PORT", "http")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output, None).contains("QWILL_PORT=http: "), "{}", stderr(&output, None));
    let output = run(&["serve", "--config", "no/such/file.toml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output, None).contains("no/such/file.toml: No such file"));
    let output = run(&["serve", "--json"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_server_does_what_its_file_says() {
    let file = file("served-name = [\"of-the-file\", \"other\"]\nmax-context = 2048\n");
    let server = Running::start(&["--config", &file.path().display().to_string()]);
    let (_, models) = server.get("/v1/models");
    let models: Value = serde_json::from_str(&models).unwrap();
    assert_eq!(models["data"][0]["id"], "of-the-file");
    assert_eq!(models["data"][1]["id"], "other");
    assert_eq!(models["data"][0]["max_model_len"], 2048);
}

#[test]
fn completions_are_scripts() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&["completions", shell]);
        assert!(output.status.success());
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(script.contains("max-sequences") && script.contains("completions"), "{shell}");
        let file = file(&script);
        let checked = std::process::Command::new(shell).arg("-n").arg(file.path()).output();
        match checked {
            Ok(output) => assert!(output.status.success(), "{shell}: {}", stderr(&output, None)),
            Err(_) => eprintln!("{shell} is not installed: its script was not read"),
        }
    }
}
