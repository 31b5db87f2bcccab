//! `docs/reference.md`: every command, flag and environment variable, written by the binary itself.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// Writes the page.
pub fn write() -> Result<()> {
    std::fs::write(path(), generate()?).context("docs/reference.md")?;
    println!("wrote docs/reference.md");
    Ok(())
}

/// Fails when the page differs from what would be written.
pub fn check() -> Result<()> {
    let found = std::fs::read_to_string(path()).context("docs/reference.md")?;
    if found != generate()? {
        bail!("docs/reference.md is stale: run `cargo xtask docs` and commit the result");
    }
    Ok(())
}

fn path() -> PathBuf {
    crate::root().join("docs/reference.md")
}

/// Asks the binary: its definitions are the only source.
fn generate() -> Result<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["run", "--quiet", "--package", "qwill", "--", "generate-reference"])
        .current_dir(crate::root())
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cargo run --package qwill -- generate-reference")?;
    ensure!(output.status.success(), "qwill generate-reference failed");
    String::from_utf8(output.stdout).context("qwill generate-reference")
}
