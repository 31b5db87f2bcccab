//! The certificate of a server, and its key.

use std::path::Path;

use anyhow::{Context, Result};
use qwill_server::Tls;

use crate::args::ListenArgs;

/// What the flags name, where they name anything.
pub(super) fn of(arguments: &ListenArgs) -> Result<Option<Tls>> {
    let Some((certificates, key)) = files(arguments)? else { return Ok(None) };
    Ok(Some(Tls::new(&certificates, &key)?))
}

/// Shows what is in the files now.
pub(super) fn reload(tls: &Tls, arguments: &ListenArgs) -> Result<()> {
    if let Some((certificates, key)) = files(arguments)? {
        tls.replace(&certificates, &key)?;
    }
    Ok(())
}

fn files(arguments: &ListenArgs) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
    let (Some(certificates), Some(key)) = (&arguments.tls_cert, &arguments.tls_key) else { return Ok(None) };
    let read =
        |flag: &str, path: &Path| std::fs::read(path).with_context(|| format!("{flag} {}", path.display()));
    Ok(Some((read("--tls-cert", certificates)?, read("--tls-key", key)?)))
}
