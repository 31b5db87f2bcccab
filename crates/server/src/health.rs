//! Whether the server lives, takes requests, and really generates: three different facts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use qwill_contract::{
    CancelFlag, EngineState, Event, FinishReason, Request, SamplingParams, SinkClosed, SubmitError,
};
use serde::Serialize;
use tokio::sync::{Mutex, mpsc};
use tokio::time::{sleep, timeout};

use crate::app::App;
use crate::types::unix_seconds;

/// What is known of the server's health.
#[derive(Serialize)]
pub(crate) struct Health {
    status: &'static str,
    /// The process answers and its engine has not ended by a failure.
    live: bool,
    /// Requests are taken.
    ready: bool,
    /// The engine generated a token at start, and makes progress whenever it has work.
    can_generate: bool,
    state: &'static str,
    reason: Option<String>,
    running: usize,
    waiting: usize,
    /// Since the engine is stuck, seconds since 1970.
    stalled_since_unix_s: Option<u64>,
    steps: u64,
    /// Choices that ended because their logits were not numbers.
    unsound_logits: u64,
}

pub(crate) fn assess(app: &App) -> Health {
    let load = app.engine.load().snapshot();
    let stalled_s = app.watchdog.stalled(&load, Instant::now()).map(|silence| silence.as_secs());
    let draining = app.is_draining();
    let (state, reason) = match &load.state {
        EngineState::Starting => ("starting", Some("the model is still loading".to_owned())),
        EngineState::Ready | EngineState::Draining if draining => {
            ("draining", Some("the server is shutting down".to_owned()))
        }
        EngineState::Ready => {
            ("ready", stalled_s.map(|seconds| format!("the engine has completed no step for {seconds} s")))
        }
        EngineState::Draining => ("draining", Some("the engine is shutting down".to_owned())),
        EngineState::Stopped => ("stopped", Some("the engine has stopped".to_owned())),
        EngineState::Failed(reason) => {
            ("failed", Some(format!("the engine has failed, restart the server: {reason}")))
        }
    };
    let ready = state == "ready";
    let can_generate =
        matches!(load.state, EngineState::Ready | EngineState::Draining) && stalled_s.is_none();
    Health {
        status: if ready && can_generate { "ok" } else { "unavailable" },
        live: state != "failed",
        ready,
        can_generate,
        state,
        reason,
        running: load.running,
        waiting: load.waiting,
        stalled_since_unix_s: stalled_s.map(|seconds| unix_seconds().saturating_sub(seconds)),
        steps: load.steps,
        unsound_logits: load.unsound,
    }
}

fn answer(health: Health, good: bool) -> Response {
    let status = if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(health)).into_response()
}

/// `GET /health`: 200 when requests are taken and tokens come out.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    let health = assess(&app);
    let good = health.ready && health.can_generate;
    answer(health, good)
}

/// `GET /health/live`: 200 unless a restart is needed.
pub(crate) async fn live(State(app): State<Arc<App>>) -> Response {
    let health = assess(&app);
    let good = health.live;
    answer(health, good)
}

/// `GET /health/ready`: 200 when requests are taken.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Response {
    let health = assess(&app);
    let good = health.ready;
    answer(health, good)
}

/// `GET /ping`: as `/health`, without words.
pub(crate) async fn ping(State(app): State<Arc<App>>) -> StatusCode {
    let health = assess(&app);
    if health.ready && health.can_generate { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// `GET /health_generate`: 200 when a token was generated just now.
pub(crate) async fn generate(State(app): State<Arc<App>>) -> Response {
    let mut health = assess(&app);
    if health.ready && health.can_generate {
        health.reason = app.probe.generate(&app).await.err();
        health.can_generate = health.reason.is_none();
        health.status = if health.can_generate { "ok" } else { "unavailable" };
    }
    let good = health.ready && health.can_generate;
    answer(health, good)
}

/// How long a generated token proves that tokens are generated.
const PROOF_LASTS: Duration = Duration::from_secs(1);
/// How long one may take.
const PROBE_PATIENCE: Duration = Duration::from_secs(20);
const PROGRESS_LOOK: Duration = Duration::from_millis(10);

/// Generates a token to find out whether that can be done: one at a time, however many ask.
#[derive(Default)]
pub(crate) struct Probe(Mutex<Option<(Instant, Result<(), String>)>>);

impl Probe {
    async fn generate(&self, app: &App) -> Result<(), String> {
        let mut last = self.0.lock().await;
        if let Some((at, outcome)) = &*last
            && at.elapsed() < PROOF_LASTS
        {
            return outcome.clone();
        }
        let cancel = CancelFlag::default();
        let outcome = timeout(PROBE_PATIENCE, one_token(app, &cancel)).await;
        cancel.cancel();
        let seconds = PROBE_PATIENCE.as_secs();
        let outcome = outcome.unwrap_or_else(|_| Err(format!("no token was generated within {seconds} s")));
        *last = Some((Instant::now(), outcome.clone()));
        outcome
    }
}

async fn one_token(app: &App, cancel: &CancelFlag) -> Result<(), String> {
    let (sender, mut events) = mpsc::unbounded_channel();
    let request = Request {
        id: "health".into(),
        prompt: Arc::from([0]),
        cache_salt: None,
        // Others wait for a token at most.
        priority: i32::MIN,
        sampling: SamplingParams { max_tokens: 1, ignore_eos: true, ..SamplingParams::default() },
        choices: 1,
        prompt_logprobs: None,
        guide: None,
        cancel: cancel.clone(),
        choice_cancel: Vec::new(),
    };
    let load = app.engine.load();
    let generated = || load.snapshot().generated_tokens;
    let before = generated();
    let sink = Box::new(move |event| sender.send(event).map_err(|_| SinkClosed));
    match app.engine.submit(request, sink) {
        Ok(()) => {}
        // There is no place for a probe, but tokens of others prove as much.
        Err(SubmitError::QueueFull { .. }) => {
            while generated() == before {
                sleep(PROGRESS_LOOK).await;
            }
            return Ok(());
        }
        Err(error) => return Err(error.to_string()),
    }
    while let Some(event) = events.recv().await {
        match event {
            Event::Tokens { .. } => return Ok(()),
            Event::End {
                reason: FinishReason::Error { message } | FinishReason::Unsound { message },
                ..
            } => return Err(message),
            Event::End { .. } => break,
            _ => {}
        }
    }
    Err("the engine gave the request up".to_owned())
}
