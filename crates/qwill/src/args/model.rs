//! Which model, in which numbers, in how much memory.

use std::path::PathBuf;

use clap::Args;
use qwill_engine::speculation::SyntheticAcceptance;
use qwill_weights::WeightCache;

use super::values::{self, ByteCount};
use super::{ActivationsChoice, KvChoice, QuantizeChoice, StateChoice, Switch, WeightsChoice};
use crate::env;

#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// Directory of a Hugging Face checkpoint: config.json, tokenizer.json, *.safetensors.
    /// Without it, the small embedded model
    #[arg(value_name = "MODEL_DIR")]
    pub(crate) model_dir: Option<PathBuf>,
    /// Quantise 16-bit weights while loading; weights that are stored quantised stay as they are
    #[arg(long, value_enum, default_value = "none", env = env::QUANTIZE, help_heading = "Model")]
    pub(crate) quantize: QuantizeChoice,
    /// Keep what --quantize makes for the next start: `off`, `auto` (beside the checkpoint) or a directory.
    /// Checked by digests as it is read, and written anew when the checkpoint has changed
    #[arg(long, value_name = "PLACE", default_value = "off", value_parser = values::weight_cache)]
    #[arg(env = env::WEIGHT_CACHE, help_heading = "Model")]
    pub(crate) weight_cache: WeightCache,
    /// Jinja file to use instead of the checkpoint's chat template
    #[arg(long, value_name = "FILE", env = env::CHAT_TEMPLATE, help_heading = "Model")]
    pub(crate) chat_template: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RandomArgs {
    /// Serve made-up weights of a --geometry instead of a checkpoint: right for measuring speed, not for text.
    /// The embedded model's tokenizer gives the ids their text
    #[arg(long, value_enum, requires = "geometry", conflicts_with = "model_dir", env = env::WEIGHTS)]
    #[arg(help_heading = "Model")]
    pub(crate) weights: Option<WeightsChoice>,
    /// Shapes of the random weights
    #[arg(long, value_name = "NAME", requires = "weights", env = env::GEOMETRY, help_heading = "Model")]
    #[arg(value_parser = values::geometry_names())]
    pub(crate) geometry: Option<String>,
    /// Seed of the random weights
    #[arg(long, default_value_t = 0, requires = "weights", env = env::SEED, help_heading = "Model")]
    pub(crate) seed: u64,
    /// Take drafts for right as often as this says, instead of when they are: shares of steps in which the first, the
    /// second, ... draft is right with all before it. Random weights agree with no draft, so that nothing else shows
    /// what speculation would bring. All work is done; whatever the server reports says so
    #[arg(long, value_name = "LIST", requires = "weights", env = env::SYNTHETIC_ACCEPTANCE)]
    #[arg(help_heading = "Model")]
    pub(crate) synthetic_acceptance: Option<SyntheticAcceptance>,
}

#[derive(Debug, Args)]
pub(crate) struct NumericsArgs {
    /// How activations are rounded [default: on a GPU bf16; on the processor int8 when weights are quantised,
    /// otherwise f32]
    #[arg(long, value_enum, env = env::ACTIVATIONS, help_heading = "Numerics")]
    pub(crate) activations: Option<ActivationsChoice>,
    /// Storage of keys and values [default: bf16 on a GPU, f32 on the processor]
    #[arg(long, value_enum, env = env::KV_TYPE, help_heading = "Numerics")]
    pub(crate) kv_type: Option<KvChoice>,
    /// Storage of recurrent states
    #[arg(long, value_enum, default_value = "f32", env = env::STATE_TYPE, help_heading = "Numerics")]
    pub(crate) state_type: StateChoice,
    /// Threads that compute on the processor [default: its cores]
    #[arg(long, value_parser = values::positive, env = env::THREADS, help_heading = "Numerics")]
    pub(crate) threads: Option<usize>,
}

#[derive(Debug, Args)]
pub(crate) struct MemoryArgs {
    /// On the processor: memory that the model, its caches and buffers may take together, such as 24GiB
    /// [default: four fifths of what is free, at most 4 GiB beside the weights]
    #[arg(long, value_name = "BYTES", env = env::MEMORY, help_heading = "Memory")]
    pub(crate) memory: Option<ByteCount>,
    /// Sequences that run at once
    #[arg(long, value_parser = values::positive, env = env::MAX_SEQUENCES, help_heading = "Memory")]
    pub(crate) max_sequences: Option<usize>,
    /// Longest prompt and answer together, tokens [default: as long as the model and the memory allow]
    #[arg(long, value_name = "TOKENS", value_parser = values::positive, env = env::MAX_CONTEXT, help_heading = "Memory")]
    pub(crate) max_context: Option<usize>,
    /// Tokens of keys and values over all sequences [default: what fits]
    #[arg(long, value_name = "TOKENS", value_parser = values::positive, env = env::KV_TOKENS, help_heading = "Memory")]
    pub(crate) kv_tokens: Option<usize>,
    /// Prompt tokens processed in one step: longer is faster for prompts, shorter keeps running answers smooth
    #[arg(long, value_name = "TOKENS", default_value_t = 256, value_parser = values::positive)]
    #[arg(env = env::PREFILL_SLICE, help_heading = "Memory")]
    pub(crate) prefill_slice: usize,
    /// Memory of the host for beginnings of prompts that were computed before: states at messages' ends, and keys and
    /// values that the device has no room for; 0 for none [default: 8GiB, at most half of what is free; on the processor an
    /// eighth of --memory or of what is free]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes_or_none)]
    #[arg(env = env::HOST_CACHE, help_heading = "Memory")]
    pub(crate) host_cache: Option<ByteCount>,
    /// Whether prompts begin at what earlier ones left behind. Never changes an answer
    #[arg(long, value_enum, default_value = "on", env = env::PREFIX_CACHE, help_heading = "Memory")]
    pub(crate) prefix_cache: Switch,
    /// In long texts a state is kept every so many tokens, beside those at messages' ends and where prompts part
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = values::positive)]
    #[arg(env = env::SNAPSHOT_TOKENS, help_heading = "Memory")]
    pub(crate) snapshot_tokens: usize,
}

impl MemoryArgs {
    /// Bytes of the host cache, where somebody has said how many.
    pub(crate) fn host_cache_bytes(&self) -> Option<u64> {
        match self.prefix_cache {
            Switch::On => self.host_cache.map(|flag| flag.0),
            Switch::Off => Some(0),
        }
    }
}

/// `--disk-cache` and its size.
#[derive(Debug, Args)]
pub(crate) struct DiskCacheArgs {
    /// Keep beginnings of prompts that were computed before in this directory too, so that they survive a restart; one
    /// server uses it at a time
    #[arg(long, value_name = "DIR", env = env::DISK_CACHE, help_heading = "Memory")]
    pub(crate) disk_cache: Option<PathBuf>,
    /// Bytes of its files at most; those not used for longest go
    #[arg(long, value_name = "BYTES", default_value = "32GiB", env = env::DISK_CACHE_SIZE, help_heading = "Memory")]
    pub(crate) disk_cache_size: ByteCount,
}
