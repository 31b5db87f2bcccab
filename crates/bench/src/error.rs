//! What can go wrong while a server is measured.

use std::fmt::Write as _;

use thiserror::Error;

/// A failure that leaves nothing to measure, or the reason why one request failed.
#[derive(Debug, Error)]
pub enum BenchError {
    /// The address cannot be used.
    #[error("`{url}` cannot be measured: {reason}")]
    Url {
        /// As given.
        url: String,
        /// What is wrong with it.
        reason: &'static str,
        /// What to write instead.
        hint: &'static str,
    },
    /// No connection.
    #[error("cannot connect to {address}")]
    Connect {
        /// Host and port.
        address: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The connection failed while it was used.
    #[error("the connection failed while {action}")]
    Http {
        /// What was being done.
        action: &'static str,
        /// The protocol's reason.
        source: hyper::Error,
    },
    /// The server refused.
    #[error("the server answered {status} to {path}: {message}")]
    Status {
        /// The path asked for.
        path: String,
        /// HTTP status.
        status: u16,
        /// The error's message, or the body.
        message: String,
    },
    /// The model is not served.
    #[error("the server does not serve `{model}`: it lists {listed}")]
    UnknownModel {
        /// As asked.
        model: String,
        /// What it serves, separated by commas.
        listed: String,
    },
    /// An answer that is none.
    #[error("{what} cannot be read: {reason}")]
    Answer {
        /// Which answer.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// The server reported an error within a stream.
    #[error("the server reports: {message}")]
    Reported {
        /// Its message.
        message: String,
    },
    /// The stream ended without its end mark.
    #[error("the connection ended before the answer did")]
    Cut,
    /// The stream ended without token counts.
    #[error("the answer has no `usage`: its tokens cannot be counted")]
    NoUsage,
    /// Longer than a request may take.
    #[error("no complete answer within {seconds} s")]
    Timeout {
        /// The limit.
        seconds: u64,
    },
    /// No prompt of this length can be composed.
    #[error("no prompt of exactly {tokens} tokens: {reason}")]
    Prompt {
        /// The wanted length.
        tokens: usize,
        /// Why.
        reason: String,
    },
    /// Contradicting settings.
    #[error("{0}")]
    Settings(String),
    /// The async runtime could not be started.
    #[error("the client's threads cannot be started")]
    Runtime(#[source] std::io::Error),
}

impl BenchError {
    /// What would help, if anything is known to.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Url { hint, .. } => Some(hint),
            Self::Connect { .. } => Some("is the server running, and is this its address?"),
            Self::Status { status: 401 | 403, .. } => {
                Some("put the server's key into the environment variable that --api-key-env names")
            }
            Self::Status { status: 404, path, .. } if path == "/v1/models" => {
                Some("give the address of the API, such as http://127.0.0.1:8000/v1")
            }
            Self::Status { status: 404, .. } => {
                Some("does the server have this endpoint? --endpoint chooses")
            }
            Self::UnknownModel { .. } => Some("choose one of them with --model"),
            Self::NoUsage => Some("the server must answer `stream_options: {\"include_usage\": true}`"),
            Self::Timeout { .. } => Some("allow more with --timeout, or ask for fewer tokens"),
            _ => None,
        }
    }

    /// The message and its causes on one line, for a sample.
    pub(crate) fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let _ = write!(text, ": {error}");
            cause = error.source();
        }
        text
    }
}
