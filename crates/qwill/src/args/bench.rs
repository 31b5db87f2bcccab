//! `qwill bench`: one struct per measurement.

use clap::{Args, Subcommand};

use crate::env;

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure a running OpenAI-compatible server over HTTP
    ///
    /// Works with any server: nothing but the API is used.
    Serve(Box<BenchServeArgs>),
}

#[derive(Debug, Args)]
pub(crate) struct BenchServeArgs {
    /// The server's API, such as `http://127.0.0.1:18020/v1`
    #[arg(long, help_heading = "Server")]
    pub(crate) url: String,
    /// Environment variable that holds the server's key
    #[arg(long, value_name = "NAME", default_value = env::API_KEY, help_heading = "Server")]
    pub(crate) api_key_env: String,
}
