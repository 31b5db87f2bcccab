//! `qwill bench serve`: a running server, measured over HTTP.

use anyhow::Result;

use crate::args::BenchServeArgs;
use crate::client::Client;

/// Looks at the server.
pub(crate) fn run(arguments: &BenchServeArgs) -> Result<()> {
    let client = Client::new(&arguments.url, std::env::var(&arguments.api_key_env).ok())?;
    println!("{} serves {}", arguments.url, client.model()?);
    Ok(())
}
