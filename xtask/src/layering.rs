//! Which crate may depend on which.
//!
//! The table below is the architecture: a new edge is a decision, taken here and explained in
//! `docs/architecture.md`, not a side effect of a `use`.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::Violations;

/// What one crate of the workspace may use of the others.
struct Layer {
    name: &'static str,
    /// Crates it may depend on.
    uses: &'static [&'static str],
    /// Crates that its tests may use beside those.
    tests_use: &'static [&'static str],
    /// Whether it may know the async runtime and HTTP.
    asynchronous: bool,
}

const fn layer(name: &'static str, uses: &'static [&'static str]) -> Layer {
    Layer { name, uses, tests_use: &[], asynchronous: false }
}

/// The workspace, bottom up.
const LAYERS: [Layer; 13] = [
    layer("qwill-contract", &[]),
    layer("qwill-device", &[]),
    layer("qwill-text", &[]),
    layer("qwill-grammar", &["qwill-contract", "qwill-text"]),
    layer("qwill-weights", &["qwill-device"]),
    layer("qwill-cpu", &["qwill-device"]),
    Layer { tests_use: &["qwill-cpu"], ..layer("qwill-cuda", &["qwill-device"]) },
    Layer {
        tests_use: &["qwill-cpu", "qwill-cuda"],
        ..layer("qwill-model", &["qwill-device", "qwill-weights"])
    },
    Layer {
        tests_use: &["qwill-cpu", "qwill-cuda", "qwill-weights", "qwill-text", "qwill-grammar"],
        ..layer("qwill-engine", &["qwill-contract", "qwill-device", "qwill-model"])
    },
    Layer { asynchronous: true, ..layer("qwill-server", &["qwill-contract", "qwill-text", "qwill-grammar"]) },
    Layer { asynchronous: true, ..layer("qwill-bench", &[]) },
    Layer {
        asynchronous: true,
        ..layer(
            "qwill",
            &[
                "qwill-contract",
                "qwill-text",
                "qwill-weights",
                "qwill-device",
                "qwill-cpu",
                "qwill-cuda",
                "qwill-model",
                "qwill-engine",
                "qwill-server",
                "qwill-bench",
            ],
        )
    },
    layer("xtask", &[]),
];

/// The async runtime and HTTP: for `server`, its measuring client `bench`, and the binary alone.
const ASYNCHRONOUS: [&str; 7] =
    ["tokio", "axum", "hyper", "hyper-util", "tower", "tower-http", "futures-util"];

/// `cargo metadata` of the workspace, without its dependencies' own.
pub fn cargo_metadata(root: &Path) -> Result<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root)
        .output()
        .context("cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("cargo metadata: its JSON")
}

/// Compares the workspace's edges with the table.
pub fn check(metadata: &Value) -> Result<Violations> {
    let packages = metadata["packages"].as_array().context("cargo metadata: no `packages`")?;
    let members: Vec<&str> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    let mut violations = Violations::new();
    for package in packages {
        let name = package["name"].as_str().context("cargo metadata: a package without a name")?;
        let Some(layer) = LAYERS.iter().find(|layer| layer.name == name) else {
            violations.push(format!("{name}: not in the layering table of xtask/src/layering.rs"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let to = dependency["name"].as_str().unwrap_or_default();
            let for_tests = dependency["kind"].as_str() == Some("dev");
            if members.contains(&to) {
                violations.extend(check_edge(layer, to, for_tests));
            } else if ASYNCHRONOUS.contains(&to) && !layer.asynchronous {
                violations.push(format!(
                    "{name} -> {to}: only qwill-server, qwill-bench and qwill may be asynchronous"
                ));
            }
        }
    }
    Ok(violations)
}

fn check_edge(layer: &Layer, to: &str, for_tests: bool) -> Option<String> {
    // A crate may depend on itself for tests: that is how a generic test-suite behind a feature is reached.
    let allowed =
        layer.uses.contains(&to) || (for_tests && (layer.tests_use.contains(&to) || layer.name == to));
    let kind = if for_tests { " (tests)" } else { "" };
    (!allowed).then(|| format!("{} -> {to}{kind}: not an edge of the architecture", layer.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    type Edges<'a> = &'a [(&'a str, Option<&'a str>)];

    fn workspace(packages: &[(&str, Edges<'_>)]) -> Value {
        let edge = |(name, kind): &(&str, Option<&str>)| json!({"name": name, "kind": kind});
        let package = |(name, edges): &(&str, Edges<'_>)| json!({"name": name, "dependencies": edges.iter().map(edge).collect::<Vec<_>>()});
        json!({"packages": packages.iter().map(package).collect::<Vec<_>>()})
    }

    #[test]
    fn the_workspace_keeps_its_layers() {
        let metadata = cargo_metadata(&crate::root()).unwrap();
        assert_eq!(check(&metadata).unwrap(), Violations::new());
    }

    #[test]
    fn every_layer_of_the_table_exists_and_none_uses_a_higher_one() {
        let metadata = cargo_metadata(&crate::root()).unwrap();
        let members: Vec<&str> =
            metadata["packages"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
        for (at, layer) in LAYERS.iter().enumerate() {
            assert!(members.contains(&layer.name), "{} is gone", layer.name);
            for used in layer.uses {
                assert!(LAYERS[..at].iter().any(|lower| lower.name == *used), "{} -> {used}", layer.name);
            }
        }
    }

    #[test]
    fn a_forbidden_edge_is_named() {
        let metadata = workspace(&[("qwill-text", &[("qwill-device", None)]), ("qwill-device", &[])]);
        assert_eq!(
            check(&metadata).unwrap(),
            ["qwill-text -> qwill-device: not an edge of the architecture"]
        );
    }

    #[test]
    fn an_edge_for_tests_stays_one_for_tests() {
        let for_tests = workspace(&[("qwill-model", &[("qwill-cpu", Some("dev"))]), ("qwill-cpu", &[])]);
        assert_eq!(check(&for_tests).unwrap(), Violations::new());
        let always = workspace(&[("qwill-model", &[("qwill-cpu", None)]), ("qwill-cpu", &[])]);
        assert_eq!(check(&always).unwrap().len(), 1);
        let build = workspace(&[("qwill-model", &[("qwill-cpu", Some("build"))]), ("qwill-cpu", &[])]);
        assert_eq!(check(&build).unwrap().len(), 1);
    }

    #[test]
    fn the_engine_stays_synchronous() {
        let metadata = workspace(&[("qwill-engine", &[("tokio", None)])]);
        assert_eq!(check(&metadata).unwrap().len(), 1);
        let metadata = workspace(&[("qwill-server", &[("tokio", None), ("axum", None)])]);
        assert_eq!(check(&metadata).unwrap(), Violations::new());
    }

    #[test]
    fn an_unknown_member_is_refused() {
        let metadata = workspace(&[("qwill-extra", &[])]);
        assert_eq!(check(&metadata).unwrap().len(), 1);
    }
}
