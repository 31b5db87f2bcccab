//! Kernels without a GPU, and a folder for a GPU machine without a Rust toolchain.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The folder that [`bundle`] writes, ignored by git.
const BUNDLE: &str = ".bundle";

/// Largest size of the folder.
const MOST_BYTES: u64 = 30 << 20;

/// What is built: package, kind of target, its name.
const BINARIES: [(&str, &str, &str); 4] = [
    ("qwill-cuda", "--test", "suite"),
    ("qwill-model", "--test", "trunk"),
    ("qwill-model", "--test", "perplexity"),
    ("qwill-model", "--example", "cuda_step_speed"),
];

/// Run in the repository's root on the other machine; the golden files and the tiny model are the tree's own.
const RUN_SCRIPT: &str = r#"#!/usr/bin/env bash
# Runs the op suite, the golden tests and the step times on the GPU of this machine. Arguments: which of
# suite, golden, speed; all without arguments.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
export QWILL_REQUIRE_GPU=1 QWILL_REPOSITORY="${QWILL_REPOSITORY:-$(dirname "$here")}"
export QWILL_KERNEL_CACHE="${QWILL_KERNEL_CACHE:-$here/kernels}"
for step in ${@:-suite golden speed}; do
    case "$step" in
        suite) "$here/suite" --nocapture ;;
        golden) "$here/trunk" --nocapture gpu && "$here/perplexity" --nocapture gpu ;;
        speed) "$here/cuda_step_speed" 27b 2048 ops ;;
        *) echo "unknown step: $step" >&2; exit 2 ;;
    esac
done
"#;

/// Compiles every kernel and compares it with its budget; the arguments are those of the example.
pub fn kernels(arguments: &[&str]) -> Result<()> {
    let mut command = cargo();
    command.args(["run", "--quiet", "-p", "qwill-cuda", "--example", "kernels", "--"]).args(arguments);
    let status = command.status().context("cargo run")?;
    ensure!(status.success(), "the kernels are not as they should be");
    Ok(())
}

/// Builds and strips the binaries into [`BUNDLE`], with compiled kernels for an architecture where NVRTC is at hand.
pub fn bundle(architecture: &str) -> Result<()> {
    let folder = crate::root().join(BUNDLE);
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    for (package, kind, name) in BINARIES {
        let built = build(package, kind, name)?;
        strip(&built, &folder.join(name))?;
    }
    fs::write(folder.join("run.sh"), RUN_SCRIPT).context("run.sh")?;
    let cache = folder.join("kernels");
    let path = cache.to_string_lossy().into_owned();
    if let Err(error) = kernels(&["--sm", architecture, "--geometry", "odd,tiny,0.8b,27b", "--cache", &path])
    {
        println!("no compiled kernels in the bundle, the other machine needs NVRTC: {error:#}");
    }
    let bytes = size(&folder)?;
    println!("{}: {:.1} MB; on the GPU machine: bash {BUNDLE}/run.sh", folder.display(), bytes as f64 / 1e6);
    ensure!(bytes <= MOST_BYTES, "the bundle has {bytes} bytes, at most {MOST_BYTES}");
    Ok(())
}

fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(crate::root());
    command
}

/// Builds a target and returns the path of its executable, as cargo reports it.
fn build(package: &str, kind: &str, name: &str) -> Result<PathBuf> {
    let verb: &[&str] = if kind == "--test" { &["test", "--no-run"] } else { &["build"] };
    let mut command = cargo();
    command.args(verb).args(["-p", package, kind, name, "--message-format", "json-render-diagnostics"]);
    let output = command.stderr(Stdio::inherit()).output().context("cargo")?;
    ensure!(output.status.success(), "{package} {name} does not build");
    executable(&String::from_utf8_lossy(&output.stdout), name)
        .with_context(|| format!("cargo reported no executable of {name}"))
}

/// The executable of a target in cargo's JSON messages.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut built = messages.filter(|message| message["target"]["name"] == name);
    built.find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

fn strip(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("strip").arg("-o").arg(to).arg(from).status().context("strip (binutils)")?;
    if status.success() {
        return Ok(());
    }
    bail!("strip of {} ended with {status}", from.display());
}

/// Bytes of all files of a folder.
fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        bytes += if entry.file_type()?.is_dir() { size(&entry.path())? } else { entry.metadata()?.len() };
    }
    Ok(bytes)
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
        assert_eq!(executable(messages, "suite"), Some(PathBuf::from("/a/suite-1")));
        assert_eq!(executable(messages, "trunk"), None);
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
