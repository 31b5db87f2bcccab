//! What every handler shares.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use qwill_contract::{EngineFacts, EngineHandle};
use qwill_grammar::Grammars;
use qwill_text::ToolStyle;
use tokio::sync::{Semaphore, watch};

use crate::auth::Keys;
use crate::cors;
use crate::error::{ApiError, ServerError};
use crate::health::Probe;
use crate::host::Names;
use crate::live::LiveRequests;
use crate::metrics::Metrics;
use crate::options::{ServerOptions, TextModel};
use crate::queue_pace::QueuePace;
use crate::recent::{History, RecentErrors};
use crate::responses::ResponseStore;
use crate::types::unix_seconds;
use crate::watchdog::Watchdog;

/// Unknown field names that are remembered; a client that makes names up must not fill memory.
const WARNED_NAMES_LIMIT: usize = 256;

/// Why everything that runs has to end.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ending {
    /// The time to drain is over.
    Draining,
    /// The engine has completed no step for this long.
    Stalled(Duration),
}

impl Ending {
    pub(crate) fn error(&self) -> ApiError {
        match self {
            Self::Draining => ApiError::draining(),
            Self::Stalled(silence) => {
                let seconds = silence.as_secs();
                let message = format!("the engine is stuck: it has completed no step for {seconds} s");
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("engine_stalled").retry()
            }
        }
    }
}

pub(crate) struct App {
    pub(crate) options: ServerOptions,
    pub(crate) engine: EngineHandle,
    pub(crate) text: TextModel,
    pub(crate) keys: Keys,
    pub(crate) host_names: Names,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) watchdog: Watchdog,
    pub(crate) probe: Probe,
    pub(crate) live: Arc<LiveRequests>,
    pub(crate) queue_pace: QueuePace,
    pub(crate) history: History,
    pub(crate) recent_errors: Arc<RecentErrors>,
    pub(crate) responses: ResponseStore,
    /// Bounds how many prompts are rendered and tokenised at once.
    pub(crate) preparing: Arc<Semaphore>,
    pub(crate) grammars: Arc<Grammars>,
    /// Bounds how many grammars are compiled at once.
    pub(crate) compiling: Arc<Semaphore>,
    pub(crate) started_unix_s: u64,
    /// Set when shutdown begins: new work is refused.
    draining: AtomicBool,
    /// Why what runs ends with an error.
    ending: watch::Sender<Option<Ending>>,
    warned_names: Mutex<HashSet<String>>,
}

