//! Notices an engine that has work and completes no step, and says all that is known of it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use qwill_contract::{EngineState, LoadSnapshot};
use tokio::time::interval;

use crate::app::{App, Ending};

/// How often the engine is looked at, within the time after which it is stuck, and at most.
const LOOKS: u32 = 8;
const RAREST_LOOK: Duration = Duration::from_secs(2);
const SHORTEST_LOOK: Duration = Duration::from_millis(5);
/// How often it is asked whether the engine has failed.
const FAILURE_LOOK: Duration = Duration::from_millis(100);
/// Requests that the log of a stuck engine lists.
const MOST_LISTED: usize = 64;

/// Judges by what earlier looks saw, so that a long idle time before a request does not count.
pub(crate) struct Watchdog {
    limit: Duration,
    /// Step count while there is work, and when it was first seen.
    working_since: Mutex<Option<(u64, Instant)>>,
}

impl Watchdog {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, working_since: Mutex::new(None) }
    }

    /// How long there has been no step although there is work, when that is too long.
    pub(crate) fn stalled(&self, load: &LoadSnapshot, now: Instant) -> Option<Duration> {
        let mut working_since = self.working_since.lock().unwrap_or_else(PoisonError::into_inner);
        let runs = matches!(load.state, EngineState::Ready | EngineState::Draining);
        if !runs || load.running + load.waiting == 0 {
            *working_since = None;
            return None;
        }
        let since = working_since.filter(|&(steps, _)| steps == load.steps).map_or(now, |(_, since)| since);
        *working_since = Some((load.steps, since));
        let silence = now.saturating_duration_since(since);
        (silence > self.limit).then_some(silence)
    }
}

/// Looks for as long as the server runs. When the engine gets stuck, everything that waits for it ends with an error
/// and nothing new is taken; when it goes on, so does the server.
pub(crate) async fn watch(app: Arc<App>) {
    let mut looks = interval((app.options.stall_timeout / LOOKS).clamp(SHORTEST_LOOK, RAREST_LOOK));
    let mut stuck = false;
    loop {
        looks.tick().await;
        let silence = app.watchdog.stalled(&app.engine.load().snapshot(), Instant::now());
        match silence {
            Some(silence) if !stuck => {
                tell(&app, silence);
                app.metrics.stalled();
                if !app.is_ending() {
                    app.end_all(Ending::Stalled(silence));
                }
            }
            None if stuck => app.go_on(),
            _ => {}
        }
        stuck = silence.is_some();
    }
}

/// Waits for an engine that has failed or is stuck, and says what is known of it.
pub(crate) async fn failure(app: &App) -> String {
    let mut looks = interval(FAILURE_LOOK);
    loop {
        looks.tick().await;
        if let EngineState::Failed(reason) = app.engine.load().state() {
            return format!("the engine has failed: {reason}");
        }
        if let Some(stalled @ Ending::Stalled(_)) = &*app.ending().borrow() {
            return stalled.error().message;
        }
    }
}

/// Writes what is known to the log: the engine's counters, and every request with its state.
fn tell(app: &App, silence: Duration) {
    let load = app.engine.load();
    let counters = load.snapshot();
    let step = load.step_in_hand();
    tracing::error!(
        silent_s = silence.as_secs(),
        step = step.map(|step| format!("{:?} of {}", step.kind, step.members).to_lowercase()),
        step_running_s = step.map(|step| step.running_s.round()),
        steps = counters.steps,
        since_last_step_s = counters.idle_s.round(),
        running = counters.running,
        waiting = counters.waiting,
        pages_used = counters.pages_used,
        pages_total = counters.pages_total,
        slots_used = counters.slots_used,
        "the engine is stuck: it has work and completes no step; its requests end with an error"
    );
    let slots = app.live.slots();
    for slot in slots.iter().take(MOST_LISTED) {
        tracing::error!(
            id = slot.id,
            request = slot.request_id,
            key = slot.key,
            state = slot.state,
            prompt_tokens = slot.prompt_tokens,
            processed_tokens = slot.processed_tokens,
            cached_tokens = slot.cached_tokens,
            generated_tokens = slot.generated_tokens,
            age_s = slot.age_s,
            silent_s = slot.silent_s,
            "in hand"
        );
    }
    if slots.len() > MOST_LISTED {
        tracing::error!(more = slots.len() - MOST_LISTED, "in hand");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_stall_needs_work_and_silence() {
        let watchdog = Watchdog::new(Duration::from_secs(10));
        let load = qwill_contract::Load::default();
        load.set_state(EngineState::Ready);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let stalled = |seconds| watchdog.stalled(&load.snapshot(), at(seconds));
        assert_eq!(stalled(100), None, "idle");
        load.running.store(1, Ordering::Relaxed);
        assert_eq!(stalled(100), None, "work is seen first");
        assert_eq!(stalled(105), None, "five seconds of work");
        assert_eq!(stalled(111), Some(Duration::from_secs(11)));
        load.step_done();
        assert_eq!(stalled(112), None, "a step was completed");
        assert_eq!(stalled(130), Some(Duration::from_secs(18)));
        load.set_state(EngineState::Failed("lost".into()));
        assert_eq!(stalled(140), None, "that is another matter");
    }
}
