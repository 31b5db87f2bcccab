//! `cargo xtask gpu-bundle`: a folder for a GPU machine without Rust: tests, step times and the binary itself.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::build::{self, megabytes};
use crate::kernels;

/// The folder, ignored by git.
const BUNDLE: &str = ".bundle";

/// Largest size of the folder.
const MOST_BYTES: u64 = 30 << 20;

/// What is built: package, kind of target, its name.
const BINARIES: [(&str, &str, &str); 13] = [
    ("qwill-cuda", "--test", "suite"),
    ("qwill-cuda", "--test", "large"),
    ("qwill-cuda", "--test", "machine"),
    ("qwill-cuda", "--test", "kernel_cache"),
    ("qwill-model", "--test", "trunk"),
    ("qwill-model", "--test", "mtp"),
    ("qwill-model", "--test", "perplexity"),
    ("qwill-engine", "--test", "one_answer"),
    ("qwill-engine", "--test", "equality"),
    ("qwill-engine", "--test", "prefix_cache"),
    ("qwill-engine", "--test", "soak"),
    ("qwill", "--test", "binary"),
    ("qwill", "--bin", "qwill"),
];

/// Golden files that the tests above read on a GPU.
const GOLDEN: [&str; 8] = [
    "trunk.safetensors",
    "trunk.json",
    "mtp.safetensors",
    "mtp.json",
    "perplexity.json",
    "behaviour.jsonl",
    "chat.jsonl",
    "tokenizer.jsonl",
];

/// Kernels of these geometries are compiled for the bundle: those of the tests and of the step times.
const GEOMETRIES: &str = "odd,tiny,0.8b,27b";

/// The script that runs the steps.
const RUN_SCRIPT: &str = include_str!("bundle-run.sh");

/// Builds the folder for an architecture; `archive` also makes one compressed file of it.
pub fn run(architecture: &str, archive: bool) -> Result<()> {
    let root = crate::root();
    let folder = root.join(BUNDLE);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(folder.join("golden")).with_context(|| folder.display().to_string())?;
    for (package, kind, name) in BINARIES {
        let binary = folder.join(name);
        build::strip(&build::executable(&arguments(package, kind, name), name, &[])?, &binary)?;
    }
    for name in GOLDEN {
        fs::copy(root.join("golden").join(name), folder.join("golden").join(name)).context(name)?;
    }
    compile(architecture, &folder);
    compress(&folder)?;
    fs::write(folder.join("run.sh"), RUN_SCRIPT).context("run.sh")?;
    report(&folder)?;
    if archive { pack(&root) } else { Ok(()) }
}

/// Compiled kernels.
const KERNELS: &str = "kernels";

/// What the script unpacks.
const CONTENTS: &str = "contents.tar.xz";

/// Puts everything into one file: the programs share most of their code, which is then there once.
fn compress(folder: &Path) -> Result<()> {
    let mut names: Vec<&str> = BINARIES.iter().map(|(_, _, name)| *name).chain(["golden"]).collect();
    names.extend(folder.join(KERNELS).exists().then_some(KERNELS));
    let mut tar = Command::new("tar");
    tar.args(["--create", "--xz", "--remove-files", "--file", CONTENTS]).args(names);
    // A dictionary that reaches from one program to the others.
    tar.env("XZ_OPT", "--lzma2=preset=9,dict=192MiB").current_dir(folder);
    build::run(&mut tar, "tar with xz (xz-utils)")
}

/// Cargo's, for a target. The model is that of the tree on the other machine, so the binary has none.
fn arguments<'a>(package: &'a str, kind: &'a str, name: &'a str) -> Vec<&'a str> {
    let mut arguments = match kind {
        "--test" => vec!["test", "--no-run", "--release"],
        _ => vec!["build", "--release", "--no-default-features"],
    };
    arguments.extend(["-p", package, kind, name]);
    arguments
}

/// Adds compiled kernels where NVRTC is at hand; otherwise the other machine needs it.
fn compile(architecture: &str, folder: &Path) {
    let cache = folder.join(KERNELS).to_string_lossy().into_owned();
    if let Err(error) = kernels::check(&["--sm", architecture, "--geometry", GEOMETRIES, "--cache", &cache]) {
        println!("without all its kernels the other machine needs NVRTC: {error:#}");
    }
}

/// Prints the parts' sizes; too many bytes are an error.
fn report(folder: &Path) -> Result<()> {
    let mut parts = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        parts.push((build::size(&path)?, path));
    }
    parts.sort_by(|a, b| b.cmp(a));
    for (bytes, path) in &parts {
        println!("{:>9} {}", megabytes(*bytes), path.strip_prefix(folder).unwrap_or(path).display());
    }
    let bytes: u64 = parts.iter().map(|(bytes, _)| bytes).sum();
    println!("{:>9} in all; on the GPU machine, beside models/tiny: bash {BUNDLE}/run.sh", megabytes(bytes));
    ensure!(bytes <= MOST_BYTES, "the bundle has {bytes} bytes, at most {MOST_BYTES}");
    Ok(())
}

/// One compressed file of the folder, beside it.
fn pack(root: &Path) -> Result<()> {
    let name = format!("{BUNDLE}.tar.xz");
    // All cores, and the smallest that xz makes.
    let mut tar = Command::new("tar");
    tar.args(["--create", "--xz", "--file", &name, BUNDLE]).env("XZ_OPT", "-9e -T0").current_dir(root);
    build::run(&mut tar, "tar with xz (xz-utils)")?;
    println!("{:>9} {name}", megabytes(build::size(&root.join(&name))?));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_knows_every_binary_and_every_golden_file_exists() {
        for (_, _, name) in BINARIES {
            assert!(RUN_SCRIPT.contains(&format!("\"$here/{name}\"")), "{name} is never run");
        }
        for name in GOLDEN {
            assert!(crate::root().join("golden").join(name).exists(), "{name}");
        }
    }

    #[test]
    fn the_script_is_bash() {
        let mut bash = Command::new("bash");
        bash.arg("-n").arg(crate::root().join("xtask/src/bundle-run.sh"));
        build::run(&mut bash, "bash -n").unwrap();
    }
}
