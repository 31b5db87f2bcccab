//! The steps of CI, in the order in which they fail fastest.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// Name and `cargo` arguments of each step. The last one is the README's test command.
const STEPS: [(&str, &[&str]); 6] = [
    ("format", &["fmt", "--all", "--check"]),
    ("layering", &["xtask", "layering"]),
    ("clippy", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    ("docs", &["xtask", "docs", "--check"]),
    ("no model", &["test", "-p", "qwill", "--no-default-features"]),
    ("tests", &["test", "--workspace"]),
];

/// Runs every step and prints how long each took; the first failure ends it.
pub fn run() -> Result<()> {
    let started = Instant::now();
    let mut times = Vec::new();
    for (name, arguments) in STEPS {
        println!("==> {name}: cargo {}", arguments.join(" "));
        let step_started = Instant::now();
        step(arguments).with_context(|| format!("step `{name}`"))?;
        times.push((name, step_started.elapsed().as_secs_f64()));
    }
    println!("==> all steps passed");
    for (name, seconds) in times {
        println!("{name:>10} {seconds:>7.1} s");
    }
    println!("{:>10} {:>7.1} s", "in all", started.elapsed().as_secs_f64());
    Ok(())
}

fn step(arguments: &[&str]) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo).args(arguments).current_dir(crate::root()).status().context("cargo")?;
    if status.success() {
        return Ok(());
    }
    bail!("cargo {} ended with {status}", arguments.join(" "));
}
