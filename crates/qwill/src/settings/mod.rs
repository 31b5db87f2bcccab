//! What `serve` runs with: the command line before the environment, before a file, before defaults.
//!
//! A setting is defined once, as a flag. Its variable and its key in the file follow from the flag's name, and whatever
//! stands in either is checked by the flag's own parser.

mod error;
mod file;
mod range;

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use clap::builder::Resettable;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};

use crate::args::{self, Cli};
use crate::env;
use error::SettingError;
use file::Entry;
pub(crate) use range::range;

/// The command that has settings.
const SERVE: &str = "serve";

/// Flags of `serve` that say what to do, not how to serve.
const ACTIONS: [&str; 4] = ["config", "check", "json", "help"];

/// Variables of Qwill that are no setting: where a library is looked for.
const OTHER_VARIABLES: [&str; 1] = ["QWILL_NVRTC"];

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The command line.
    Flag,
    /// A variable of the environment.
    Variable,
    /// This line of the file.
    File(usize),
    /// Nobody has said anything.
    Default,
}

/// A setting with what it came to.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    /// Its key in a file.
    pub(crate) key: String,
    /// What it belongs to.
    pub(crate) heading: String,
    /// Its values as text; empty where the program decides.
    pub(crate) values: Vec<String>,
    /// Where they come from.
    pub(crate) origin: Origin,
    /// They are nobody's business.
    pub(crate) is_secret: bool,
}

/// The settings of a run, in the order of their flags.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    /// The file that was read.
    pub(crate) file: Option<PathBuf>,
    /// Each of them.
    pub(crate) all: Vec<Setting>,
}

/// Whether this is the command whose flags are settings.
pub(crate) fn has_settings(command: &Command) -> bool {
    command.get_bin_name() == Some("qwill serve")
}

/// Whether a flag of `serve` is a setting, which has a variable and a key.
pub(crate) fn is_setting(argument: &Arg) -> bool {
    !argument.is_hide_set() && !ACTIONS.contains(&argument.get_id().as_str())
}

/// A setting's name in a file: the flag's.
pub(crate) fn key(argument: &Arg) -> String {
    argument.get_long().map_or_else(|| argument.get_id().as_str().replace('_', "-"), str::to_owned)
}

/// A setting's name in the environment.
pub(crate) fn variable(argument: &Arg) -> String {
    format!("QWILL_{}", key(argument).to_uppercase().replace('-', "_"))
}

/// Names that look like settings and are none: a wrong one would otherwise be ignored without a word.
pub(crate) fn unknown_variables() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let known = |name: &String| env::ALL.contains(&&**name) || OTHER_VARIABLES.contains(&&**name);
    let mut unknown: Vec<String> = names.filter(|name| name.starts_with("QWILL_") && !known(name)).collect();
    unknown.sort();
    unknown
}

/// Reads the command line; that of `serve` together with the environment and the file.
pub(crate) fn parse(typed: &[OsString]) -> Result<Cli, clap::Error> {
    if typed.get(1).is_some_and(|word| word == SERVE) {
        return Merge::new(typed).run();
    }
    let mut definition = Cli::definition();
    let matches = definition.try_get_matches_from_mut(typed)?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut definition))
}

/// Putting the layers on top of one another.
struct Merge<'a> {
    typed: &'a [OsString],
    /// The command line as it is defined.
    strict: Command,
    /// The same without variables, and without what flags demand of each other: for looking at one layer alone.
    loose: Command,
}

impl<'a> Merge<'a> {
    fn new(typed: &'a [OsString]) -> Self {
        let mut strict = Cli::definition();
        strict.build();
        let loose = Cli::definition().mut_subcommand(SERVE, |serve| serve.mut_args(alone));
        Self { typed, strict, loose }
    }

