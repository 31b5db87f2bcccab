//! Errors as people read them: what was attempted, why it failed, what to do about it.

use std::fmt::{self, Write as _};

use anyhow::Error;
use qwill_bench::BenchError;
use qwill_model::ModelError;
use qwill_weights::WeightsError;

use crate::gpu::GpuError;
use crate::terminal;

/// An error of the binary itself, with advice.
#[derive(Debug)]
pub(crate) struct Hinted {
    message: String,
    hint: String,
}

impl Hinted {
    /// `message` says what is wrong, `hint` what would help.
    pub(crate) fn error(message: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::new(Self { message: message.into(), hint: hint.into() })
    }

    /// The same about an error that has happened.
    pub(crate) fn around(error: Error, message: impl Into<String>, hint: impl Into<String>) -> Error {
        error.context(Self { message: message.into(), hint: hint.into() })
    }
}

impl fmt::Display for Hinted {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.message)
    }
}

impl std::error::Error for Hinted {}

/// The whole message for standard error: the chain of causes, one a line, then the advice.
pub(crate) fn render(error: &Error) -> String {
    let mut text = format!("{} {error}\n", terminal::alarm("error:"));
    let mut previous = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        // A transparent wrapper repeats what it wraps.
        if previous != cause {
            let _ = writeln!(text, "  caused by: {cause}");
        }
        previous = cause;
    }
    if let Some(hint) = hint(error) {
        let _ = writeln!(text, "  {} {hint}", terminal::advice("hint:"));
    }
    text
}

/// The first advice along the chain.
pub(crate) fn hint(error: &Error) -> Option<String> {
    // Also where it is the context of another error, which the chain does not show.
    if let Some(hinted) = error.downcast_ref::<Hinted>() {
        return Some(hinted.hint.clone());
    }
    error.chain().find_map(|cause| {
        if let Some(gpu) = cause.downcast_ref::<GpuError>() {
            return Some(gpu.hint().to_owned());
        }
        if let Some(bench) = cause.downcast_ref::<BenchError>() {
            return bench.hint().map(str::to_owned);
        }
        let weights = match cause.downcast_ref::<ModelError>() {
            Some(ModelError::Weights(weights)) => Some(weights),
            _ => cause.downcast_ref::<WeightsError>(),
        };
        weights.and_then(WeightsError::hint).map(str::to_owned)
    })
}

/// Whether the reader of standard output went away: `qwill plan | head` is no failure.
pub(crate) fn is_broken_pipe(error: &Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn causes_and_advice_follow_the_message() {
        let error = Err::<(), _>(Hinted::error("the port is taken", "choose another"))
            .context("cannot listen")
            .context("cannot serve")
            .unwrap_err();
        assert_eq!(
            render(&error),
            "error: cannot serve\n  caused by: cannot listen\n  caused by: the port is taken\n  hint: choose another\n"
        );
    }

    #[test]
    fn advice_around_an_error_precedes_its_causes() {
        let error =
            Hinted::around(anyhow::anyhow!("too large").context("no plan"), "others hold it", "end them");
        assert_eq!(
            render(&error),
            "error: others hold it\n  caused by: no plan\n  caused by: too large\n  hint: end them\n"
        );
    }

    #[test]
    fn a_weights_error_brings_its_own_advice_through_the_model_error() {
        let weights = WeightsError::Json { file: "config.json".into(), reason: "line 1".into() };
        let error = Error::new(ModelError::from(weights)).context("cannot load");
        let text = render(&error);
        assert_eq!(text.matches("config.json: not valid JSON").count(), 1, "{text}");
        assert!(text.contains("hint: the file is damaged"), "{text}");
    }

    #[test]
    fn a_broken_pipe_is_found_along_the_chain() {
        let error = Error::new(std::io::Error::from(std::io::ErrorKind::BrokenPipe)).context("writing");
        assert!(is_broken_pipe(&error));
        assert!(!is_broken_pipe(&Hinted::error("a", "b")));
    }
}
