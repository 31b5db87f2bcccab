//! How many tokens a step may bring.

use clap::Args;
use qwill_engine::speculation::MAX_DRAFTS;

use super::{SpecChoice, values};
use crate::env;

#[derive(Debug, Args)]
pub(crate) struct SpeculationArgs {
    /// Where drafts of coming tokens are taken from, which are then checked several at once. Never changes an answer
    #[arg(long, value_enum, default_value = "auto", env = env::SPEC, help_heading = "Speculation")]
    pub(crate) spec: SpecChoice,
    /// Most drafts of a sequence in a step; how many there are is decided from load and success
    #[arg(long, value_name = "TOKENS", default_value_t = MAX_DRAFTS, value_parser = values::drafts)]
    #[arg(env = env::DRAFT_LEN, help_heading = "Speculation")]
    pub(crate) draft_len: usize,
}
