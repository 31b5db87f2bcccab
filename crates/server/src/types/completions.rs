//! Bodies of `/v1/completions`.

use serde::Serialize;

use super::{ChunkUsage, Head, PromptProgress, Timings, Usage};
use crate::logprobs::{CompletionLogprobs, PromptLogprobs};

#[derive(Serialize)]
pub(crate) struct CompletionBody {
    #[serde(flatten)]
    pub(crate) head: Head,
    pub(crate) choices: Vec<CompletionChoice>,
    pub(crate) usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timings: Option<Timings>,
}

#[derive(Serialize)]
pub(crate) struct CompletionChunk<'a> {
    #[serde(flatten)]
    pub(crate) head: &'a Head,
    pub(crate) choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "ChunkUsage::is_absent")]
    pub(crate) usage: ChunkUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_progress: Option<PromptProgress>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timings: Option<Timings>,
}

impl<'a> CompletionChunk<'a> {
    /// A chunk that says nothing yet.
    pub(crate) fn empty(head: &'a Head) -> Self {
        Self { head, choices: Vec::new(), usage: ChunkUsage::NotAsked, prompt_progress: None, timings: None }
    }
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
}
