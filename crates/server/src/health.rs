//! Whether the server lives, takes requests, and really generates: three different facts.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use qwill_contract::{EngineState, LoadSnapshot};
use serde::Serialize;

use crate::app::App;

/// Notices an engine that has work and completes no step.
pub(crate) struct StallWatch {
    limit: Duration,
    /// Step count while there is work, and when it was first seen.
    working_since: Mutex<Option<(u64, Instant)>>,
}

impl StallWatch {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, working_since: Mutex::new(None) }
    }

    /// Seconds without a step, when that is too long. Judges by what earlier calls saw, so a long idle time
    /// before a request does not count.
    fn stalled_s(&self, load: &LoadSnapshot, now: Instant) -> Option<u64> {
        let mut working_since = self.working_since.lock().unwrap_or_else(PoisonError::into_inner);
        if load.running + load.waiting == 0 {
            *working_since = None;
            return None;
        }
        let since = working_since.filter(|&(steps, _)| steps == load.steps).map_or(now, |(_, since)| since);
        *working_since = Some((load.steps, since));
        let silent = now.saturating_duration_since(since);
        (silent > self.limit).then_some(silent.as_secs())
    }
}

#[derive(Serialize)]
struct Health {
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
}

fn assess(app: &App) -> Health {
    let load = app.engine.load().snapshot();
    let stalled_s = app.stall_watch.stalled_s(&load, Instant::now());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_needs_work_and_silence() {
        let watch = StallWatch::new(Duration::from_secs(10));
        let load = qwill_contract::Load::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(watch.stalled_s(&load.snapshot(), at(100)), None, "idle");
        load.running.store(1, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(watch.stalled_s(&load.snapshot(), at(100)), None, "work is seen first");
        assert_eq!(watch.stalled_s(&load.snapshot(), at(105)), None, "five seconds of work");
        assert_eq!(watch.stalled_s(&load.snapshot(), at(111)), Some(11));
        load.step_done();
        assert_eq!(watch.stalled_s(&load.snapshot(), at(112)), None, "a step was completed");
    }
}
