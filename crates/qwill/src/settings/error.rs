//! What can be wrong with a setting that is not typed as a flag.

use std::error::Error as _;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use thiserror::Error;

/// Each ends the process with the code of a usage error.
#[derive(Debug, Error)]
pub(super) enum SettingError {
    #[error("{name} is not valid UTF-8")]
    NoText { name: String },
    #[error("{name}={value}: {reason}")]
    Variable { name: String, value: String, reason: String },
    #[error("{}: {reason}", path.display())]
    Unreadable { path: PathBuf, reason: std::io::Error },
    #[error("{}:{line}: {reason}", path.display())]
    Syntax { path: PathBuf, line: usize, reason: String },
    #[error("{}:{line}: there is no setting `{key}`{}", path.display(), advice(nearest.as_deref()))]
    UnknownKey { path: PathBuf, line: usize, key: String, nearest: Option<String> },
    #[error("{}:{line}: `{key}` stands here a second time, once with - and once with _", path.display())]
    Twice { path: PathBuf, line: usize, key: String },
    #[error("{}:{line}: {key} = {value}: {reason}", path.display())]
    Value { path: PathBuf, line: usize, key: String, value: String, reason: String },
}

fn advice(nearest: Option<&str>) -> String {
    nearest.map_or_else(
        || "; keys are the flags of `qwill serve` without the dashes before them".to_owned(),
        |nearest| format!(": did you mean `{nearest}`?"),
    )
}

impl From<SettingError> for clap::Error {
    fn from(error: SettingError) -> Self {
        Self::raw(ErrorKind::ValueValidation, format!("{error}\n"))
    }
}

/// Why a value was refused, without the flag's name.
pub(super) fn reason(error: &clap::Error) -> String {
    if let Some(cause) = error.source() {
        return cause.to_string();
    }
    match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(choices)) if !choices.is_empty() => {
            format!("expected one of {}", choices.join(", "))
        }
        _ => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            first.strip_prefix("error: ").unwrap_or(first).to_owned()
        }
    }
}
