//! The board in `deploy/` asks for metrics that there are.

use serde_json::{Value, json};

use crate::faults::long_answer;
use crate::harness::{Running, root};

/// Names of metrics in an expression of `PromQL`.
fn names(expression: &str) -> Vec<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    expression
        .split(|c| !is_name(c))
        .filter(|word| word.starts_with("qwill_") || word.starts_with("vllm:"))
        .collect()
}

#[test]
fn every_expression_uses_metrics_that_exist() {
    let board = std::fs::read_to_string(root().join("deploy/grafana.json")).unwrap();
    let board: Value = serde_json::from_str(&board).unwrap();
    let panels = board["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let mut expressions: Vec<&str> = targets.map(|target| target["expr"].as_str().unwrap()).collect();
    let variables = board["templating"]["list"].as_array().unwrap();
    expressions.extend(variables.iter().filter_map(|variable| variable["definition"].as_str()));
    assert!(expressions.len() > 30, "{expressions:?}");

    // A failed step is counted as well, so that everything that can be there is.
    let server = Running::start(&["--fault", "once:20"]);
    let _: Vec<String> = server.stream("/v1/completions", &long_answer()).collect();
    server.post("/v1/completions", &json!({"prompt": "The capital", "max_tokens": 3}));
    let (_, text) = server.get("/metrics");
    let types: Vec<(&str, &str)> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
    for expression in expressions {
        let names = names(expression);
        assert!(!names.is_empty(), "no metric in {expression}");
        for name in names {
            let is_it = |(family, kind): &(&str, &str)| match *kind {
                "histogram" => ["_bucket", "_sum", "_count"]
                    .iter()
                    .any(|suffix| name.strip_suffix(suffix) == Some(family)),
                _ => name == *family,
            };
            assert!(types.iter().any(is_it), "there is no {name}, which the board has in {expression}");
        }
    }
}
