//! Bodies of answers, as `OpenAI` spells them.

pub(crate) mod chat;
pub(crate) mod completions;

use serde::Serialize;

use crate::app::App;

/// Token counts of a request.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) prompt_tokens_details: PromptDetails,
    pub(crate) completion_tokens_details: CompletionDetails,
}

/// `usage` of a chunk: absent unless the client asked, then null until the last chunk.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(untagged)]
pub(crate) enum ChunkUsage {
    NotAsked,
    NotYet,
    Final(Usage),
}

impl ChunkUsage {
    /// Of a chunk that is not the last.
    pub(crate) fn pending(asked: bool) -> Self {
        if asked { Self::NotYet } else { Self::NotAsked }
    }

    pub(crate) fn is_absent(&self) -> bool {
        matches!(self, Self::NotAsked)
    }
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct PromptDetails {
    pub(crate) cached_tokens: usize,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct CompletionDetails {
    pub(crate) reasoning_tokens: usize,
}

/// How long an answer took: its prompt, without what was cached, from the engine's beginning to the first token; then its
/// tokens. Several choices at once count together.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Timings {
    pub(crate) cache_n: usize,
    pub(crate) prompt_n: usize,
    pub(crate) prompt_ms: f64,
    pub(crate) prompt_per_token_ms: f64,
    pub(crate) prompt_per_second: f64,
    pub(crate) predicted_n: usize,
    pub(crate) predicted_ms: f64,
    pub(crate) predicted_per_token_ms: f64,
    pub(crate) predicted_per_second: f64,
}

/// How far a prompt is processed, tokens; what was cached counts as processed.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct PromptProgress {
    pub(crate) total: usize,
    pub(crate) cache: usize,
    pub(crate) processed: usize,
    /// Since the engine has begun.
    pub(crate) time_ms: f64,
}

/// What every body and chunk of an answer begins with.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    /// The numerics mode: the same mode, seed and request give the same text.
    pub(crate) system_fingerprint: String,
}

impl Head {
    /// Of an answer that begins now.
    pub(crate) fn new(app: &App, id: String, object: &'static str, model: String) -> Self {
        let system_fingerprint = app.facts().numerics.clone();
        Self { id, object, created: unix_seconds(), model, system_fingerprint }
    }
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |duration| duration.as_secs())
}