    fn run(mut self) -> Result<Cli, clap::Error> {
        let Ok(typed) = self.loose.clone().try_get_matches_from(self.typed) else {
            // Said as the whole definition says it, which also answers --help.
            let matches = self.strict.clone().try_get_matches_from(self.typed)?;
            return Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut self.strict));
        };
        let is_typed = |id: &str| typed_of(&typed, id);
        self.check_variables(&is_typed)?;
        let file = below(&typed).and_then(|serve| serve.get_one::<PathBuf>("config").cloned());
        let file = file.or_else(|| std::env::var_os(env::CONFIG).map(PathBuf::from));
        let entries = match &file {
            Some(path) => file::read(path, self.serve(), &|argument, values| self.check(argument, values))?,
            None => Vec::new(),
        };
        let is_below = |entry: &Entry| !is_typed(&entry.id) && !self.is_in_environment(&entry.id);
        let entries: Vec<Entry> = entries.into_iter().filter(is_below).collect();

        let mut whole = self.typed.to_vec();
        whole.splice(2..2, entries.iter().flat_map(|entry| entry.arguments.clone()));
        let matches = self.strict.clone().try_get_matches_from(whole);
        let matches = matches.map_err(|error| self.explain(error, file.as_ref(), &entries, &is_typed))?;
        let mut cli = Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut self.strict))?;
        if let args::Command::Serve(arguments) = &mut cli.command {
            arguments.settings = Settings { all: self.table(&matches, &entries), file };
        }
        Ok(cli)
    }

    /// The definition of `serve`.
    fn serve(&self) -> &Command {
        self.strict.find_subcommand(SERVE).unwrap_or(&self.strict)
    }

    fn settings(&self) -> impl Iterator<Item = &Arg> {
        self.serve().get_arguments().filter(|argument| is_setting(argument))
    }

    fn is_in_environment(&self, id: &str) -> bool {
        self.settings()
            .any(|argument| argument.get_id() == id && std::env::var_os(variable(argument)).is_some())
    }

    /// What is wrong with these values of a setting, in the words of its own parser.
    fn check(&self, argument: &Arg, values: &[String]) -> Result<Vec<OsString>, String> {
        let arguments = as_typed(argument, values)?;
        let words = ["qwill", SERVE].into_iter().map(OsString::from).chain(arguments.iter().cloned());
        match self.loose.clone().try_get_matches_from(words) {
            Ok(_) => Ok(arguments),
            Err(error) => Err(error::reason(&error)),
        }
    }

    /// A wrong value is told with the variable's name, not with the flag's that nobody has typed.
    fn check_variables(&self, is_typed: &dyn Fn(&str) -> bool) -> Result<(), SettingError> {
        for argument in self.settings().filter(|argument| !is_typed(argument.get_id().as_str())) {
            let name = variable(argument);
            let Some(value) = std::env::var_os(&name) else { continue };
            let Ok(value) = value.into_string() else { return Err(SettingError::NoText { name }) };
            if let Err(reason) = self.check(argument, std::slice::from_ref(&value)) {
                let value = if argument.is_hide_env_values_set() { "(hidden)".to_owned() } else { value };
                return Err(SettingError::Variable { name, value, reason });
            }
        }
        Ok(())
    }

    /// Settings that do not go together may come from different places: which, clap does not know.
    fn explain(
        &self,
        error: clap::Error,
        file: Option<&PathBuf>,
        entries: &[Entry],
        is_typed: &dyn Fn(&str) -> bool,
    ) -> clap::Error {
        if !matches!(error.kind(), ErrorKind::ArgumentConflict | ErrorKind::MissingRequiredArgument) {
            return error;
        }
        let mut elsewhere: Vec<String> = self
            .settings()
            .filter(|argument| !is_typed(argument.get_id().as_str()))
            .map(variable)
            .filter(|name| std::env::var_os(name).is_some())
            .collect();
        if let (Some(file), false) = (file, entries.is_empty()) {
            let keys: Vec<&str> = entries.iter().map(|entry| entry.key.as_str()).collect();
            elsewhere.push(format!("{} ({})", file.display(), keys.join(", ")));
        }
        if elsewhere.is_empty() {
            return error;
        }
        let text = error.to_string();
        let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
        clap::Error::raw(error.kind(), format!("{text}\n\nalso set: {}\n", elsewhere.join(", ")))
    }

    fn table(&self, matches: &ArgMatches, entries: &[Entry]) -> Vec<Setting> {
        let Some(matches) = below(matches) else { return Vec::new() };
        let of = |argument: &Arg| {
            let id = argument.get_id().as_str();
            let entry = entries.iter().find(|entry| entry.id == id);
            let origin = match (entry, matches.value_source(id)) {
                (Some(entry), _) => Origin::File(entry.line),
                (None, Some(ValueSource::CommandLine)) => Origin::Flag,
                (None, Some(ValueSource::EnvVariable)) => Origin::Variable,
                _ => Origin::Default,
            };
            let values = matches.get_raw(id).into_iter().flatten();
            Setting {
                key: key(argument),
                heading: argument.get_help_heading().unwrap_or("Model").to_owned(),
                values: values.map(|value| value.to_string_lossy().into_owned()).collect(),
                origin,
                is_secret: argument.is_hide_env_values_set(),
            }
        };
        let (first, others): (Vec<&Arg>, Vec<&Arg>) = self.settings().partition(|one| one.is_positional());
        first.into_iter().chain(others).map(of).collect()
    }
}

