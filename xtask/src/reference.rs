//! Pages that the code writes itself: every command, flag and environment variable in `docs/reference.md`, the HTTP API
//! in `docs/openapi.json`.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::build;

/// Each page with the program that prints it, and its arguments.
const PAGES: [(&str, &str, &[&str]); 2] =
    [("docs/reference.md", "qwill", &["generate-reference"]), ("docs/openapi.json", "openapi", &[])];

/// Writes the pages.
pub fn write() -> Result<()> {
    for (page, program, arguments) in PAGES {
        std::fs::write(path(page), generate(program, arguments)?).context(page)?;
        println!("wrote {page}");
    }
    Ok(())
}

/// Fails when a page differs from what would be written.
pub fn check() -> Result<()> {
    for (page, program, arguments) in PAGES {
        let found = std::fs::read_to_string(path(page)).context(page)?;
        if found != generate(program, arguments)? {
            bail!("{page} is stale: run `cargo xtask docs` and commit the result");
        }
    }
    Ok(())
}

fn path(page: &str) -> PathBuf {
    crate::root().join(page)
}

/// Asks the code: its definitions are the only source.
fn generate(program: &'static str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(build::program(program)?);
    let output = command.args(arguments).stderr(Stdio::inherit()).output().context(program)?;
    ensure!(output.status.success(), "{program} {} failed", arguments.join(" "));
    String::from_utf8(output.stdout).context(program)
}
