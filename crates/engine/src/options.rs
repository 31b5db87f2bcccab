use std::time::Duration;

use qwill_contract::EngineFacts;
use qwill_device::batch::{CHUNK_TOKENS, PAGE_TOKENS};
use qwill_device::plan::MemoryPlan;

use crate::EngineError;
use crate::admission::Limits;
use crate::chunks::ChunkRule;
use crate::disk::DiskCacheOptions;
use crate::prefix::SnapshotRule;
use crate::schedule::StepLimits;
use crate::speculation::{MAX_DRAFTS, SpeculationOptions};

/// A pause in a stream that a reader hardly notices.
pub const DEFAULT_MAX_STALL: Duration = Duration::from_millis(250);

/// What an engine must know beside its model. The sizes are those of the memory plan that the model was made by.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineOptions {
    /// Names the model answers to; the first is its own.
    pub model_names: Vec<String>,
    /// Numerics mode, for metrics and benchmark rows.
    pub numerics: String,
    /// End-of-turn tokens.
    pub eos_token_ids: Vec<u32>,
    /// Ids below this have text and can be drawn.
    pub vocab_limit: usize,
    /// Sequences that run at once: the model's state slots.
    pub max_sequences: usize,
    /// The model's KV pages.
    pub pages: usize,
    /// Longest prompt + generation.
    pub max_context_tokens: usize,
    /// Rows of a step that the model holds.
    pub max_rows: usize,
    /// Rows of logits that the model holds.
    pub max_logit_rows: usize,
    /// Rows of a prefill slice at most.
    pub prefill_slice_tokens: usize,
    /// How long a slice of somebody's prompt may keep running streams waiting: while there are any, slices have no more
    /// rows than take this long by what recent ones took, but at least a chunk's.
    pub max_stall: Duration,
    /// Requests that may wait.
    pub queue_capacity: usize,
    /// Token that begins a message (`<|im_start|>`): GDN chunks begin there.
    pub chunk_boundary_token: Option<u32>,
    /// In raw text a GDN chunk begins every so many tokens. Part of the numerics.
    pub chunk_interval_tokens: usize,
    /// Whether prompts begin at what earlier ones left in the prefix cache. Needs a model with a host store.
    pub prefix_cache: bool,
    /// In long texts the cache keeps a snapshot every so many tokens.
    pub snapshot_interval_tokens: usize,
    /// Where snapshots outlive the process; needs the prefix cache.
    pub disk_cache: Option<DiskCacheOptions>,
    /// Drafts.
    pub speculation: SpeculationOptions,
}

impl EngineOptions {
    /// The sizes of a memory plan; 128 requests may wait, an interval of chunks has 1,024 tokens, one of snapshots 4,096,
    /// the prefix cache is on, speculation is automatic. Names, numerics, vocabulary
    /// and tokens are still to be set.
    pub fn sized_by(plan: &MemoryPlan) -> Self {
        Self {
            model_names: Vec::new(),
            numerics: String::new(),
            eos_token_ids: Vec::new(),
            vocab_limit: 0,
            max_sequences: plan.slots,
            pages: plan.pages,
            max_context_tokens: plan.max_context_tokens,
            max_rows: plan.max_rows,
            max_logit_rows: plan.max_logit_rows,
            prefill_slice_tokens: plan.prefill_rows,
            max_stall: DEFAULT_MAX_STALL,
            queue_capacity: 128,
            chunk_boundary_token: None,
            chunk_interval_tokens: 1024,
            speculation: SpeculationOptions::default(),
            prefix_cache: true,
            disk_cache: None,
            snapshot_interval_tokens: 4096,
        }
    }

    pub(crate) fn check(&self) -> Result<(), EngineError> {
        let kv_tokens = self.pages.saturating_mul(PAGE_TOKENS);
        let wrong = if self.model_names.is_empty() {
            "the model has no name".to_owned()
        } else if self.vocab_limit == 0 {
            "no token has text: the vocabulary limit is 0".to_owned()
        } else if self.max_sequences == 0
            || self.queue_capacity == 0
            || self.chunk_interval_tokens == 0
            || self.snapshot_interval_tokens == 0
        {
            format!(
                "{} sequences, {} waiting requests, intervals of {} and {} tokens: each must be at least 1",
                self.max_sequences,
                self.queue_capacity,
                self.chunk_interval_tokens,
                self.snapshot_interval_tokens
            )
        } else if self.max_context_tokens == 0 || self.max_context_tokens > kv_tokens {
            format!("a context of {} tokens does not fit {kv_tokens} tokens of KV", self.max_context_tokens)
        } else if self.prefill_slice_tokens < CHUNK_TOKENS || self.prefill_slice_tokens > self.max_rows {
            format!(
                "a prefill slice of {} rows is not within {CHUNK_TOKENS} and the model's {} rows",
                self.prefill_slice_tokens, self.max_rows
            )
        } else if self.max_logit_rows < CHUNK_TOKENS {
            format!("the model holds logits of {} rows, a chunk needs {CHUNK_TOKENS}", self.max_logit_rows)
        } else if !(1..=MAX_DRAFTS).contains(&self.speculation.max_draft_len) {
            let asked = self.speculation.max_draft_len;
            format!("{asked} drafts in a round: a sequence can have 1 to {MAX_DRAFTS}")
        } else {
            return Ok(());
        };
        Err(EngineError::Options(wrong))
    }

    pub(crate) fn facts(&self) -> EngineFacts {
        EngineFacts {
            model_names: self.model_names.clone(),
            max_context_tokens: self.max_context_tokens,
            vocab_size: self.vocab_limit,
            eos_token_ids: self.eos_token_ids.clone(),
            max_sequences: self.max_sequences,
            kv_capacity_tokens: self.pages * PAGE_TOKENS,
            queue_capacity: self.queue_capacity,
            numerics: self.numerics.clone(),
        }
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            max_context_tokens: self.max_context_tokens,
            slots: self.max_sequences,
            pages: self.pages,
            vocab_limit: self.vocab_limit,
        }
    }

    pub(crate) fn step_limits(&self) -> StepLimits {
        StepLimits { slice: self.prefill_slice_tokens, round: self.max_rows, logits: self.max_logit_rows }
    }

    pub(crate) fn snapshot_rule(&self) -> SnapshotRule {
        let interval_tokens = self.snapshot_interval_tokens;
        SnapshotRule { boundary_token: self.chunk_boundary_token, interval_tokens }
    }

    pub(crate) fn chunk_rule(&self) -> ChunkRule {
        ChunkRule { boundary_token: self.chunk_boundary_token, interval_tokens: self.chunk_interval_tokens }
    }
}
