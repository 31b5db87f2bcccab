//! Setting up clients for a running server, and asking a server how it is.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::harness::{PATIENCE, Running, qwill, run, stderr};

/// `qwill launch` for a server, in a home directory of its own.
fn launch(server: &Running, home: &Path, arguments: &[&str]) -> Command {
    let mut command = qwill(&["launch", "--url", &server.url]);
    command.args(arguments).env("HOME", home).env_remove("XDG_CONFIG_HOME").env_remove("CODEX_HOME");
    command
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output, None));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Puts a program into `home/bin` that says how it was called.
fn fake(home: &Path, name: &str, script: &str) -> String {
    let directory = home.join("bin");
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    format!("{}:/usr/bin:/bin", directory.display())
}

#[test]
fn clients_are_set_up_for_the_server_that_runs() {
    let server = Running::start(&["--max-context", "4096"]);
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name);

    let text = stdout(&launch(&server, home.path(), &["codex"]).output().unwrap());
    assert!(text.contains("model = \"tiny\"") && text.contains("model_context_window = 4096"), "{text}");
    assert!(text.contains("codex --profile qwill"), "{text}");
    assert!(std::fs::read_dir(home.path()).unwrap().next().is_none(), "printing writes nothing");

    let text = stdout(&launch(&server, home.path(), &["opencode", "--dry-run"]).output().unwrap());
    assert!(text.contains("+  \"model\": \"qwill/tiny\""), "{text}");
    assert!(!path(".config").exists(), "a dry run writes nothing");

    let text =
        stdout(&launch(&server, home.path(), &["opencode", "--write", "--key", "secret"]).output().unwrap());
    assert!(text.contains("opencode.sh"), "{text}");
    let written: Value =
        serde_json::from_str(&std::fs::read_to_string(path(".config/qwill/opencode.json")).unwrap()).unwrap();
    assert_eq!(written["provider"]["qwill"]["options"]["baseURL"], format!("{}/v1", server.url));
    let script = std::fs::read_to_string(path(".config/qwill/opencode.sh")).unwrap();
    assert!(script.contains("export QWILL_API_KEY=secret\n"), "{script}");

    let output = launch(&server, home.path(), &["aider", "--model", "gpt-9"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output, None).contains("the server has no model `gpt-9`"), "{}", stderr(&output, None));
    let output = launch(&server, home.path(), &["emacs"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn clients_are_started_with_their_settings() {
    let server = Running::start(&[]);
    let home = tempfile::tempdir().unwrap();
    let say = "echo \"$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL [$ANTHROPIC_API_KEY] $*\"; exit 7";
    let path = fake(home.path(), "claude", say);
    let mut command = launch(&server, home.path(), &["claude", "--run", "--", "-p", "a b"]);
    let output = command.env("PATH", &path).env("ANTHROPIC_API_KEY", "the user's").output().unwrap();
    assert_eq!(output.status.code(), Some(7), "the client's own code: {}", stderr(&output, None));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{} tiny [] -p a b\n", server.url));

    let path = fake(home.path(), "cline", "echo \"$1 $7\"");
    let output = launch(&server, home.path(), &["cline", "--run"]).env("PATH", &path).output().unwrap();
    assert_eq!(stdout(&output), "auth tiny\n \n", "set up first, then started");

    let path = fake(home.path(), "codex", "cat \"$HOME/.codex/qwill.config.toml\"");
    let output = launch(&server, home.path(), &["codex", "--run"]).env("PATH", &path).output().unwrap();
    assert!(stdout(&output).contains("\nwire_api = \"responses\"\n"), "{}", stdout(&output));

    let output = launch(&server, home.path(), &["qwen-code", "--run"]).env("PATH", &path).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output, None).contains("npm install"), "{}", stderr(&output, None));
}

#[test]
fn a_server_that_is_not_there_is_neither_healthy_nor_launched_for() {
    for arguments in [
        &["health", "--url", "http://127.0.0.1:9"][..],
        &["health", "--port", "9"],
        &["launch", "codex", "--url", "http://127.0.0.1:9"],
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(stderr(&output, None).contains("is the server running?"), "{}", stderr(&output, None));
    }
    let server = Running::start(&["--api-key", "secret"]);
    let output = run(&["health", "--url", &server.url]);
    assert_eq!(stdout(&output), "ok\n");
}

#[test]
fn a_supervisor_is_told_when_requests_are_taken_and_when_the_end_begins() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let received = || {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    };
    let server = Running::start_with(&[], &[("NOTIFY_SOCKET", &path.display().to_string())]);
    assert!(received().starts_with("READY=1\n"));
    server.signal("TERM");
    assert!(received().starts_with("STOPPING=1\n"));
    let (status, log) = server.wait();
    assert!(status.success(), "{log}");
}
