//! The `qwill` binary: one file per command, everything else in the crates below it.

mod args;
mod client;
mod commands;
mod device;
mod embedded;
mod env;
mod failure;
mod fault;
mod gpu;
mod launch;
mod logging;
mod planning;
mod progress;
mod screen;
mod source;
mod terminal;
mod units;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

/// Version and, when built from a clone, the commit.
const VERSION: &str = std::env!("QWILL_VERSION");

fn main() -> ExitCode {
    // clap itself ends with code 2 on a usage error and with 0 after --help and --version.
    let cli = Cli::parse();
    let result = match cli.command {
        Command::Serve(arguments) => commands::serve::run(&arguments),
        Command::Chat(arguments) => commands::chat::run(&arguments),
        Command::Plan(arguments) => commands::plan::run(&arguments),
        Command::Bench(arguments) => commands::bench::run(&arguments),
        Command::Doctor(arguments) => commands::doctor::run(&arguments),
        Command::GenerateReference => commands::reference::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if failure::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprint!("{}", failure::render(&error));
            ExitCode::FAILURE
        }
    }
}
