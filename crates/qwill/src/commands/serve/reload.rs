//! Files that may change while the server runs: SIGHUP reads them again.

use anyhow::{Context, Result};
use qwill_server::{KeyRing, Tls};
use tokio::signal::unix::{SignalKind, signal};

use super::{keys, tls};
use crate::args::ListenArgs;

/// Reads keys and certificates again whenever the process is told to. What is wrong in them changes nothing. Without such
/// files SIGHUP ends the process, as it does others.
pub(super) fn on_hangup(ring: KeyRing, shown: Option<Tls>, arguments: ListenArgs) -> Result<()> {
    if arguments.api_keys_file.is_none() && shown.is_none() {
        return Ok(());
    }
    let mut hangup = signal(SignalKind::hangup()).context("catching SIGHUP")?;
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            if arguments.api_keys_file.is_some() {
                let replaced = keys::of(&arguments).and_then(|keys| Ok(ring.replace(&keys)?));
                tell("keys", &replaced);
            }
            if let Some(shown) = &shown {
                tell("certificate", &tls::reload(shown, &arguments));
            }
        }
    });
    Ok(())
}

fn tell(what: &str, outcome: &Result<()>) {
    match outcome {
        Ok(()) => tracing::info!(what, "read again"),
        Err(error) => tracing::error!(what, "left as it was: {error:#}"),
    }
}
