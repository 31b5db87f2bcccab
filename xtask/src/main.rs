//! `cargo xtask <command>`: the checks that CI runs, each on its own.

use std::process::ExitCode;

use anyhow::{Result, bail};

const USAGE: &str = "usage: cargo xtask <command>

commands:
  ci [--without-kernels]    everything CI runs, each step timed; stops at the first failure
  layering                  which crate may depend on which, how long a source file may be, and whether what
                            docs names (reasons of dependencies, tests of docs/compatibility.md) exists
  kernels [...]             compile every GPU kernel without a GPU and compare it with its budget;
                            see crates/cuda/examples/kernels.rs for the options
  clients [...]             the suites of tests/clients: openai and others against the binary; arguments
                            go to pytest, or --schemathesis N sends N requests to each operation
  dist [...]                the release binary with every GPU's kernels inside, in dist of the build directory;
                            --sm 90 or --geometry 27b for a smaller one
  gpu-bundle [SM] [--xz]    tests and timings for a GPU machine without Rust, in .bundle (SM: 90 if not given);
                            --xz also makes one archive of it
  fuzz [--seconds N] [...]  random outputs and request bodies, N seconds (60) for each target or those named
  docs [--check]            write docs/reference.md and docs/openapi.json from the definitions, or fail when stale";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["ci"] => xtask::ci::run(true),
        ["ci", "--without-kernels"] => xtask::ci::run(false),
        ["layering"] => layering(),
        ["clients", rest @ ..] => xtask::clients::run(rest),
        ["kernels", rest @ ..] => xtask::kernels::check(rest),
        ["dist", rest @ ..] => xtask::dist::run(rest),
        ["gpu-bundle"] => xtask::bundle::run("90", false),
        ["gpu-bundle", "--xz"] => xtask::bundle::run("90", true),
        ["gpu-bundle", architecture] => xtask::bundle::run(architecture, false),
        ["gpu-bundle", architecture, "--xz"] => xtask::bundle::run(architecture, true),
        ["fuzz", rest @ ..] => xtask::fuzz::run(rest),
        ["docs"] => xtask::reference::write(),
        ["docs", "--check"] => xtask::reference::check(),
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            Ok(())
        }
        _ => bail!("unknown command: {}\n\n{USAGE}", arguments.join(" ")),
    }
}

fn layering() -> Result<()> {
    let root = xtask::root();
    let metadata = xtask::layering::cargo_metadata(&root)?;
    let mut violations = xtask::layering::check(&metadata)?;
    violations.extend(xtask::sizes::check(&root)?);
    violations.extend(xtask::dependencies::check(&root)?);
    violations.extend(xtask::compatibility::check(&root)?);
    for violation in &violations {
        eprintln!("{violation}");
    }
    if violations.is_empty() {
        return Ok(());
    }
    bail!("{} violation(s) of the layout rules; docs/architecture.md explains them", violations.len());
}
