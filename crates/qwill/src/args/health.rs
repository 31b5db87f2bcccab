//! Which server is looked at.

use clap::Args;

use crate::env;

#[derive(Debug, Args)]
pub(crate) struct HealthArgs {
    /// The server [default: port --port of this machine]
    #[arg(long, conflicts_with = "port", help_heading = "Server")]
    pub(crate) url: Option<String>,
    /// Port of a server on this machine
    #[arg(long, default_value_t = 18020, env = env::PORT, help_heading = "Server")]
    pub(crate) port: u16,
}
