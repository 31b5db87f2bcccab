//! What several commands need of cargo and binutils.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// Cargo, as it started this program, in the repository's root.
///
/// It does not see what `cargo run` says of this package: build scripts look at these variables (ring's does), so all
/// that depends on them would be built again between `cargo xtask` and other commands.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(crate::root());
    for (name, _) in std::env::vars_os() {
        if ["CARGO_MANIFEST_", "CARGO_PKG_"].iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command
}

/// The directory where cargo builds.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| crate::root().join("target"), PathBuf::from)
}

/// What the commands here run, as arguments of `cargo build`.
///
/// All packages are selected, and examples are among the targets: so every dependency has the features that the tests
/// of the workspace give it, and CI builds it once. For a package alone it would be built once more.
const PROGRAMS: [&str; 6] =
    ["build", "--quiet", "--workspace", "--bin=qwill", "--example=openapi", "--example=kernels"];

/// Builds a program of the workspace and returns its path.
pub(crate) fn program(name: &str) -> Result<PathBuf> {
    executable(&PROGRAMS, name, &[])
}

/// Builds with the given arguments and returns the path of the executable of that name, as cargo reports it.
pub(crate) fn executable(arguments: &[&str], name: &str, variables: &[(&str, &Path)]) -> Result<PathBuf> {
    let mut command = cargo();
    command.args(arguments).args(["--message-format", "json-render-diagnostics"]);
    command.envs(variables.iter().copied());
    let output = command.stderr(Stdio::inherit()).output().context("cargo")?;
    ensure!(output.status.success(), "cargo {} failed", arguments.join(" "));
    reported(&String::from_utf8_lossy(&output.stdout), name)
        .with_context(|| format!("cargo reported no executable of {name}"))
}

/// The executable of a target in cargo's JSON messages.
fn reported(messages: &str, name: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut built = messages.filter(|message| message["target"]["name"] == name);
    built.find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

/// Copies a binary without its symbols.
pub(crate) fn strip(from: &Path, to: &Path) -> Result<()> {
    run(Command::new("strip").arg("-o").arg(to).arg(from), "strip (binutils)")
}

/// Runs a command; failing is an error with its name.
pub(crate) fn run(command: &mut Command, name: &str) -> Result<()> {
    let status = command.status().with_context(|| name.to_owned())?;
    if status.success() {
        return Ok(());
    }
    bail!("{name} ended with {status}");
}

/// Bytes of a file or of all files of a folder.
pub(crate) fn size(path: &Path) -> Result<u64> {
    let context = || path.display().to_string();
    if !path.is_dir() {
        return Ok(fs::metadata(path).with_context(context)?.len());
    }
    fs::read_dir(path).with_context(context)?.map(|entry| size(&entry?.path())).sum()
}

/// Bytes in megabytes, for people.
pub(crate) fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_executable_of_the_right_target_is_found() {
        let messages = "\
            not json\n\
            {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"other\"},\"executable\":\"/a/other\"}\n\
            {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"suite\"},\"executable\":null}\n\
            {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"suite\"},\"executable\":\"/a/suite-1\"}\n";
        assert_eq!(reported(messages, "suite"), Some(PathBuf::from("/a/suite-1")));
        assert_eq!(reported(messages, "trunk"), None);
    }

    #[test]
    fn a_folders_size_counts_what_is_below_it() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("below")).unwrap();
        fs::write(folder.path().join("a"), [0; 10]).unwrap();
        fs::write(folder.path().join("below/b"), [0; 7]).unwrap();
        assert_eq!(size(folder.path()).unwrap(), 17);
    }
}
