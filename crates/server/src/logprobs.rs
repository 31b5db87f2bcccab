//! Log-probabilities in `OpenAI`'s two shapes. The engine's `f32` values are printed so that they read back to
//! the same bits.

use qwill_contract::{PromptToken, TokenLogprobs};
use qwill_text::{Detokenizer, Tokenizer};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

use crate::choice::AnswerToken;

/// JSON has no infinity; this is what `OpenAI` documents for a token that cannot be.
const IMPOSSIBLE: f32 = -9999.0;

/// `logprobs` of a chat choice.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatToken>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatToken {
    #[serde(flatten)]
    token: Candidate,
    top_logprobs: Vec<Candidate>,
}

#[derive(Debug, Serialize)]
struct Candidate {
    token: String,
    logprob: f32,
    bytes: Option<Vec<u8>>,
}

impl ChatLogprobs {
    /// One entry for each token.
    pub(crate) fn new(tokenizer: &Tokenizer, tokens: &[AnswerToken]) -> Self {
        let candidate = |id, logprob| Candidate {
            token: label(tokenizer, id),
            logprob: finite(logprob),
            bytes: tokenizer.token_bytes(id).map(<[u8]>::to_vec),
        };
        let entry = |token: &AnswerToken| {
            let logprobs = token.logprobs.as_ref();
            ChatToken {
                token: candidate(token.id, logprobs.map_or(f32::NEG_INFINITY, |found| found.logprob)),
                top_logprobs: logprobs
                    .map(|found| found.top.iter().map(|&(id, logprob)| candidate(id, logprob)).collect())
                    .unwrap_or_default(),
            }
        };
        Self { content: tokens.iter().map(entry).collect() }
    }
}

/// `logprobs` of a completion choice: parallel lists, one entry for each token.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    /// Null for the first token of an echoed prompt.
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<TopLogprobs>>,
    /// In characters of the choice's text.
    text_offset: Vec<usize>,
}

/// Token texts and their log-probabilities, most likely first.
#[derive(Debug)]
struct TopLogprobs(Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

impl CompletionLogprobs {
    /// Adds tokens of the answer; `offset_chars` is where the answer begins in the choice's text.
    pub(crate) fn add_answer(&mut self, tokenizer: &Tokenizer, tokens: &[AnswerToken], offset_chars: usize) {
        for token in tokens {
            self.add(tokenizer, token.id, token.logprobs.as_ref(), offset_chars + token.offset_chars);
        }
    }

    /// Adds the tokens of an echoed prompt, with `top` of the most likely ones each.
    pub(crate) fn add_prompt(
        &mut self,
        tokenizer: &Arc<Tokenizer>,
        ids: &[u32],
        top: usize,
        logprobs: &[PromptToken],
    ) {
        let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), false);
        let mut offset_chars = 0;
        for (index, &id) in ids.iter().enumerate() {
            let found = logprobs.get(index).and_then(Option::as_ref).map(|found| TokenLogprobs {
                logprob: found.logprob,
                top: found.top.iter().take(top).copied().collect(),
            });
            self.add(tokenizer, id, found.as_ref(), offset_chars);
            offset_chars += detokenizer.push(id).chars().count();
        }
    }

    fn add(&mut self, tokenizer: &Tokenizer, id: u32, logprobs: Option<&TokenLogprobs>, offset_chars: usize) {
        self.tokens.push(label(tokenizer, id));
        self.token_logprobs.push(logprobs.map(|found| finite(found.logprob)));
        self.top_logprobs.push(logprobs.map(|found| top_logprobs(tokenizer, id, found)));
        self.text_offset.push(offset_chars);
    }
}

/// The most likely tokens and, if it is none of them, the token itself. Of tokens with one text the likelier counts.
fn top_logprobs(tokenizer: &Tokenizer, id: u32, found: &TokenLogprobs) -> TopLogprobs {
    let own = std::iter::once((id, found.logprob)).filter(|_| found.top.iter().all(|&(top, _)| top != id));
    let mut entries: Vec<(String, f32)> = Vec::with_capacity(found.top.len() + 1);
    for (id, logprob) in found.top.iter().copied().chain(own) {
        let token = label(tokenizer, id);
        if entries.iter().all(|(known, _)| *known != token) {
            entries.push((token, finite(logprob)));
        }
    }
    TopLogprobs(entries)
}

/// A prompt's log-probabilities: for each token but the first the token itself and the most likely ones, by id.
pub(crate) type PromptLogprobs = Vec<Option<BTreeMap<u32, PromptCandidate>>>;

#[derive(Debug, Clone, Serialize)]
pub(crate) struct PromptCandidate {
    logprob: f32,
    /// From 1; none for a token that is not among the most likely ones.
    rank: Option<usize>,
    decoded_token: String,
}

/// What the engine tells of a prompt, for the answer.
pub(crate) fn prompt_logprobs(
    tokenizer: &Tokenizer,
    ids: &[u32],
    top: usize,
    found: &[PromptToken],
) -> PromptLogprobs {
    let candidates = |(&id, found): (&u32, &PromptToken)| {
        let found = found.as_ref()?;
        let candidate = |id, logprob, rank| {
            (id, PromptCandidate { logprob: finite(logprob), rank, decoded_token: label(tokenizer, id) })
        };
        let rank_of_own = found.top.iter().position(|&(top, _)| top == id).map(|index| index + 1);
        let most_likely = found.top.iter().take(top).enumerate();
        let mut candidates: BTreeMap<u32, PromptCandidate> =
            most_likely.map(|(index, &(id, logprob))| candidate(id, logprob, Some(index + 1))).collect();
        candidates.extend([candidate(id, found.logprob, rank_of_own)]);
        Some(candidates)
    };
    ids.iter().zip(found).map(candidates).collect()
}

/// A token as text; bytes that are no text alone are spelt `bytes:\xe2\x82`.
pub(crate) fn label(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    match str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold(String::from("bytes:"), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
            text
        }),
    }
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}
