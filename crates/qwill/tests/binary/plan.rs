//! The plan as printed.

use serde_json::Value;

use crate::harness::run;

fn stdout(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_27b_model_in_24_gib() {
    insta::assert_snapshot!(stdout(&[
        "plan",
        "--geometry",
        "27b",
        "--gpu",
        "24GiB",
        "--quantize",
        "int4",
        "--kv-type",
        "bf16"
    ]));
}

#[test]
fn a_27b_model_does_not_fit_8_gib() {
    let output = run(&["plan", "--geometry", "27b", "--gpu", "8GiB", "--quantize", "int4"]);
    assert_eq!(output.status.code(), Some(1));
    insta::assert_snapshot!(String::from_utf8(output.stderr).unwrap());
}

#[test]
fn a_budget_can_take_less_of_a_card() {
    let budget = |memory: &str| {
        let arguments = ["plan", "--geometry", "4b", "--gpu", "24GiB", "--gpu-memory", memory, "--json"];
        serde_json::from_str::<Value>(&stdout(&arguments)).unwrap()["budget_bytes"].as_u64()
    };
    assert_eq!(budget("20GiB"), Some(20 << 30));
    assert_eq!(budget("30GiB"), Some(24 << 30));
}

#[test]
fn the_json_adds_up() {
    let arguments = ["plan", "--memory", "1GiB", "--max-sequences", "3", "--max-context", "4096", "--json"];
    let plan: Value = serde_json::from_str(&stdout(&arguments)).unwrap();
    let number = |name: &str| plan[name].as_u64().unwrap();
    let rows: u64 = plan["rows"].as_array().unwrap().iter().map(|row| row["bytes"].as_u64().unwrap()).sum();
    assert_eq!(rows, number("total_bytes"));
    assert_eq!(number("total_bytes") + number("left_bytes"), number("budget_bytes"));
    assert_eq!(number("budget_bytes"), 1 << 30);
    assert_eq!((number("max_sequences"), number("max_context_tokens")), (3, 4096));
    assert!(number("kv_tokens") >= 4096);
    // The model card's number, but for what the MTP module shares.
    assert_eq!(number("parameters"), 13_819_720);
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    use std::process::Stdio;
    let mut child = crate::harness::qwill(&["plan", "--memory", "1GiB", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
