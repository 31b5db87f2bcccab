//! `qwill bench serve`: a running server, measured over HTTP.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use qwill_bench::protocol::Overrides;
use qwill_bench::{Options, Report};

use super::progress::Progress;
use crate::args::BenchServeArgs;
use crate::failure::Hinted;

/// Measures, writes what was asked for, and fails when a request did.
pub(crate) fn run(arguments: &BenchServeArgs) -> Result<()> {
    // A path that cannot be written should fail now, not after an hour.
    for path in
        [&arguments.json, &arguments.svg].into_iter().flatten().filter(|path| !is_standard_output(path))
    {
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| path.display().to_string())?;
    }
    let report = qwill_bench::measure(&options(arguments)?, Arc::new(Progress::new()))?;
    write(arguments, &report)?;
    if report.interrupted {
        return Err(Hinted::error("interrupted", "the report has the rows that were complete"));
    }
    match report.failures() {
        (0, _) => Ok(()),
        (failed, all) => Err(Hinted::error(
            format!("{failed} of {all} requests failed"),
            "the reasons are below the table; figures are of the others alone",
        )),
    }
}

fn options(arguments: &BenchServeArgs) -> Result<Options> {
    Ok(Options {
        url: arguments.url.clone(),
        key: key(&arguments.api_key_env)?,
        model: arguments.model.clone(),
        dialect: arguments.endpoint.into(),
        protocols: arguments.protocol.iter().map(|&choice| choice.into()).collect(),
        overrides: Overrides {
            concurrency: arguments.concurrency.clone(),
            requests: arguments.requests,
            prompt_tokens: arguments.prompt_tokens.clone(),
            output_tokens: arguments.output_tokens,
        },
        temperature: arguments.temperature.map(f64::from),
        warm_up_requests: arguments.warm_up,
        seed: arguments.seed.unwrap_or_else(clock_seed),
        timeout: Duration::from_secs(arguments.timeout as u64),
        client_version: format!("qwill {}", crate::VERSION),
        // Keys come from the environment, so the command line has none.
        command: std::env::args().collect(),
    })
}

/// The server's key; none when the variable is missing or empty.
fn key(variable: &str) -> Result<Option<String>> {
    match std::env::var(variable) {
        Ok(key) => Ok(Some(key).filter(|key| !key.is_empty())),
        Err(std::env::VarError::NotPresent) if variable == crate::env::API_KEY => Ok(None),
        Err(error) => Err(Hinted::error(
            format!("--api-key-env {variable}: {error}"),
            "export the variable with the server's key, or leave the flag out",
        )),
    }
}

fn clock_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn is_standard_output(path: &Path) -> bool {
    path == Path::new("-")
}

fn write(arguments: &BenchServeArgs, report: &Report) -> Result<()> {
    let table = qwill_bench::table(report);
    let json_to_standard_output = arguments.json.as_deref().is_some_and(is_standard_output);
    if json_to_standard_output {
        eprint!("{table}");
    } else {
        std::io::stdout().write_all(table.as_bytes())?;
    }
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string(report).context("the report as JSON")? + "\n";
        if json_to_standard_output {
            std::io::stdout().write_all(text.as_bytes())?;
        } else {
            std::fs::write(path, text).with_context(|| path.display().to_string())?;
        }
    }
    if let Some(path) = &arguments.svg {
        let text = qwill_bench::figure(report).to_svg();
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
