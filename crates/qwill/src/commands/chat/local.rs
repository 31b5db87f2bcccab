//! The server that `qwill chat` starts for itself.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use qwill_engine::{DEFAULT_MAX_STALL, EngineThread};
use qwill_server::{Server, ServerOptions};
use tokio::sync::oneshot;

use crate::args::{ChatArgs, SamplingArgs};
use crate::commands::serve::defaults;
use crate::launch::{Launch, Serving};

/// A model served to this process alone: a free loopback port and a key that nobody else knows.
pub(super) struct LocalServer {
    /// Its address.
    pub(super) url: String,
    /// Its key.
    pub(super) key: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    engine: Option<EngineThread>,
}

impl LocalServer {
    /// Loads the model and opens the port.
    pub(super) fn start(arguments: &ChatArgs) -> Result<Self> {
        let ChatArgs { model, device, numerics, memory, speculation, .. } = arguments;
        let launch = Launch::prepare(model, None, device, numerics, memory, speculation)?;
        let key = random_key();
        let options = ServerOptions {
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            api_keys: vec![key.as_str().into()],
            // The client ends a stream at the next byte, so bytes should come often.
            keep_alive: Duration::from_millis(500),
            drain_timeout: Duration::ZERO,
            chat_template_kwargs: launch.source.origin.template_arguments(None),
            defaults: defaults(&launch.source.checkpoint.config().generation, &SamplingArgs::default()),
            ..ServerOptions::default()
        };
        let (text, names) = (launch.source.text.clone(), vec![launch.source.name.clone()]);
        let (handle, engine) = launch.start(Serving {
            model_names: names,
            queue_capacity: 1,
            max_stall: DEFAULT_MAX_STALL,
            fault: None,
        })?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let server = runtime.block_on(Server::bind(options, handle, text))?;
        let url = format!("http://{}", server.local_addr());
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("server".into())
            .spawn(move || {
                let shutdown = async move {
                    let _ = stopped.await;
                };
                if let Err(error) = runtime.block_on(server.run(shutdown)) {
                    tracing::error!("{error}");
                }
            })
            .context("starting the server's thread")?;
        Ok(Self { url, key, stop: Some(stop), thread: Some(thread), engine: Some(engine) })
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(engine) = self.engine.take() {
            // How the engine ended was shown with the answer that it failed on.
            let _ = engine.stop();
        }
    }
}

/// 128 bits of the standard library's per-process randomness: enough to keep other users of this machine out
/// of a port that lives as long as a conversation.
fn random_key() -> String {
    let bits = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", bits(), bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ() {
        assert_ne!(random_key(), random_key());
        assert_eq!(random_key().len(), 32);
    }
}
