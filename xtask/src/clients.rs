//! The suites in `tests/clients`: public clients against the real binary with the small model.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::build::{self, target};

/// Runs the tests, with further arguments for pytest; or, after `--schemathesis`, so many requests made from the
/// `OpenAPI` document for each operation, with further arguments for that.
///
/// Where the Python packages cannot be had this says so and is no failure.
pub fn run(arguments: &[&str]) -> Result<()> {
    let folder = crate::root().join("tests/clients");
    let python = match environment(&folder) {
        Ok(python) => python,
        Err(error) => {
            println!("==> no clients, so their suites are skipped: {error:#}");
            return Ok(());
        }
    };
    let binary = build::program("qwill")?;
    let mut command = Command::new(python);
    match arguments {
        ["--schemathesis", rest @ ..] => command.arg("schema.py").args(rest),
        rest => command.args(["-m", "pytest"]).args(rest),
    };
    command.current_dir(&folder).env("QWILL_BINARY", binary).env("PYTHONDONTWRITEBYTECODE", "1");
    build::run(&mut command, "the client suite")
}

/// The interpreter of a virtual environment with the packages that `requirements.txt` names; made when that changes.
fn environment(folder: &Path) -> Result<PathBuf> {
    let wanted = fs::read_to_string(folder.join("requirements.txt")).context("requirements.txt")?;
    let home = target().join("clients");
    let python = home.join("bin/python");
    let made_for = home.join("requirements.txt");
    if fs::read_to_string(&made_for).is_ok_and(|found| found == wanted) {
        return Ok(python);
    }
    println!("==> installing the clients into {}", home.display());
    build::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&home), "python3 -m venv")?;
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"]);
    build::run(install.arg(folder.join("requirements.txt")), "pip install")?;
    fs::write(&made_for, wanted).context("requirements.txt of the environment")?;
    Ok(python)
}
