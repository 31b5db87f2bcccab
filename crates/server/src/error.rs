//! Errors: those a client gets, in `OpenAI`'s shape, and those that end the server.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use qwill_contract::{EngineState, SubmitError};
use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

/// Why a server could not start or had to end.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source} (hint: choose another --host or --port)")]
    Bind {
        /// The address asked for.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The options contradict themselves.
    #[error("{option} {problem}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// What is wrong with its value.
        problem: String,
    },
    /// The engine has failed or is stuck, and the server was to end then.
    #[error("{reason}")]
    Engine {
        /// What is known of it.
        reason: String,
    },
    /// The metrics registry could not be set up.
    #[error("metrics: {0}")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
    /// The process has a recorder already.
    #[error("metrics: the engine's recorder was set up twice in this process")]
    SecondRecorder,
    /// Certificate or key cannot be used.
    #[error("TLS: {problem}")]
    Tls {
        /// What is wrong with them.
        problem: String,
    },
    /// The listening socket failed.
    #[error("the listening socket failed: {0}")]
    Listener(#[from] std::io::Error),
}

/// An answer that is an error: `{"error": {"message", "type", "param", "code"}}`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// What the log says instead, where the message quotes what the client sent: that may be anybody's text.
    pub(crate) logged: Option<String>,
    /// The field at fault, as a path such as `messages[2].role`.
    pub(crate) param: Option<String>,
    pub(crate) code: Option<&'static str>,
    pub(crate) retry_after: Option<Duration>,
    /// The rest of the request was not read: the connection cannot be used again.
    pub(crate) close: bool,
}

#[derive(Serialize)]
pub(crate) struct ErrorBody<'a> {
    error: ErrorDetail<'a>,
}

#[derive(Serialize)]
struct ErrorDetail<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

/// What a client is told to wait before it tries again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, message, logged: None, param: None, code: None, retry_after: None, close: false }
    }

    /// A 400 about one field.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::BAD_REQUEST, message);
        error.param = Some(param.into());
        error
    }

    /// A 400 about a field whose value is not what it should be; both are named.
    pub(crate) fn value(param: impl Into<String>, expected: &str, found: &Value) -> Self {
        let param = param.into();
        let rule = format!("`{param}` must be {expected}");
        let message = format!("{rule}, got {}", show(found));
        Self::field(param, message).with_code("invalid_value").logged_as(rule)
    }

    pub(crate) fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    pub(crate) fn logged_as(mut self, text: impl Into<String>) -> Self {
        self.logged = Some(text.into());
        self
    }

    pub(crate) fn closing(mut self) -> Self {
        self.close = true;
        self
    }

    pub(crate) fn retry(mut self) -> Self {
        self.retry_after = Some(RETRY_AFTER);
        self
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message).with_code("internal_error")
    }

    pub(crate) fn draining() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down")
            .with_code("shutting_down")
            .retry()
    }

    /// Why an engine in `state` takes nothing; `None` when it does.
    pub(crate) fn not_ready(state: &EngineState) -> Option<Self> {
        let unavailable = |message: String, code| {
            Some(Self::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code(code).retry())
        };
        match state {
            EngineState::Ready => None,
            EngineState::Starting => unavailable("the model is still loading".into(), "model_loading"),
            EngineState::Draining | EngineState::Stopped => Some(Self::draining()),
            EngineState::Failed(reason) => {
                unavailable(format!("the engine has failed: {reason}"), "engine_failed")
            }
        }
    }

    /// `OpenAI`'s `type`, which clients map to exception classes.
    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "service_unavailable_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    pub(crate) fn body(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorDetail {
                message: &self.message,
                r#type: self.kind(),
                param: self.param.as_deref(),
                code: self.code,
            },
        }
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::QueueFull { .. } => {
                let message = format!("the server is busy: {error}");
                Self::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("queue_full").retry()
            }
            SubmitError::Draining => Self::draining(),
            SubmitError::Down(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
                .with_code("engine_failed")
                .retry(),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(wait) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(whole_seconds(wait)));
        }
        if self.close {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

/// A time to wait as `Retry-After` says it: rounded up, so that it is over then.
pub(crate) fn whole_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

/// A value as it goes into a message: compact JSON, cut after a line's worth.
pub(crate) fn show(value: &Value) -> String {
    const LONGEST_CHARS: usize = 80;
    let text = match value {
        // Printing a huge list only to cut it would cost as much as the body.
        Value::Array(items) if items.len() > LONGEST_CHARS => format!("a list of {} items", items.len()),
        Value::Object(fields) if fields.len() > LONGEST_CHARS => {
            format!("an object of {} fields", fields.len())
        }
        other => other.to_string(),
    };
    match text.char_indices().nth(LONGEST_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
