//! What CI and people run on the repository: `cargo xtask <command>`.

mod build;
pub mod bundle;
pub mod ci;
pub mod clients;
pub mod dependencies;
pub mod dist;
pub mod fuzz;
pub mod kernels;
pub mod layering;
pub mod reference;
pub mod sizes;

use std::path::PathBuf;

/// The repository's root.
pub fn root() -> PathBuf {
    // The manifest is in `<root>/xtask`, so the parent always exists.
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A check's result: nothing, or every violation as a sentence.
pub type Violations = Vec<String>;
