//! `qwill bench`: one file per measurement.

mod progress;
mod serve;
mod steps;

use anyhow::Result;

use crate::args::{BenchArgs, BenchCommand};

/// Runs the measurement that was asked for.
pub(crate) fn run(arguments: &BenchArgs) -> Result<()> {
    match &arguments.command {
        BenchCommand::Serve(arguments) => serve::run(arguments),
        BenchCommand::Steps(arguments) => steps::run(arguments),
    }
}
