//! `qwill doctor` where there is no GPU: what it says, and that it is no failure.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::harness::{qwill, root};

/// Runs the command with an empty home and without a compiler; `None` on a machine with a GPU, which says other things.
fn doctor(home: &Path, arguments: &[&str]) -> Option<Output> {
    if Path::new("/dev/nvidiactl").exists() {
        println!("skipped: this machine has an NVIDIA GPU");
        return None;
    }
    let mut command = qwill(&["doctor"]);
    command.args(arguments).env("HOME", home).env_remove("XDG_CACHE_HOME");
    Some(command.env("QWILL_NVRTC", "/nowhere/libnvrtc.so.12").output().unwrap())
}

/// Standard output without what differs from machine to machine.
fn text(output: Output, home: &Path) -> String {
    let text = String::from_utf8(output.stdout).unwrap().replace(&home.display().to_string(), "[HOME]");
    let redact = |line: &str| match line.split_whitespace().nth(1) {
        Some(name @ ("processor" | "memory" | "disk")) if line.len() > 28 => {
            format!("[LEVEL]  {name:19}[FOUND]")
        }
        _ if line.starts_with("Qwill ") => "Qwill [VERSION]".to_owned(),
        _ => line.to_owned(),
    };
    text.lines().map(redact).collect::<Vec<_>>().join("\n")
}

#[test]
fn without_a_gpu_it_explains_what_runs_and_what_is_missing() {
    let home = tempfile::tempdir().unwrap();
    let Some(output) = doctor(home.path(), &[]) else { return };
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    insta::assert_snapshot!(text(output, home.path()));
}

#[test]
fn a_model_that_is_not_there_is_a_problem_and_code_1() {
    let home = tempfile::tempdir().unwrap();
    let Some(output) = doctor(home.path(), &["no-such-model"]) else { return };
    assert_eq!(output.status.code(), Some(1));
    insta::assert_snapshot!(String::from_utf8(output.stderr.clone()).unwrap());
    let text = text(output, home.path());
    let (_, model) = text.split_once("\nmodel\n").unwrap();
    insta::assert_snapshot!(model.split("\n\n").next().unwrap());
}

#[test]
fn the_json_has_the_same_findings() {
    let home = tempfile::tempdir().unwrap();
    let model = root().join("models/tiny");
    let Some(output) = doctor(home.path(), &["--json", &model.display().to_string()]) else { return };
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["problems"], 0);
    let findings = report["findings"].as_array().unwrap();
    let named = |name: &str| findings.iter().filter(|finding| finding["name"] == name).count();
    for name in ["memory", "disk", "checkpoint", "driver", "compiler", "cache"] {
        assert_eq!(named(name), 1, "{name}: {report:#}");
    }
    // The host's and the self-test's.
    assert_eq!(named("processor"), 2);
    let levels = findings.iter().map(|finding| finding["level"].as_str().unwrap());
    assert_eq!(
        levels.filter(|level| *level == "warning").count() as u64,
        report["warnings"].as_u64().unwrap()
    );
}

#[test]
fn a_cache_that_cannot_be_written_is_a_warning() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join(".cache"), b"a file where a directory should be").unwrap();
    let Some(output) = doctor(home.path(), &["--json"]) else { return };
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let cache = findings.iter().find(|finding| finding["name"] == "cache").unwrap();
    assert_eq!(cache["level"], "warning", "{cache:#}");
}
