//! Bodies of `/v1/chat/completions`.

use serde::Serialize;

use super::{ChunkUsage, Head, Usage};
use crate::logprobs::ChatLogprobs;

#[derive(Serialize)]
pub(crate) struct ChatBody {
    #[serde(flatten)]
    pub(crate) head: Head,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: Message,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
pub(crate) struct Message {
    pub(crate) role: &'static str,
    pub(crate) content: String,
    #[serde(flatten)]
    pub(crate) reasoning: Option<Reasoning>,
}

/// Thinking under both names that clients look for.
#[derive(Serialize)]
pub(crate) struct Reasoning {
    reasoning_content: String,
    reasoning: String,
}

impl Reasoning {
    /// `None` when there was none.
    pub(crate) fn new(text: String) -> Option<Self> {
        (!text.is_empty()).then(|| Self { reasoning_content: text.clone(), reasoning: text })
    }
}

#[derive(Serialize)]
pub(crate) struct ChatChunk<'a> {
    #[serde(flatten)]
    pub(crate) head: &'a Head,
    pub(crate) choices: Vec<ChatChunkChoice>,
    #[serde(skip_serializing_if = "ChunkUsage::is_absent")]
    pub(crate) usage: ChunkUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
}

#[derive(Default, Serialize)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: MessageDelta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
}

#[derive(Default, Serialize)]
pub(crate) struct MessageDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(flatten)]
    pub(crate) reasoning: Option<Reasoning>,
}
