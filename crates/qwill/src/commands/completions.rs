//! `qwill completions`: what a shell needs to complete commands, flags and their values.

use std::io::Write;

use anyhow::Result;

use crate::args::{Cli, CompletionsArgs};

/// Prints the script.
pub(crate) fn run(arguments: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Cli::definition(), "qwill", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(())
}