impl Setting {
    /// Its values for people; secrets are counted, not shown.
    pub(crate) fn shown(&self) -> String {
        match (self.is_secret, self.values.as_slice()) {
            (_, []) => "-".to_owned(),
            (true, values) => format!("({} hidden)", values.len()),
            (false, values) => values.join(", "),
        }
    }
}

impl Settings {
    /// A setting's origin in words: `--port`, `QWILL_PORT`, `qwill.toml:3`, `default`.
    pub(crate) fn origin(&self, setting: &Setting) -> String {
        let key = &setting.key;
        match (&setting.origin, &self.file) {
            (Origin::Flag, _) => format!("--{key}"),
            (Origin::Variable, _) => format!("QWILL_{}", key.to_uppercase().replace('-', "_")),
            (Origin::File(line), Some(path)) => format!("{}:{line}", path.display()),
            (Origin::File(_) | Origin::Default, _) => "default".to_owned(),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Self::Flag => "flag",
            Self::Variable => "environment",
            Self::File(_) => "file",
            Self::Default => "default",
        })
    }
}

/// A flag without its variable, and without what it demands of others.
fn alone(argument: Arg) -> Arg {
    argument.env(Resettable::Reset).requires(Resettable::Reset).conflicts_with(Resettable::Reset)
}

/// What was matched of `serve`.
fn below(matches: &ArgMatches) -> Option<&ArgMatches> {
    matches.subcommand().map(|(_, below)| below)
}

fn typed_of(matches: &ArgMatches, id: &str) -> bool {
    below(matches).is_some_and(|serve| serve.value_source(id) == Some(ValueSource::CommandLine))
}

/// Values as they would be typed.
fn as_typed(argument: &Arg, values: &[String]) -> Result<Vec<OsString>, String> {
    let Some(long) = argument.get_long() else {
        return Ok(values.iter().map(OsString::from).collect());
    };
    if matches!(argument.get_action(), ArgAction::SetTrue) {
        return match values {
            [value] if value == "true" => Ok(vec![format!("--{long}").into()]),
            [value] if value == "false" => Ok(Vec::new()),
            _ => Err("expected true or false".to_owned()),
        };
    }
    if values.len() != 1 && !matches!(argument.get_action(), ArgAction::Append) {
        return Err("expected one value".to_owned());
    }
    Ok(values.iter().map(|value| format!("--{long}={value}").into()).collect())
}

#[cfg(test)]
mod tests;
