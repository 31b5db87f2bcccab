//! What is known of a generation request: one line in the log when it is over, and its part of the metrics.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;

use crate::app::App;
use crate::auth::Origin;
use crate::error::ApiError;
use crate::metrics::{Metrics, REFUSED};
use crate::recent::{RecentError, RecentErrors};
use crate::types::{Timings, unix_seconds};

/// The status that is logged when the client went away before there was one.
pub(crate) const CLIENT_CLOSED: u16 = 499;

/// Gathers facts of a request and reports them when the last owner drops it.
pub(crate) struct Record {
    metrics: Arc<Metrics>,
    recent_errors: Arc<RecentErrors>,
    pub(crate) endpoint: &'static str,
    pub(crate) origin: Origin,
    pub(crate) started: Instant,
    facts: Mutex<Facts>,
}

/// Facts that become known on the way.
#[derive(Debug, Default, Clone)]
pub(crate) struct Facts {
    pub(crate) model: String,
    pub(crate) stream: bool,
    /// The engine has it.
    pub(crate) submitted: bool,
    /// How much thinking the prompt asks for, as far as the template knows of such a thing.
    pub(crate) effort: Option<String>,
    pub(crate) prompt_tokens: usize,
    pub(crate) cached_tokens: usize,
    pub(crate) generated_tokens: usize,
    /// From arrival to the engine's beginning.
    pub(crate) queue: Option<Duration>,
    pub(crate) first_token: Option<Duration>,
    pub(crate) last_token: Option<Duration>,
    /// `stop`, `length` or `error`; none when the client left.
    pub(crate) finish: Option<&'static str>,
    pub(crate) status: Option<StatusCode>,
    pub(crate) error: Option<String>,
}

impl Record {
    pub(crate) fn new(app: &App, endpoint: &'static str, origin: Origin) -> Arc<Self> {
        Arc::new(Self {
            metrics: Arc::clone(&app.metrics),
            recent_errors: Arc::clone(&app.recent_errors),
            endpoint,
            origin,
            started: Instant::now(),
            facts: Mutex::default(),
        })
    }

    pub(crate) fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a prompt on its caller's account.
    pub(crate) fn admit(&self, prompt_tokens: usize) -> Result<(), ApiError> {
        self.origin.caller.admit(prompt_tokens, Instant::now())?;
        self.facts().prompt_tokens = prompt_tokens;
        Ok(())
    }

    /// The request failed; the first failure counts.
    pub(crate) fn fail(&self, error: &ApiError) {
        let mut facts = self.facts();
        facts.finish = Some("error");
        facts.status.get_or_insert(error.status);
        facts.error.get_or_insert_with(|| error.logged.as_ref().unwrap_or(&error.message).clone());
    }

    /// The engine began to work on the request.
    pub(crate) fn note_started(&self, prompt_tokens: usize, cached_tokens: usize) {
        let waited = self.started.elapsed();
        let mut facts = self.facts();
        facts.cached_tokens += cached_tokens;
        if facts.queue.is_none() {
            facts.queue = Some(waited);
            self.metrics.queue_seconds.record(waited);
        }
        self.metrics.begun_tokens.fetch_add(prompt_tokens as u64, Ordering::Relaxed);
        self.metrics.cached_tokens.fetch_add(cached_tokens as u64, Ordering::Relaxed);
    }

    /// Milliseconds since the engine began to work on the request.
    pub(crate) fn running_ms(&self) -> f64 {
        let begun = self.facts().queue.unwrap_or_default();
        millis(self.started.elapsed().saturating_sub(begun))
    }

    /// How long the answer has taken so far.
    pub(crate) fn timings(&self) -> Timings {
        let facts = self.facts();
        let begun = facts.queue.unwrap_or_default();
        let first = facts.first_token.unwrap_or(begun);
        let last = facts.last_token.unwrap_or(first);
        let (prompt_n, predicted_n) = (facts.prompt_tokens - facts.cached_tokens, facts.generated_tokens);
        let (prompt_ms, predicted_ms) =
            (millis(first.saturating_sub(begun)), millis(last.saturating_sub(first)));
        // The first token comes with the end of the prompt.
        let steps = predicted_n.saturating_sub(1);
        let ratio = |part: f64, whole: f64| if whole > 0.0 { rounded(part / whole) } else { 0.0 };
        Timings {
            cache_n: facts.cached_tokens,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: ratio(prompt_ms, prompt_n as f64),
            prompt_per_second: ratio(prompt_n as f64 * 1e3, prompt_ms),
            predicted_n,
            predicted_ms,
            predicted_per_token_ms: ratio(predicted_ms, steps as f64),
            predicted_per_second: ratio(steps as f64 * 1e3, predicted_ms),
        }
    }

    /// `count` tokens arrived in one step.
    pub(crate) fn note_tokens(&self, count: usize) {
        let now = self.started.elapsed();
        self.origin.caller.charge(count, Instant::now());
        let mut facts = self.facts();
        facts.generated_tokens += count;
        if facts.first_token.is_none() {
            facts.first_token = Some(now);
            self.metrics.first_token_seconds.record(now);
        } else if let Some(last) = facts.last_token
            && count > 0
        {
            let each = now.saturating_sub(last).as_secs_f64() / count as f64;
            self.metrics.inter_token_seconds.record_many(each, count);
        }
        facts.last_token = Some(now);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let facts = self.facts().clone();
        let elapsed = self.started.elapsed();
        let finish = facts.finish.unwrap_or("cancelled");
        let caller = &self.origin.caller;
        let counted = if finish == "error" && !facts.submitted { REFUSED } else { finish };
        self.metrics.request_finished(self.endpoint, counted, elapsed);
        self.metrics.used(&caller.name, facts.prompt_tokens, facts.generated_tokens);
        if let Some(message) = &facts.error {
            let status = facts.status.map_or(CLIENT_CLOSED, |status| status.as_u16());
            self.recent_errors.note(RecentError {
                time: unix_seconds(),
                endpoint: self.endpoint,
                request_id: self.origin.request_id.clone(),
                status,
                message: message.clone(),
                key: caller.name.clone(),
            });
        }
        tracing::info!(
            id = self.origin.request_id,
            key = caller.name,
            endpoint = self.endpoint,
            model = facts.model,
            stream = facts.stream,
            effort = facts.effort,
            status = facts.status.map_or(CLIENT_CLOSED, |status| status.as_u16()),
            finish,
            prompt_tokens = facts.prompt_tokens,
            cached_tokens = facts.cached_tokens,
            generated_tokens = facts.generated_tokens,
            queue_ms = facts.queue.map(millis),
            ttft_ms = facts.first_token.map(millis),
            tokens_per_s = facts.rate().map(rounded),
            total_ms = millis(elapsed),
            error = facts.error,
            "request"
        );
    }
}

fn millis(duration: Duration) -> f64 {
    rounded(duration.as_secs_f64() * 1e3)
}

/// To three decimals: what a person reads, and more than a clock means.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

impl Facts {
    /// Tokens per second after the first.
    fn rate(&self) -> Option<f64> {
        let seconds = self.last_token?.saturating_sub(self.first_token?).as_secs_f64();
        (seconds > 0.0).then(|| self.generated_tokens.saturating_sub(1) as f64 / seconds)
    }
}
