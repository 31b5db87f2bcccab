//! When somebody who finds the queue full should come back: by how fast requests have left it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What is said before anything was measured.
const UNKNOWN: Duration = Duration::from_secs(1);
/// A longer wait is as good as never, and things may change meanwhile.
const LONGEST: Duration = Duration::from_mins(10);
/// Weight of the newest interval.
const FADING: f64 = 0.2;

/// Measures and promises.
#[derive(Debug, Default)]
pub(crate) struct QueuePace(Mutex<Pace>);

#[derive(Debug, Default)]
struct Pace {
    last_start: Option<Instant>,
    /// Whether others waited when the last one began; otherwise the time until the next one says nothing.
    others_waited: bool,
    /// Between two requests that begin while others wait.
    interval_s: Option<f64>,
    /// The last time that was promised to somebody.
    promised: Option<Instant>,
}

impl QueuePace {
    /// A request begins; `waiting` others do not.
    pub(crate) fn note_start(&self, now: Instant, waiting: usize) {
        let mut pace = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = pace.last_start.filter(|_| pace.others_waited) {
            let newest = now.saturating_duration_since(last).as_secs_f64();
            let interval = pace.interval_s.map_or(newest, |before| before + FADING * (newest - before));
            pace.interval_s = Some(interval);
        }
        pace.last_start = Some(now);
        pace.others_waited = waiting > 0;
    }

    /// How long until a place in the queue is free for somebody who comes now: everybody who is refused gets a time of
    /// their own, so that they do not all come back for the same place.
    pub(crate) fn promise(&self, now: Instant) -> Duration {
        let mut pace = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let measured = pace.interval_s.map_or(UNKNOWN, Duration::from_secs_f64);
        // What takes long now was not measured yet.
        let since = pace.last_start.map(|last| now.saturating_duration_since(last)).unwrap_or_default();
        let interval = measured.max(since).min(LONGEST);
        let from = pace.promised.filter(|promised| *promised > now).unwrap_or(now);
        let at = (from + interval).min(now + LONGEST);
        pace.promised = Some(at);
        at.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_follow_what_was_measured() {
        let pace = QueuePace::default();
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let near = |wait: Duration, seconds: f64| (wait.as_secs_f64() - seconds).abs() < 0.01;
        assert_eq!(pace.promise(at(0.0)), UNKNOWN);
        for number in 0..40 {
            pace.note_start(at(10.0 + 3.0 * f64::from(number)), 5);
        }
        let now = at(10.0 + 3.0 * 39.0);
        assert!(near(pace.promise(now), 3.0) && near(pace.promise(now), 6.0) && near(pace.promise(now), 9.0));
        let later = now + Duration::from_secs(3);
        pace.note_start(later, 5);
        assert!(near(pace.promise(later), 9.0), "three have been promised a place before");
        let much_later = later + Duration::from_secs(100);
        assert!(near(pace.promise(much_later), 100.0), "nothing has moved for so long");
    }

    #[test]
    fn idle_times_say_nothing_and_no_promise_is_endless() {
        let pace = QueuePace::default();
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        pace.note_start(at(0), 0);
        pace.note_start(at(1000), 1);
        pace.note_start(at(1002), 0);
        pace.note_start(at(5000), 0);
        assert_eq!(pace.promise(at(5000)), Duration::from_secs(2));
        pace.note_start(at(5000), 1);
        for _ in 0..1000 {
            assert!(pace.promise(at(5000)) <= LONGEST);
        }
        assert_eq!(pace.promise(at(5000)), LONGEST);
    }
}
