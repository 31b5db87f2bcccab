//! The log: standard error, text or JSON.

use std::io::IsTerminal;

use anyhow::Result;
use tracing_subscriber::EnvFilter;

use crate::args::{LogArgs, LogFormat};
use crate::failure::Hinted;

/// What is logged.
pub(crate) fn filter(arguments: &LogArgs) -> Result<EnvFilter> {
    EnvFilter::try_new(&arguments.log_level).map_err(|error| {
        Hinted::error(
            format!("--log-level `{}`: {error}", arguments.log_level),
            "write error, warn, info, debug or trace, or directives such as `info,qwill_engine=debug`",
        )
    })
}

/// Starts logging for the whole process.
pub(crate) fn start(arguments: &LogArgs) -> Result<()> {
    let filter = filter(arguments)?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none());
    let started = match arguments.log_format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).with_current_span(false).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("cannot start the log: {error}"))
}
