//! Bodies of `/v1/responses`.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::choice::Finish;
use crate::error::ApiError;
use crate::types::Usage;

/// A response, at whatever stage.
#[derive(Debug, Serialize)]
pub(crate) struct ResponseBody<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    /// Seconds since 1970.
    pub(super) created_at: u64,
    pub(super) completed_at: Option<u64>,
    pub(super) status: Status,
    pub(super) error: Option<Value>,
    pub(super) incomplete_details: Option<Value>,
    pub(super) model: &'a str,
    pub(super) output: Vec<Value>,
    pub(super) usage: Option<ResponseUsage>,
    /// What the request said.
    #[serde(flatten)]
    pub(super) echo: &'a Map<String, Value>,
}

/// How far a response or an item of it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

impl Status {
    pub(super) fn after(finish: Finish) -> Self {
        if finish == Finish::Length { Self::Incomplete } else { Self::Completed }
    }
}

/// Token counts under this API's names.
#[derive(Debug, Serialize)]
pub(super) struct ResponseUsage {
    input_tokens: usize,
    input_tokens_details: InputDetails,
    output_tokens: usize,
    output_tokens_details: OutputDetails,
    total_tokens: usize,
}

#[derive(Debug, Serialize)]
struct InputDetails {
    cached_tokens: usize,
    cache_write_tokens: usize,
}

#[derive(Debug, Serialize)]
struct OutputDetails {
    reasoning_tokens: usize,
}

impl From<Usage> for ResponseUsage {
    fn from(usage: Usage) -> Self {
        let cached_tokens = usage.prompt_tokens_details.cached_tokens;
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputDetails { cached_tokens, cache_write_tokens: 0 },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails {
                reasoning_tokens: usage.completion_tokens_details.reasoning_tokens,
            },
            total_tokens: usage.total_tokens,
        }
    }
}

/// An error in a response.
pub(super) fn error_detail(error: &ApiError) -> Value {
    let code = match error.status.as_u16() {
        429 => "rate_limit_exceeded",
        500.. => "server_error",
        _ => "invalid_prompt",
    };
    json!({"code": code, "message": error.message})
}
