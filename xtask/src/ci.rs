//! The steps of CI, in the order in which they fail fastest.

use std::time::Instant;

use anyhow::{Context, Result};

use crate::build;

/// Name and `cargo` arguments of each step. The one named `tests` is the README's test command.
const STEPS: [(&str, &[&str]); 9] = [
    ("format", &["fmt", "--all", "--check"]),
    ("layering", &["xtask", "layering"]),
    ("clippy", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    ("docs", &["xtask", "docs", "--check"]),
    (KERNELS, &["xtask", "kernels"]),
    ("no model", &["test", "--workspace", "--no-default-features", "--bin", "qwill"]),
    ("tests", &["test", "--workspace"]),
    ("clients", &["xtask", "clients"]),
    ("schema", &["xtask", "clients", "--schemathesis", "5", "--seed", "1"]),
];

/// The step that needs NVRTC.
const KERNELS: &str = "kernels";

/// Runs every step, but for the kernels where they are not wanted, and prints how long each took; the first failure ends it.
pub fn run(with_kernels: bool) -> Result<()> {
    let started = Instant::now();
    let mut times = Vec::new();
    for (name, arguments) in STEPS.into_iter().filter(|(name, _)| with_kernels || *name != KERNELS) {
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
    build::run(build::cargo().args(arguments), &format!("cargo {}", arguments.join(" ")))
}
