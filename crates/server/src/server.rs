//! A bound server: accepts connections until it is told to stop, then lets the running ones finish.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use qwill_contract::EngineHandle;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep, sleep_until, timeout};

use crate::app::{App, Ending};
use crate::connection::{self, Limits};
use crate::error::ServerError;
use crate::keys::ApiKey;
use crate::options::{ServerOptions, TextModel};
use crate::router::router;
use crate::status;
use crate::tls::Tls;
use crate::watchdog;

/// How often metrics are tidied up.
const UPKEEP: Duration = Duration::from_secs(5);
/// Time for the last error events after the drain time is over.
const ABORT_GRACE: Duration = Duration::from_millis(500);
/// Files that the process opens besides connections, generously.
const OTHER_FILES: usize = 64;
/// Pause after a failed accept, as when file descriptors run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A server that listens and can be run.
pub struct Server {
    listener: TcpListener,
    local_addr: SocketAddr,
    app: Arc<App>,
}

/// The keys of a server.
#[derive(Clone)]
pub struct KeyRing(Arc<App>);

impl KeyRing {
    /// Takes these keys instead of the ones before. Whoever keeps a name and its limits keeps what was used of them. A
    /// server that has keys is not opened to everybody this way.
    ///
    /// # Errors
    /// [`ServerError::Option`] when there is none, or an empty one; the old ones hold then.
    pub fn replace(&self, keys: &[ApiKey]) -> Result<(), ServerError> {
        if keys.is_empty() || keys.iter().any(|key| key.secret.trim().is_empty()) {
            return Err(ServerError::Option {
                option: "api_keys",
                problem: "has no key, or an empty one".into(),
            });
        }
        self.0.keys.replace(keys);
        Ok(())
    }
}

impl Server {
    /// Checks the options and listens. Nothing is answered before [`Server::run`].
    ///
    /// # Errors
    /// [`ServerError::Bind`] when the address is taken or not this machine's, [`ServerError::Option`] for options
    /// that contradict themselves.
    pub async fn bind(
        options: ServerOptions,
        engine: EngineHandle,
        text: TextModel,
    ) -> Result<Self, ServerError> {
        let address = options.bind;
        let app = App::new(options, address.ip(), engine, text)?;
        let bind_error = |source| ServerError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(bind_error)?;
        let local_addr = listener.local_addr().map_err(bind_error)?;
        Ok(Self { listener, local_addr, app })
    }

    /// Takes a socket that listens already, bound early so that a port conflict shows before a long load.
    /// `options.bind` is not used.
    ///
    /// # Errors
    /// [`ServerError::Listener`] when the socket is unusable, [`ServerError::Option`] as in [`Server::bind`].
    pub fn with_listener(
        listener: StdListener,
        options: ServerOptions,
        engine: EngineHandle,
        text: TextModel,
    ) -> Result<Self, ServerError> {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let local_addr = listener.local_addr()?;
        let app = App::new(options, local_addr.ip(), engine, text)?;
        Ok(Self { listener, local_addr, app })
    }

    /// Exchanges the keys, also while the server runs.
    pub fn key_ring(&self) -> KeyRing {
        KeyRing(Arc::clone(&self.app))
    }

    /// The address listened on, with the port that port 0 became.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// The routes alone, without sockets: for tests, or to put into another server. Needs a Tokio runtime.
    ///
    /// # Errors
    /// [`ServerError::Option`] as in [`Server::bind`].
    pub fn router(
        options: ServerOptions,
        engine: EngineHandle,
        text: TextModel,
    ) -> Result<Router, ServerError> {
        let address = options.bind.ip();
        Ok(router(App::new(options, address, engine, text)?))
    }

    /// Serves until `shutdown` is ready, then drains: new work gets a 503, `/health` says not ready, running
    /// answers are finished or, when the drain time is over, ended with an error; then the connections are closed.
    /// The engine is asked to drain as well.
    ///
    /// # Errors
    /// [`ServerError::Engine`] with [`ServerOptions::exit_on_failure`]. A failed accept is logged and tried again.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), ServerError> {
        let Self { listener, app, .. } = self;
        let (drain, draining) = watch::channel(false);
        let acceptor = Acceptor {
            listener,
            router: router(Arc::clone(&app)),
            tls: app.options.tls.clone(),
            limits: limits(&app.options),
            room: Arc::new(Semaphore::new(connection_limit(app.options.max_connections))),
            draining,
        };
        prepare_grammars(&app);
        let upkeep = tokio::spawn(upkeep(Arc::clone(&app)));
        let watchdog = tokio::spawn(watchdog::watch(Arc::clone(&app)));
        let sampling = tokio::spawn(status::sample(Arc::clone(&app)));
        let mut connections = JoinSet::new();
        let failure = async {
            tokio::select! {
                () = shutdown => None,
                reason = watchdog::failure(&app), if app.options.exit_on_failure => Some(reason),
            }
        };
        let failure = acceptor.accept_until(failure, &mut connections).await;

