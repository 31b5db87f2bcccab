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
mod report;
mod screen;
mod settings;
mod source;
mod supervisor;
mod terminal;
mod units;

use std::ffi::OsString;
use std::process::ExitCode;

use args::Command;

/// Version and, when built from a clone, the commit.
const VERSION: &str = std::env!("QWILL_VERSION");

fn main() -> ExitCode {
    // Ends with code 2 when a flag, a variable or the file is wrong, and with 0 after --help and --version.
    let typed: Vec<OsString> = std::env::args_os().collect();
    let cli = settings::parse(&typed).unwrap_or_else(|error| error.exit());
    let result = match cli.command {
        Command::Serve(arguments) => commands::serve::run(&arguments),
        Command::Chat(arguments) => commands::chat::run(&arguments),
        Command::Plan(arguments) => commands::plan::run(&arguments),
        Command::Bench(arguments) => commands::bench::run(&arguments),
        Command::Doctor(arguments) => commands::doctor::run(&arguments),
        Command::Launch(arguments) => commands::launch::run(&arguments),
        Command::Health(arguments) => commands::health::run(&arguments),
        Command::Completions(arguments) => commands::completions::run(&arguments),
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
