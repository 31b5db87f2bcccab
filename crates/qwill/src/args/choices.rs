//! Flags that take one of a few words.

use clap::ValueEnum;
use qwill_bench::Dialect;
use qwill_bench::protocol::Protocol;
use qwill_device::{Activations, KvType, StateType};
use qwill_engine::speculation::SpecMode;
use qwill_weights::Quantize;

/// `--quantize`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum QuantizeChoice {
    /// Weights stay as they are stored
    None,
    /// 8 bits, one scale per 128 inputs
    Int8,
    /// 4 bits, one scale per 128 inputs; embedding and head 8 bits
    Int4,
}

impl From<QuantizeChoice> for Quantize {
    fn from(choice: QuantizeChoice) -> Self {
        match choice {
            QuantizeChoice::None => Self::None,
            QuantizeChoice::Int8 => Self::Int8,
            QuantizeChoice::Int4 => Self::Int4,
        }
    }
}

/// A flag that is on or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// Yes
    On,
    /// No
    Off,
}

/// `--activations`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActivationsChoice {
    /// Single precision throughout
    F32,
    /// Every operation's result is rounded to bfloat16
    Bf16,
    /// Inputs of quantised matrices are quantised to 8 bits: the fastest
    Int8,
}

impl From<ActivationsChoice> for Activations {
    fn from(choice: ActivationsChoice) -> Self {
        match choice {
            ActivationsChoice::F32 => Self::F32,
            ActivationsChoice::Bf16 => Self::Bf16,
            ActivationsChoice::Int8 => Self::Int8,
        }
    }
}

/// `--kv-type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvChoice {
    /// 4 bytes a value
    F32,
    /// 2 bytes a value: twice the context in the same memory
    Bf16,
    /// 1 byte a value and a scale per head and token: four times the context in the same memory
    Int8,
}

impl From<KvChoice> for KvType {
    fn from(choice: KvChoice) -> Self {
        match choice {
            KvChoice::F32 => Self::F32,
            KvChoice::Bf16 => Self::Bf16,
            KvChoice::Int8 => Self::Int8,
        }
    }
}

/// `--state-type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StateChoice {
    /// 4 bytes a value
    F32,
    /// 2 bytes a value: nearly twice the sequences in the same memory
    F16,
}

impl From<StateChoice> for StateType {
    fn from(choice: StateChoice) -> Self {
        match choice {
            StateChoice::F32 => Self::F32,
            StateChoice::F16 => Self::F16,
        }
    }
}

/// `--spec`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SpecChoice {
    /// No drafts: every step brings a sequence one token
    Off,
    /// The model's MTP module
    Mtp,
    /// The sequence's own text: what followed its last tokens where they stood before
    Lookup,
    /// Both, whichever promises more
    Auto,
}

impl From<SpecChoice> for SpecMode {
    fn from(choice: SpecChoice) -> Self {
        match choice {
            SpecChoice::Off => Self::Off,
            SpecChoice::Mtp => Self::Mtp,
            SpecChoice::Lookup => Self::Lookup,
            SpecChoice::Auto => Self::Auto,
        }
    }
}

/// `--weights`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightsChoice {
    /// Weights of the right shapes and distribution, without a checkpoint: for measuring speed
    Random,
}

/// `--log-format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object a line; the start screen becomes a log line too
    Json,
}

/// `--endpoint`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EndpointChoice {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
}

impl From<EndpointChoice> for Dialect {
    fn from(choice: EndpointChoice) -> Self {
        match choice {
            EndpointChoice::Chat => Self::Chat,
            EndpointChoice::Completions => Self::Completions,
        }
    }
}

/// `--protocol`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProtocolChoice {
    /// 8 chats at concurrency 1, 2, 4 and 8, answers of at most 1,024 tokens
    Cohort,
    /// 256 requests at concurrency 64: 128 prompt and 512 answer tokens, then 256 and 256
    Batch,
    /// Prompts of 1,024 to 102,400 tokens, one answer token
    Prefill,
    /// One prompt of 100,000 tokens, then four of 60,000 at once
    Long,
    /// What a prefix cache is for: one and eight talks about 24,000 tokens each, then 64 prompts with a common beginning
    Reuse,
}

impl From<ProtocolChoice> for Protocol {
    fn from(choice: ProtocolChoice) -> Self {
        match choice {
            ProtocolChoice::Cohort => Self::Cohort,
            ProtocolChoice::Batch => Self::Batch,
            ProtocolChoice::Prefill => Self::Prefill,
            ProtocolChoice::Long => Self::Long,
            ProtocolChoice::Reuse => Self::Reuse,
        }
    }
}
