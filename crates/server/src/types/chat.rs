//! Bodies of `/v1/chat/completions`.

use serde::Serialize;

use super::{ChunkUsage, Head, PromptProgress, Timings, Usage};
use crate::choice::ToolCallDelta;
use crate::logprobs::{ChatLogprobs, PromptLogprobs};

#[derive(Serialize)]
pub(crate) struct ChatBody {
    #[serde(flatten)]
    pub(crate) head: Head,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timings: Option<Timings>,
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
    /// Null where there are only calls.
    pub(crate) content: Option<String>,
    #[serde(flatten)]
    pub(crate) reasoning: Option<Reasoning>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) function_call: Option<FunctionCall>,
}

/// A call of a tool.
#[derive(Serialize)]
pub(crate) struct ToolCall {
    id: String,
    r#type: &'static str,
    pub(crate) function: FunctionCall,
}

/// What is called, with its arguments as JSON text.
#[derive(Serialize)]
pub(crate) struct FunctionCall {
    name: String,
    arguments: String,
}

impl From<ToolCallDelta> for ToolCall {
    /// From all parts of a call in one.
    fn from(call: ToolCallDelta) -> Self {
        let (id, name) = call.begin.map(|begin| (begin.id, begin.name)).unwrap_or_default();
        Self { id, r#type: "function", function: FunctionCall { name, arguments: call.arguments } }
    }
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_progress: Option<PromptProgress>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timings: Option<Timings>,
}

impl<'a> ChatChunk<'a> {
    /// A chunk that says nothing yet.
    pub(crate) fn empty(head: &'a Head) -> Self {
        Self {
            head,
            choices: Vec::new(),
            usage: ChunkUsage::NotAsked,
            prompt_token_ids: None,
            prompt_progress: None,
            timings: None,
        }
    }
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool_calls: Option<[CallDelta; 1]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) function_call: Option<FunctionDelta>,
}

/// The next part of a call; id, type and name come with the first.
#[derive(Serialize)]
pub(crate) struct CallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionDelta,
}

#[derive(Serialize)]
pub(crate) struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl MessageDelta {
    pub(crate) fn content(text: String) -> Self {
        Self { content: Some(text), ..Default::default() }
    }

    /// A part of a call, as `function_call` where the client knows no other.
    pub(crate) fn call(call: ToolCallDelta, legacy: bool) -> Self {
        let ToolCallDelta { index, begin, arguments } = call;
        let kind = begin.is_some().then_some("function");
        let (id, name) = begin.map(|begin| (begin.id, begin.name)).unzip();
        let function = FunctionDelta { name, arguments };
        if legacy {
            Self { function_call: Some(function), ..Default::default() }
        } else {
            Self { tool_calls: Some([CallDelta { index, id, r#type: kind, function }]), ..Default::default() }
        }
    }
}