impl App {
    /// `address` is the one listened on.
    pub(crate) fn new(
        options: ServerOptions,
        address: IpAddr,
        engine: EngineHandle,
        text: TextModel,
    ) -> Result<Arc<Self>, ServerError> {
        check(&options, address, engine.facts())?;
        let EngineFacts { vocab_size, eos_token_ids, .. } = engine.facts();
        let grammars = Grammars::new(Arc::clone(&text.tokenizer), *vocab_size, eos_token_ids);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Arc::new(Self {
            keys: Keys::new(&options.api_keys, options.admin_key.as_deref()),
            host_names: Names::of(&options, address),
            metrics: Arc::new(Metrics::new(engine.facts())?),
            watchdog: Watchdog::new(options.stall_timeout),
            probe: Probe::default(),
            live: Arc::default(),
            queue_pace: QueuePace::default(),
            history: History::default(),
            recent_errors: Arc::default(),
            responses: ResponseStore::new(options.stored_responses, options.stored_responses_bytes),
            preparing: Arc::new(Semaphore::new(processors)),
            grammars: Arc::new(grammars),
            compiling: Arc::new(Semaphore::new(processors.div_ceil(2))),
            started_unix_s: unix_seconds(),
            draining: AtomicBool::new(false),
            ending: watch::channel(None).0,
            warned_names: Mutex::default(),
            options,
            engine,
            text,
        }))
    }

    pub(crate) fn facts(&self) -> &EngineFacts {
        self.engine.facts()
    }

    /// How the model's template teaches it to write tool calls.
    pub(crate) fn tool_style(&self) -> ToolStyle {
        self.text.template.as_ref().map_or(ToolStyle::Xml, |template| template.tool_style())
    }

    /// The name that the model goes by when the client does not choose one.
    pub(crate) fn model_name(&self) -> &str {
        self.facts().model_names.first().map_or("model", String::as_str)
    }

    /// The model name to answer with.
    pub(crate) fn check_model(&self, asked: Option<String>) -> Result<String, ApiError> {
        let Some(asked) = asked else { return Ok(self.model_name().to_owned()) };
        if !self.options.lenient_model_names.allow(&asked) {
            self.check_own_model(&asked)?;
        }
        Ok(asked)
    }

    /// An error unless it is a name of this server's model.
    pub(crate) fn check_own_model(&self, asked: &str) -> Result<(), ApiError> {
        if self.facts().model_names.iter().any(|name| name == asked) {
            return Ok(());
        }
        let names = self.facts().model_names.join("`, `");
        let shown: String = asked.chars().take(80).collect();
        let message = format!("the model `{shown}` does not exist; this server has `{names}`");
        let mut error = ApiError::new(StatusCode::NOT_FOUND, message).with_code("model_not_found");
        error.param = Some("model".into());
        Err(error)
    }

    /// An error when no work is taken now.
    pub(crate) fn check_ready(&self) -> Result<(), ApiError> {
        if self.is_draining() {
            return Err(ApiError::draining());
        }
        let ending = self.ending.borrow().clone();
        match ending {
            // The engine may go on before the watchdog looks again.
            Some(Ending::Stalled(_)) if !self.is_stalled() => self.go_on(),
            Some(ending) => return Err(ending.error()),
            None => {}
        }
        ApiError::not_ready(&self.engine.load().state()).map_or(Ok(()), Err)
    }

    fn is_stalled(&self) -> bool {
        self.watchdog.stalled(&self.engine.load().snapshot(), Instant::now()).is_some()
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire) || self.engine.load().drain_requested()
    }

    /// Shutdown begins: nothing new is taken, here and in the engine.
    pub(crate) fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
        self.engine.load().request_drain();
    }

    /// Ends everything that runs, and takes nothing new until [`App::go_on`].
    pub(crate) fn end_all(&self, ending: Ending) {
        self.ending.send_replace(Some(ending));
    }

    /// What stood still moves again. A shutdown stays one.
    pub(crate) fn go_on(&self) {
        let went_on = self.ending.send_if_modified(|ending| {
            let stalled = matches!(ending, Some(Ending::Stalled(_)));
            if stalled {
                *ending = None;
            }
            stalled
        });
        if went_on {
            tracing::warn!("the engine goes on: requests are taken again");
        }
    }

    /// Whether everything that runs has been ended, and nothing new is taken.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.borrow().is_some()
    }

    pub(crate) fn ending(&self) -> watch::Receiver<Option<Ending>> {
        self.ending.subscribe()
    }

    /// Whether `name` has not been warned about yet.
    pub(crate) fn first_warning(&self, name: &str) -> bool {
        let mut names = self.warned_names.lock().unwrap_or_else(PoisonError::into_inner);
        names.len() < WARNED_NAMES_LIMIT && names.insert(name.to_owned())
    }
}

fn check(options: &ServerOptions, address: IpAddr, facts: &EngineFacts) -> Result<(), ServerError> {
    let fail = |option, problem: &str| Err(ServerError::Option { option, problem: problem.into() });
    let secrets = options.api_keys.iter().map(|key| key.secret.as_str()).chain(options.admin_key.as_deref());
    if secrets.into_iter().any(|key| key.trim().is_empty()) {
        return fail("api_keys", "contains an empty key");
    }
    if options.api_keys.is_empty() && !options.allow_no_key && !address.to_canonical().is_loopback() {
        return fail("api_keys", "must not be empty on an address that others can reach");
    }
    cors::check(&options.cors_origins)?;
    if options.max_connections == 0 {
        return fail("max_connections", "must be at least 1");
    }
    if options.body_limit_bytes == 0 {
        return fail("body_limit_bytes", "must be at least 1");
    }
    if options.keep_alive.is_zero() || options.read_timeout.is_zero() || options.write_timeout.is_zero() {
        return fail("keep_alive, read_timeout and write_timeout", "must be longer than nothing");
    }
    let times = [Some(options.stall_timeout), options.request_timeout, options.queue_timeout];
    if times.into_iter().flatten().any(|time| time.is_zero()) {
        return fail("stall_timeout, request_timeout and queue_timeout", "must be longer than nothing");
    }
    if options.max_choices == 0 {
        return fail("max_choices", "must be at least 1");
    }
    if facts.model_names.is_empty() {
        return fail("model_names", "must have at least one name");
    }
    let defaults = &options.defaults;
    let in_range = (0.0..=2.0).contains(&defaults.temperature)
        && defaults.top_p > 0.0
        && defaults.top_p <= 1.0
        && (0.0..=1.0).contains(&defaults.min_p)
        && (-2.0..=2.0).contains(&defaults.presence_penalty)
        && defaults.repetition_penalty > 0.0
        && defaults.repetition_penalty <= 10.0;
    if !in_range {
        return fail("sampling defaults", &format!("are out of range: {defaults:?}"));
    }
    Ok(())
}
