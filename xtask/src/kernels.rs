//! GPU kernels on a machine without a GPU.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::build::{cargo, target};

/// Compiles every kernel and compares it with its budget. The arguments are those of the example; what was compiled
/// before is taken from the build directory.
pub fn check(arguments: &[&str]) -> Result<()> {
    let mut command = cargo();
    command.args(["run", "--quiet", "-p", "qwill-cuda", "--example", "kernels", "--"]).args(arguments);
    if !arguments.contains(&"--cache") {
        command.arg("--cache").arg(cache());
    }
    let status = command.status().context("cargo run")?;
    ensure!(status.success(), "the kernels are not as they should be");
    Ok(())
}

/// Where compiled kernels are kept between runs.
fn cache() -> PathBuf {
    target().join("kernels")
}
