//! GPU kernels on a machine without a GPU.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::build::{self, target};

/// Compiles every kernel and compares it with its budget. The arguments are those of the example; what was compiled
/// before is taken from the build directory.
pub fn check(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(build::program("kernels")?);
    command.current_dir(crate::root()).args(arguments);
    if !arguments.contains(&"--cache") {
        command.arg("--cache").arg(cache());
    }
    build::run(&mut command, "the check of the kernels")
}

/// Where compiled kernels are kept between runs.
fn cache() -> PathBuf {
    target().join("kernels")
}
