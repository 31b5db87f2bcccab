//! What to set up for which server.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};

use crate::commands::launch::clients::CLIENTS;
use crate::env;

#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// Which client
    #[arg(value_name = "CLIENT", value_parser = names())]
    pub(crate) client: String,
    /// The running server
    #[arg(long, default_value = "http://127.0.0.1:18020", help_heading = "Server")]
    pub(crate) url: String,
    /// Key for that server
    #[arg(long, alias = "key", env = env::API_KEY, hide_env_values = true, help_heading = "Server")]
    pub(crate) api_key: Option<String>,
    /// Model to use [default: the first that the server lists]
    #[arg(long, help_heading = "Server")]
    pub(crate) model: Option<String>,
    /// Write the settings instead of printing them. The difference to what is there is shown, and what is there is kept
    /// beside it
    #[arg(long, help_heading = "What to do")]
    pub(crate) write: bool,
    /// Show what --write would change, and change nothing
    #[arg(long, conflicts_with = "run", help_heading = "What to do")]
    pub(crate) dry_run: bool,
    /// Start the client with these settings; arguments for it come after `--`. Without --write the user's own files stay
    /// as they are
    #[arg(long, help_heading = "What to do")]
    pub(crate) run: bool,
    /// Arguments for the client
    #[arg(value_name = "ARGUMENTS", last = true, requires = "run")]
    pub(crate) more: Vec<String>,
}

fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(CLIENTS.iter().map(|client| PossibleValue::new(client.name).help(client.title)))
}
