//! `cargo xtask dist`: the binary that people get, with the kernels of every supported GPU inside.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::build::{self, megabytes};
use crate::kernels;

/// Compute capabilities (times ten) whose kernels are built in: Ampere, Ada, Hopper, consumer Blackwell.
const ARCHITECTURES: &str = "80,86,89,90,120";

/// Builds it into `dist` of the build directory, checks it, and prints what takes which part of it. Arguments as
/// `--sm 90` or `--geometry 27b` make a smaller one.
pub fn run(arguments: &[&str]) -> Result<()> {
    let folder = build::target().join("dist");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let (pack, binary) = (folder.join("kernels.pack"), folder.join("qwill"));
    let pack_path = pack.to_string_lossy().into_owned();
    // The last of several counts.
    let usual = ["--sm", ARCHITECTURES, "--geometry", "named", "--pack", &pack_path];
    kernels::check(&[&usual[..], arguments].concat())?;
    let arguments = ["build", "--release", "-p", "qwill", "--bin", "qwill"];
    let built = build::executable(&arguments, "qwill", &[("QWILL_KERNEL_PACK", &pack)])?;
    build::strip(&built, &binary)?;
    check(&binary, &pack)?;
    let checksum = checksum(&folder)?;
    println!("{}: {}", binary.display(), megabytes(build::size(&binary)?));
    println!("  kernels {}", megabytes(build::size(&pack)?));
    println!("  SHA-256 {checksum}");
    Ok(())
}

/// Whether it starts with nothing around it, and has the kernels.
fn check(binary: &Path, pack: &Path) -> Result<()> {
    let output = Command::new(binary).arg("--version").env_clear().output().context("starting the binary")?;
    ensure!(
        output.status.success(),
        "the binary does not start: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    print!("{}", String::from_utf8_lossy(&output.stdout));
    let (binary, pack) = (fs::read(binary)?, fs::read(pack)?);
    ensure!(contains(&binary, &pack), "the binary does not contain the kernels");
    Ok(())
}

/// Whether one has the other somewhere in it.
fn contains(whole: &[u8], part: &[u8]) -> bool {
    let Some((beginning, _)) = part.split_at_checked(16) else { return false };
    // What follows is compared only where the beginning, which has the magic number, is found.
    let starts = whole.windows(beginning.len()).enumerate().filter(|(_, window)| *window == beginning);
    starts.into_iter().any(|(at, _)| whole[at..].starts_with(part))
}

/// Writes `SHA256SUMS` and returns the binary's.
fn checksum(folder: &Path) -> Result<String> {
    let output = Command::new("sha256sum").arg("qwill").current_dir(folder).output().context("sha256sum")?;
    ensure!(output.status.success(), "sha256sum failed");
    fs::write(folder.join("SHA256SUMS"), &output.stdout).context("SHA256SUMS")?;
    let line = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(line.split_whitespace().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_found_only_whole() {
        let part: Vec<u8> = (0..100).collect();
        let whole = [&part[..50], &[7; 9], &part, &[1; 5]].concat();
        assert!(contains(&whole, &part));
        assert!(!contains(&whole[..150], &part));
        assert!(!contains(&whole, b"short"));
    }
}
