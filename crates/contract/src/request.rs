use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::Guide;

/// Tells the engine that nobody waits for a request any more. Clones share the flag.
#[derive(Debug, Clone, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// The engine drops the request before its next step.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }
    /// Whether [`CancelFlag::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// One prompt and how to continue it. The server has validated it: the engine relies on the ranges given here.
#[derive(Debug, Clone)]
pub struct Request {
    /// For logs; unique among live requests.
    pub id: String,
    /// Prompt tokens, at least one, each below the vocabulary size.
    pub prompt: Arc<[u32]>,
    /// Separates tenants: a request finds in the prefix cache only what requests with the same salt left there.
    pub cache_salt: Option<Arc<str>>,
    /// Who waits is admitted in this order: lower first, equal ones as they came.
    pub priority: i32,
    /// How to sample.
    pub sampling: SamplingParams,
    /// Independent continuations of the prompt, at least 1. Choice `i` uses `seed + i` (wrapping).
    pub choices: usize,
    /// What the text has to be like; each choice has its own copy.
    pub guide: Option<Box<dyn Guide>>,
    /// Report log-probabilities of the prompt's own tokens with this many alternatives each.
    pub prompt_logprobs: Option<usize>,
    /// Set when the client is gone.
    pub cancel: CancelFlag,
    /// By choice: set when the rest of that choice is not needed, as after a stop string in its text; the others go
    /// on. A choice without a flag here ends only with all.
    pub choice_cancel: Vec<CancelFlag>,
}

impl Request {
    /// Whether nobody waits for more of a choice.
    pub fn choice_is_cancelled(&self, choice: usize) -> bool {
        self.cancel.is_cancelled() || self.choice_cancel.get(choice).is_some_and(CancelFlag::is_cancelled)
    }
}

/// Sampling parameters of a request. Text-level stop strings are the server's business: it sees them in the
/// text and cancels the choice.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// (0, 1].
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: usize,
    /// [0, 1].
    pub min_p: f32,
    /// [−2, 2].
    pub presence_penalty: f32,
    /// [−2, 2].
    pub frequency_penalty: f32,
    /// Above 0; 1 does nothing.
    pub repetition_penalty: f32,
    /// Added to logits, −∞ for what must not be drawn; ids are below the vocabulary size.
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of the random draws.
    pub seed: u64,
    /// Most tokens to generate, at least 0; 0 ends after the prompt (echo).
    pub max_tokens: usize,
    /// Stop tokens cannot be drawn before this many tokens.
    pub min_tokens: usize,
    /// Do not stop at the model's end-of-turn tokens; `stop_token_ids` still stop.
    pub ignore_eos: bool,
    /// Further ids that end generation.
    pub stop_token_ids: Vec<u32>,
    /// Report log-probabilities with this many alternatives per token.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    /// Greedy, 16 tokens.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: 0,
            max_tokens: 16,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            logprobs: None,
        }
    }
}
