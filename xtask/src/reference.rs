//! Pages that the code writes itself: every command, flag and environment variable in `docs/reference.md`, the HTTP API
//! in `docs/openapi.json`.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};

use crate::build::cargo;

/// Each page with what `cargo run` needs to print it.
const PAGES: [(&str, &[&str]); 2] = [
    ("docs/reference.md", &["--package", "qwill", "--", "generate-reference"]),
    ("docs/openapi.json", &["--package", "qwill-server", "--example", "openapi"]),
];

/// Writes the pages.
pub fn write() -> Result<()> {
    for (page, source) in PAGES {
        std::fs::write(path(page), generate(source)?).context(page)?;
        println!("wrote {page}");
    }
    Ok(())
}

/// Fails when a page differs from what would be written.
pub fn check() -> Result<()> {
    for (page, source) in PAGES {
        let found = std::fs::read_to_string(path(page)).context(page)?;
        if found != generate(source)? {
            bail!("{page} is stale: run `cargo xtask docs` and commit the result");
        }
    }
    Ok(())
}

fn path(page: &str) -> PathBuf {
    crate::root().join(page)
}

/// Asks the code: its definitions are the only source.
fn generate(source: &[&str]) -> Result<String> {
    let name = format!("cargo run {}", source.join(" "));
    let mut command = cargo();
    command.args(["run", "--quiet"]).args(source).stderr(Stdio::inherit());
    let output = command.output().with_context(|| name.clone())?;
    ensure!(output.status.success(), "{name} failed");
    String::from_utf8(output.stdout).context(name)
}
