//! One thread that owns the model: it admits requests, plans steps, runs them and tells what came of it.
//!
//! [`start`] makes the thread and gives back the server's end of it. A step is either a slice of prompts or a
//! round of all running sequences, never both. What a request can use at most is reserved before it starts, so
//! nothing that runs is ever put back. The parts that decide (`admission`, `chunks`, `pages`, `prefix`,
//! `schedule`, `sequence`) know neither device nor clock.
//!
//! Live counters are in [`qwill_contract::Load`]. Beside them, through the `metrics` facade:
//!
//! | metric | labels | |
//! | --- | --- | --- |
//! | `qwill_engine_steps_total` | `kind` = `slice`, `round` | steps done |
//! | `qwill_engine_step_seconds` | `kind` | histogram: time of a step |
//! | `qwill_engine_step_rows` | `kind` | histogram: rows of a step |
//! | `qwill_engine_failed_steps_total` | `kind` | steps that ended in a device error |
//! | `qwill_engine_unsound_logits_total` | `kind` | choices that ended because their logits were no distribution |
//! | `qwill_engine_queue_seconds` | | histogram: from submission to admission |
//! | `qwill_engine_mask_seconds` | | histogram: making the masks of all guided rows of a step |
//! | `qwill_speculation_rounds_total` | `source` | rounds of a sequence with drafts; sources are those of [`speculation::Source`] |
//! | `qwill_speculation_drafted_tokens_total` | `source` | drafts verified |
//! | `qwill_speculation_accepted_tokens_total` | `source`, `position` | drafts accepted, by place in the chain from 0 |
//! | `qwill_speculation_depth` | | histogram: drafts of a sequence in a round |
//! | `qwill_speculation_round_tokens` | | histogram: tokens that a round brought a sequence |

mod admission;
mod batch;
mod caching;
mod chunks;
mod disk;
mod disk_tier;
mod draft_step;
mod engine;
mod error;
mod guided;
mod live;
mod model;
mod options;
mod pace;
mod pages;
mod prefix;
mod sampling;
mod schedule;
mod self_test;
mod sequence;
mod settle;
mod slots;
pub mod speculation;
mod step;
#[cfg(test)]
mod tests;
mod thread;
mod warm_up;

pub use disk::{DiskCacheError, DiskCacheOptions};
pub use error::EngineError;
pub use model::StepModel;
pub use options::{DEFAULT_MAX_STALL, EngineOptions};
pub use thread::{EngineThread, start};
