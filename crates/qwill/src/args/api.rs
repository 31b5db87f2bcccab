//! What the API of `serve` keeps and tolerates.

use clap::{Args, ValueEnum};
use qwill_server::LenientModelNames;

use super::ByteCount;
use super::values;
use crate::env;

#[derive(Debug, Args)]
pub(crate) struct ApiArgs {
    /// Names of other models that requests may ask for and are answered all the same
    #[arg(long, value_enum, value_name = "WHICH", default_value = "agents", env = env::LENIENT_MODEL_NAMES)]
    #[arg(help_heading = "API")]
    pub(crate) lenient_model_names: LenientChoice,
    /// Responses of /v1/responses that are kept for later requests to go on from; 0 keeps none
    #[arg(long, value_name = "N", default_value_t = 1000, env = env::STORED_RESPONSES, help_heading = "API")]
    pub(crate) stored_responses: usize,
    /// How large they may be together, in the host's memory; those not used for longest make room
    #[arg(long, value_name = "BYTES", default_value = "64MiB", value_parser = values::bytes_or_none)]
    #[arg(env = env::STORED_RESPONSES_SIZE, help_heading = "API")]
    pub(crate) stored_responses_size: ByteCount,
}

/// `--lenient-model-names`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LenientChoice {
    /// None: any name but the model's own is an error
    None,
    /// Those that coding agents have built in, which begin with claude- and gpt-
    Agents,
    /// Every name
    All,
}

impl From<LenientChoice> for LenientModelNames {
    fn from(choice: LenientChoice) -> Self {
        match choice {
            LenientChoice::None => Self::None,
            LenientChoice::Agents => Self::Agents,
            LenientChoice::All => Self::All,
        }
    }
}
