//! How long a source file may be: a file that outgrows this has more than one purpose.

use std::path::Path;

use anyhow::{Context, Result};

use crate::{Violations, files_below};

/// Most lines of a Rust file, tests included.
const MAX_LINES: usize = 700;

/// Every Rust file under `crates/` and `xtask/` that is too long.
pub fn check(root: &Path) -> Result<Violations> {
    let mut files = Vec::new();
    for folder in ["crates", "xtask"] {
        files.extend(files_below(&root.join(folder))?);
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
    files.sort();
    let mut violations = Violations::new();
    for file in files {
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let lines = text.lines().count();
        if lines > MAX_LINES {
            let name = file.strip_prefix(root).unwrap_or(&file).display();
            violations.push(format!("{name}: {lines} lines, at most {MAX_LINES}: split it by purpose"));
        }
    }
    Ok(violations)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_keeps_the_limit() {
        assert_eq!(check(&crate::root()).unwrap(), Violations::new());
    }

    #[test]
    fn a_long_file_is_named_with_its_length() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["crates/a/src", "xtask"] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        std::fs::write(root.path().join("crates/a/src/long.rs"), "\n".repeat(MAX_LINES + 1)).unwrap();
        std::fs::write(root.path().join("crates/a/src/fits.rs"), "\n".repeat(MAX_LINES)).unwrap();
        let violations = check(root.path()).unwrap();
        assert_eq!(violations.len(), 1);
        assert!(violations[0].starts_with("crates/a/src/long.rs: 701 lines"), "{violations:?}");
    }
}
