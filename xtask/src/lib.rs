//! What CI and people run on the repository: `cargo xtask <command>`.

mod build;
pub mod bundle;
pub mod ci;
pub mod clients;
pub mod compatibility;
pub mod dependencies;
pub mod dist;
pub mod fuzz;
pub mod kernels;
pub mod layering;
pub mod reference;
pub mod sizes;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The repository's root.
pub fn root() -> PathBuf {
    // The manifest is in `<root>/xtask`, so the parent always exists.
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A check's result: nothing, or every violation as a sentence.
pub type Violations = Vec<String>;

/// Every file below a folder.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files_below(&path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}
