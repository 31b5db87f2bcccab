//! Every external dependency has its reason in `docs/dependencies.md`.

use std::path::Path;

use anyhow::{Context, Result};

use crate::Violations;

/// Compares `[workspace.dependencies]` with the table of reasons.
pub fn check(root: &Path) -> Result<Violations> {
    let read = |name: &str| std::fs::read_to_string(root.join(name)).with_context(|| name.to_owned());
    Ok(compare(&read("Cargo.toml")?, &read("docs/dependencies.md")?))
}

fn compare(manifest: &str, reasons: &str) -> Violations {
    let declared = declared(manifest);
    let explained: Vec<&str> = reasons
        .lines()
        .filter_map(|line| line.strip_prefix("| `").and_then(|rest| rest.split('`').next()))
        .collect();
    let missing = declared.iter().filter(|name| !explained.contains(name)).map(|name| {
        format!("Cargo.toml: `{name}` has no line in docs/dependencies.md that says why it is needed")
    });
    let gone = explained
        .iter()
        .filter(|name| !declared.contains(name))
        .map(|name| format!("docs/dependencies.md: `{name}` is no dependency any more"));
    missing.chain(gone).collect()
}

/// Names in `[workspace.dependencies]` that do not come from this workspace. The section is one line a
/// dependency, which spares a TOML parser.
fn declared(manifest: &str) -> Vec<&str> {
    manifest
        .lines()
        .skip_while(|line| line.trim() != "[workspace.dependencies]")
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .filter(|line| !line.contains("path ="))
        .filter_map(|line| line.split_once('=').map(|(name, _)| name.trim()))
        .filter(|name| !name.is_empty() && !name.starts_with('#'))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_explains_its_dependencies() {
        assert_eq!(check(&crate::root()).unwrap(), Violations::new());
    }

    #[test]
    fn a_missing_and_a_superfluous_reason_are_named() {
        let manifest = "[workspace.dependencies]\nours = { path = \"x\" }\n\n# note\na = \"1\"\nb = \"2\"\n[profile.dev]\nc = 3\n";
        let violations = compare(manifest, "| crate | why |\n|---|---|\n| `a` | x |\n| `d` | y |\n");
        assert_eq!(violations.len(), 2);
        assert!(violations[0].contains("`b`"));
        assert!(violations[1].contains("`d`"));
    }
}
