//! Bodies of `/v1/completions`.

use serde::Serialize;

use super::{ChunkUsage, Head, Usage};
use crate::logprobs::CompletionLogprobs;

#[derive(Serialize)]
pub(crate) struct CompletionBody {
    #[serde(flatten)]
    pub(crate) head: Head,
    pub(crate) choices: Vec<CompletionChoice>,
    pub(crate) usage: Usage,
}

#[derive(Serialize)]
pub(crate) struct CompletionChunk<'a> {
    #[serde(flatten)]
    pub(crate) head: &'a Head,
    pub(crate) choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "ChunkUsage::is_absent")]
    pub(crate) usage: ChunkUsage,
}

/// A choice, whole or in part.
#[derive(Default, Serialize)]
pub(crate) struct CompletionChoice {
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
}
