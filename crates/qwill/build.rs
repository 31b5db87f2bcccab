//! Puts the commit into the binary, where there is one: `qwill --version` then names the exact source.

use std::path::Path;
use std::process::Command;

fn main() {
    let commit = Command::new("git")
        .args(["rev-parse", "--short=9", "HEAD"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok());
    let version = env!("CARGO_PKG_VERSION");
    match commit {
        Some(commit) => println!("cargo::rustc-env=QWILL_VERSION={version} ({})", commit.trim()),
        None => println!("cargo::rustc-env=QWILL_VERSION={version}"),
    }
    println!("cargo::rerun-if-changed=build.rs");
    // The log changes with every commit and checkout; an exported tree has none.
    let log = Path::new("../../.git/logs/HEAD");
    if log.exists() {
        println!("cargo::rerun-if-changed={}", log.display());
    }
}
