//! `qwill health`: whether a server takes requests, for supervisors and containers.

use anyhow::Result;

use crate::args::HealthArgs;
use crate::client::Client;

/// Says `ok`, or fails with the server's own reason.
pub(crate) fn run(arguments: &HealthArgs) -> Result<()> {
    let url = arguments.url.clone().unwrap_or_else(|| format!("http://127.0.0.1:{}", arguments.port));
    Client::new(&url, None)?.health()?;
    println!("ok");
    Ok(())
}
