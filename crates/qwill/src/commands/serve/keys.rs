//! The keys of a server: from flags, the variable and a file, which may change while it runs.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};
use qwill_server::ApiKey;

use crate::args::ListenArgs;
use crate::failure::Hinted;

/// All keys, each once.
pub(super) fn of(arguments: &ListenArgs) -> Result<Vec<ApiKey>> {
    let mut keys = arguments.api_keys_file.as_deref().map_or(Ok(Vec::new()), in_file)?;
    for secret in &arguments.api_key {
        if keys.iter().all(|key| key.secret != *secret) {
            keys.push(secret.as_str().into());
        }
    }
    let admin = arguments.admin_key.as_deref();
    if keys.iter().map(|key| key.secret.as_str()).chain(admin).any(|key| key.trim().is_empty()) {
        let hint = "give a key of at least one character, or no flag at all";
        return Err(Hinted::error("--api-key or --admin-key is empty", hint));
    }
    Ok(keys)
}

/// Nobody opens a server to a network by mistake.
pub(super) fn check_openness(bind: SocketAddr, keys: &[ApiKey], arguments: &ListenArgs) -> Result<()> {
    if !keys.is_empty() || bind.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    if arguments.allow_no_key {
        tracing::warn!("{bind} is open to whoever reaches it: no key is set");
        return Ok(());
    }
    Err(Hinted::error(
        format!("{bind} can be reached by others, and no key is set"),
        "set one with --api-key, QWILL_API_KEY or --api-keys-file; or say --allow-no-key where something else keeps \
         others out",
    ))
}

fn in_file(path: &Path) -> Result<Vec<ApiKey>> {
    let what = || format!("--api-keys-file {}", path.display());
    let text = std::fs::read_to_string(path).with_context(what)?;
    let keys = ApiKey::parse_file(&text).with_context(what)?;
    // An empty file would leave the server open although somebody wanted it closed.
    if keys.is_empty() {
        let hint = "write a key a line, with a name before it if you like";
        return Err(Hinted::error(format!("{}: there is no key in it", what()), hint));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_holds_a_key_a_line_and_must_hold_one() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        write!(file, "# team\n alpha \n\nbob beta tokens/min=9\n").unwrap();
        let keys = in_file(file.path()).unwrap();
        assert_eq!(keys.len(), 2);
        assert_eq!((keys[1].name.as_deref(), keys[1].limits.tokens_per_minute), (Some("bob"), Some(9)));
        let empty = tempfile::NamedTempFile::new().unwrap();
        assert!(in_file(empty.path()).is_err());
        writeln!(file, "bob beta").unwrap();
        let error = format!("{:#}", in_file(file.path()).unwrap_err());
        assert!(error.contains("--api-keys-file") && error.contains("line 5"), "{error}");
    }
}