        tracing::info!(connections = connections.len(), "shutting down: running requests may finish");
        app.start_draining();
        drain.send_replace(true);
        let deadline = Instant::now() + app.options.drain_timeout;
        let finished = async {
            tokio::select! {
                () = join_all(&mut connections) => true,
                () = sleep_until(deadline) => false,
            }
        };
        // Whoever comes now is told so, instead of finding nobody.
        let mut late = JoinSet::new();
        let finished = acceptor.accept_until(finished, &mut late).await;
        if !finished {
            tracing::warn!(
                connections = connections.len(),
                "the time to drain is over: ending what still runs"
            );
            app.end_all(Ending::Draining);
            let _ = timeout(ABORT_GRACE, join_all(&mut connections)).await;
        }
        drop(acceptor);
        let _ = timeout(ABORT_GRACE, join_all(&mut late)).await;
        connections.shutdown().await;
        late.shutdown().await;
        upkeep.abort();
        watchdog.abort();
        sampling.abort();
        failure.map_or(Ok(()), |reason| Err(ServerError::Engine { reason }))
    }
}

fn limits(options: &ServerOptions) -> Limits {
    Limits { read: options.read_timeout, write: options.write_timeout }
}

/// How many connections may be open: as many as wanted, as far as the process may open files for them.
fn connection_limit(wanted: usize) -> usize {
    let files = std::fs::read_to_string("/proc/self/limits").ok().as_deref().and_then(open_files_limit);
    let possible = files.map_or(wanted, |files| files.saturating_sub(OTHER_FILES).max(1));
    if possible < wanted {
        tracing::warn!(
            wanted,
            connections = possible,
            "the limit on open files allows fewer connections: see `ulimit -n`"
        );
    }
    wanted.min(possible)
}

/// The soft limit on open files in the text of `/proc/self/limits`; `None` where there is none.
fn open_files_limit(limits: &str) -> Option<usize> {
    limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

/// Takes connections.
struct Acceptor {
    listener: TcpListener,
    router: Router,
    tls: Option<Tls>,
    limits: Limits,
    /// A permit for each connection that may still be opened.
    room: Arc<Semaphore>,
    draining: watch::Receiver<bool>,
}

impl Acceptor {
    /// Serves connections in tasks of `connections` until `end` is ready.
    async fn accept_until<T>(&self, end: impl Future<Output = T>, connections: &mut JoinSet<()>) -> T {
        tokio::pin!(end);
        loop {
            tokio::select! {
                result = &mut end => return result,
                accepted = self.accept() => match accepted {
                    Ok((stream, permit)) => self.spawn(stream, permit, connections),
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(ended) = connections.join_next() => report(ended),
            }
        }
    }

    /// The next connection, once there is room for one: until then clients wait in the system's backlog and cost
    /// no file.
    async fn accept(&self) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
        let permit = Arc::clone(&self.room).acquire_owned().await.map_err(io::Error::other)?;
        let (stream, _) = self.listener.accept().await?;
        Ok((stream, permit))
    }

    fn spawn(&self, stream: TcpStream, permit: OwnedSemaphorePermit, connections: &mut JoinSet<()>) {
        let tls = self.tls.as_ref().map(Tls::acceptor);
        let serving = connection::serve(stream, tls, self.router.clone(), self.limits, self.draining.clone());
        connections.spawn(async move {
            serving.await;
            drop(permit);
        });
    }
}

async fn join_all(connections: &mut JoinSet<()>) {
    while let Some(ended) = connections.join_next().await {
        report(ended);
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection's task panicked");
    }
}

/// Sorts the vocabulary for grammars beside everything else. Nobody waits for it at the end, and where it does not start, the
/// first grammar does the work.
fn prepare_grammars(app: &App) {
    let grammars = Arc::clone(&app.grammars);
    let thread = std::thread::Builder::new().name("grammars".to_owned());
    if let Err(error) = thread.spawn(move || grammars.prepare()) {
        tracing::warn!(%error, "grammars are not prepared");
    }
}

async fn upkeep(app: Arc<App>) {
    let mut ticks = interval(UPKEEP);
    loop {
        ticks.tick().await;
        app.metrics.upkeep();
        if let Some(engine) = &app.options.engine_metrics {
            engine.upkeep();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_on_open_files_is_read() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max processes             63704                63704                processes \n\
                    Max open files            1024                 524288               files     \n";
        assert_eq!(open_files_limit(text), Some(1024));
        assert_eq!(open_files_limit(&text.replace("1024  ", "unlimited")), None);
        assert_eq!(open_files_limit(""), None);
        assert_eq!(connection_limit(1), 1);
    }
}
