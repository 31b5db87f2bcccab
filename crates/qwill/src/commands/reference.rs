//! `qwill generate-reference`: the reference page, from the definitions that parse the command line.

use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::Result;
use clap::{Arg, ArgAction, Command};

use crate::args::Cli;
use crate::settings;

/// Prints the page.
pub(crate) fn run() -> Result<()> {
    std::io::stdout().write_all(page().as_bytes())?;
    Ok(())
}

fn page() -> String {
    let mut text = String::from(
        "# Reference\n\nEvery command, flag, environment variable and configuration key. This page is generated from the \
         definitions that parse the command line (`cargo xtask docs`). A flag wins over its variable, a variable over the \
         file that `qwill serve --config` names, the file over the default. Where a column \"key\" has a name, the setting \
         can stand in that file, with dashes or underscores.\n",
    );
    for command in Cli::commands().iter().filter(|command| !command.is_hide_set()) {
        write_command(&mut text, command);
    }
    text
}

fn write_command(text: &mut String, command: &Command) {
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    let _ = write!(text, "\n## {}\n\n{about}\n", command.get_bin_name().unwrap_or_default());
    let mut headings: Vec<&str> = Vec::new();
    for argument in visible(command) {
        let heading = heading(argument);
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }
    for wanted in headings {
        let _ = write!(
            text,
            "\n### {wanted}\n\n| | variable | key | default | takes | |\n| --- | --- | --- | --- | --- | --- |\n"
        );
        for argument in visible(command).filter(|argument| heading(argument) == wanted) {
            let is_key = settings::has_settings(command) && settings::is_setting(argument);
            let _ = writeln!(
                text,
                "| `{}` | {} | {} | {} | {} | {} |",
                spelling(argument),
                argument.get_env().map_or(String::new(), |name| format!("`{}`", name.to_string_lossy())),
                if is_key { format!("`{}`", settings::key(argument)) } else { String::new() },
                default_of(argument),
                takes(argument, is_key),
                help_of(argument)
            );
        }
    }
}

fn visible(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|argument| !argument.is_hide_set() && argument.get_id() != "help")
}

fn heading(argument: &Arg) -> &str {
    argument.get_help_heading().unwrap_or("Arguments")
}

/// `--port <PORT>`, `--strict-params`, `[MODEL_DIR]`.
fn spelling(argument: &Arg) -> String {
    let value = argument.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str());
    match argument.get_long() {
        None => format!("[{value}]"),
        Some(long) if matches!(argument.get_action(), ArgAction::SetTrue) => format!("--{long}"),
        Some(long) => format!("--{long} <{value}>"),
    }
}

fn default_of(argument: &Arg) -> String {
    // A switch has the default `false`, which says nothing.
    if matches!(argument.get_action(), ArgAction::SetTrue) {
        return String::new();
    }
    argument
        .get_default_values()
        .first()
        .map_or(String::new(), |value| format!("`{}`", value.to_string_lossy()))
}

fn help_of(argument: &Arg) -> String {
    let mut help = argument.get_help().map(ToString::to_string).unwrap_or_default().replace('\n', " ");
    let choices: Vec<String> = argument
        .get_possible_values()
        .iter()
        .filter(|_| !matches!(argument.get_action(), ArgAction::SetTrue))
        .map(|choice| match choice.get_help() {
            Some(help) => format!("`{}` ({})", choice.get_name(), lower_first(&help.to_string())),
            None => format!("`{}`", choice.get_name()),
        })
        .collect();
    if !choices.is_empty() {
        let _ = write!(help, ": {}", choices.join(", "));
    }
    help.replace('|', "\\|")
}

/// What is taken; choices stand in the help, with what they mean.
fn takes(argument: &Arg, is_key: bool) -> String {
    let has_choices = !argument.get_possible_values().is_empty();
    let is_switch = matches!(argument.get_action(), ArgAction::SetTrue);
    if (has_choices && !is_switch) || (is_switch && !is_key) {
        String::new()
    } else {
        settings::range(argument).replace('|', "\\|")
    }
}

fn lower_first(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map_or(String::new(), |first| first.to_lowercase().chain(characters).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_every_visible_flag_and_variable() {
        let page = page();
        for command in Cli::commands().iter().filter(|command| !command.is_hide_set()) {
            for flag in visible(command).filter_map(Arg::get_long) {
                assert!(page.contains(&format!("`--{flag}")), "--{flag}");
            }
        }
        for name in crate::env::ALL {
            assert!(page.contains(&format!("`{name}`")), "{name}");
        }
        assert!(!page.contains("generate-reference"));
    }
}
