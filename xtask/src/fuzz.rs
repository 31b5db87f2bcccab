//! Random inputs, for as long as one likes, to everything that reads what a model or a client wrote.

use anyhow::{Context, Result, bail};

use crate::build;

/// Name of each target, and the test that it is, of the whole workspace, so that nothing is built with other features
/// than for a normal test run. That gives each some hundred inputs.
const TARGETS: [(&str, &[&str]); 5] = [
    ("reasoning", &["--test", "fuzz", "reasoning"]),
    ("tool-calls", &["--test", "fuzz", "tool_calls"]),
    ("stop-strings", &["--test", "fuzz", "stop_strings"]),
    ("detokenizer", &["--test", "fuzz", "detokenizer"]),
    ("bodies", &["--test", "server", "fuzz::bodies"]),
];

/// Where the tests read how long they are to go on.
const SECONDS: &str = "QWILL_FUZZ_SECONDS";

/// Runs targets one after the other: `[--seconds N] [TARGET...]`, all when none is named.
pub fn run(arguments: &[&str]) -> Result<()> {
    let (seconds, names) = match arguments {
        ["--seconds", seconds, names @ ..] => (*seconds, names),
        names => ("60", names),
    };
    seconds.parse::<u64>().with_context(|| format!("--seconds {seconds} is no whole number"))?;
    let known = TARGETS.map(|(name, _)| name);
    if let Some(name) = names.iter().find(|name| !known.contains(name)) {
        bail!("no target is called {name}; there are {}", known.join(", "));
    }
    for (name, test) in TARGETS.into_iter().filter(|(name, _)| names.is_empty() || names.contains(name)) {
        println!("==> {name}: {seconds} s");
        let mut command = build::cargo();
        command
            .args(["test", "--workspace"])
            .args(test)
            .args(["--", "--exact", "--nocapture"])
            .env(SECONDS, seconds);
        build::run(&mut command, &format!("fuzz target `{name}`"))?;
    }
    Ok(())
}
