//! `qwill launch`: a client's settings for a running server, printed, written, or used to start the client.

pub(crate) mod clients;
mod plan;
mod write;

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context, Result};

use crate::args::LaunchArgs;
use crate::client::Client as Server;
use crate::failure::Hinted;
use plan::{Facts, Plan};
use write::Change;

/// Asks the server what there is, then does what the flags say.
pub(crate) fn run(arguments: &LaunchArgs) -> Result<()> {
    let client = clients::named(&arguments.client).context("no such client")?;
    let server = Server::new(&arguments.url, arguments.api_key.clone())?;
    let facts = Facts::of(&server, arguments)?;
    let plan = Plan::new(client, &facts)?;
    if !arguments.write && !arguments.dry_run && !arguments.run {
        return Ok(std::io::stdout().write_all(plan.to_string().as_bytes())?);
    }
    for change in changes(&plan, arguments)? {
        print!("{}", change.describe());
        if !arguments.dry_run {
            print!("{}", change.apply()?);
        }
    }
    std::io::stdout().flush()?;
    if arguments.run {
        return start(&plan, &arguments.more);
    }
    if !arguments.dry_run {
        println!("{}", plan.next_step());
    }
    Ok(())
}

/// Files that are the user's own are touched only when that was asked for; a start needs no script.
fn changes(plan: &Plan, arguments: &LaunchArgs) -> Result<Vec<Change>> {
    let wants_all = arguments.write || arguments.dry_run;
    let mut changes = Vec::new();
    if let Some(file) = plan.file.as_ref().filter(|file| wants_all || !file.is_shared) {
        changes.push(if file.is_shared {
            Change::merging(&file.path, &file.text)?
        } else {
            Change::replacing(&file.path, &file.text)?
        });
    }
    if let Some(script) = plan.script.as_ref().filter(|_| wants_all) {
        changes.push(Change::replacing(&script.path, &script.text)?);
    }
    Ok(changes)
}

/// Becomes the client.
fn start(plan: &Plan, more: &[String]) -> Result<()> {
    let program = plan.client.program;
    if program.is_empty() {
        let hint = "print its settings with `qwill launch` and use them in your own program";
        return Err(Hinted::error(format!("{} is nothing that can be started", plan.client.title), hint));
    }
    let missing = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => Hinted::error(
            format!("{program} is not installed"),
            format!("install it: {}", plan.client.install),
        ),
        _ => anyhow::Error::new(error).context(format!("starting {program}")),
    };
    if !plan.setup.is_empty() {
        let status = Command::new(program).args(&plan.setup).status().map_err(missing)?;
        if !status.success() {
            let shown = format!("{program} {} failed: {status}", plan.client.setup.first().unwrap_or(&""));
            return Err(Hinted::error(shown, "its own messages stand above"));
        }
    }
    let variables = plan.variables.iter().map(|(name, value)| (*name, value));
    let error = Command::new(program).envs(variables).args(&plan.arguments).args(more).exec();
    Err(missing(error))
}
