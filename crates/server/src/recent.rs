//! What happened lately, for the status page: how many tokens came and went, and what failed.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::accounts::Account;

/// Time between two samples.
pub(crate) const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);
/// Samples kept: five minutes.
const SAMPLES: usize = 150;
/// Failed requests remembered.
const ERRORS: usize = 20;

/// Token counters at one moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Totals {
    /// Prompt tokens processed.
    pub(crate) prompt: u64,
    /// Prompt tokens found in the cache.
    pub(crate) cached: u64,
    /// Tokens generated.
    pub(crate) generated: u64,
}

/// Tokens a second between two samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Rates {
    /// Seconds from the end of the interval to now.
    age_s: f64,
    prompt: f64,
    cached: f64,
    generated: f64,
}

/// Counters of the last minutes.
#[derive(Default)]
pub(crate) struct History(Mutex<VecDeque<(Instant, Totals)>>);

impl History {
    pub(crate) fn note(&self, now: Instant, totals: Totals) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.len() > SAMPLES {
            samples.pop_front();
        }
        samples.push_back((now, totals));
    }

    /// Oldest first.
    pub(crate) fn rates(&self, now: Instant) -> Vec<Rates> {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pairs = samples.iter().zip(samples.iter().skip(1));
        let rates = |(before, after): (&(Instant, Totals), &(Instant, Totals))| {
            let seconds = after.0.saturating_duration_since(before.0).as_secs_f64();
            let rate = |counter: fn(&Totals) -> u64| {
                let tokens = counter(&after.1).saturating_sub(counter(&before.1));
                if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
            };
            Rates {
                age_s: now.saturating_duration_since(after.0).as_secs_f64(),
                prompt: rate(|totals| totals.prompt),
                cached: rate(|totals| totals.cached),
                generated: rate(|totals| totals.generated),
            }
        };
        pairs.map(rates).collect()
    }
}

/// A request that failed. The message is the one of the log, which quotes nothing of the request.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct RecentError {
    /// Seconds since 1970.
    pub(crate) time: u64,
    pub(crate) endpoint: &'static str,
    pub(crate) request_id: String,
    pub(crate) status: u16,
    pub(crate) message: String,
    /// The name of the key that it came with.
    #[serde(skip)]
    pub(crate) key: String,
}

/// The last requests that failed.
#[derive(Default)]
pub(crate) struct RecentErrors(Mutex<VecDeque<RecentError>>);

impl RecentErrors {
    pub(crate) fn note(&self, error: RecentError) {
        let mut errors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if errors.len() == ERRORS {
            errors.pop_front();
        }
        errors.push_back(error);
    }

    /// Those that a caller may see, latest first: its own; the admin sees all.
    pub(crate) fn list(&self, caller: &Account) -> Vec<RecentError> {
        let errors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_visible = |error: &&RecentError| caller.admin || error.key == caller.name;
        errors.iter().rev().filter(is_visible).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::RateLimits;

    #[test]
    fn rates_are_differences_by_their_times() {
        let history = History::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(history.rates(start), []);
        history.note(at(0), Totals { prompt: 0, cached: 0, generated: 100 });
        history.note(at(2), Totals { prompt: 50, cached: 10, generated: 100 });
        history.note(at(6), Totals { prompt: 50, cached: 10, generated: 180 });
        let rates = history.rates(at(7));
        assert_eq!(
            rates,
            [
                Rates { age_s: 5.0, prompt: 25.0, cached: 5.0, generated: 0.0 },
                Rates { age_s: 1.0, prompt: 0.0, cached: 0.0, generated: 20.0 },
            ]
        );
        for sample in 0..1000 {
            history.note(at(10 + sample), Totals { prompt: 0, cached: 0, generated: 0 });
        }
        assert_eq!(history.rates(at(2000)).len(), SAMPLES);
    }

    #[test]
    fn only_the_last_errors_are_kept_latest_first() {
        let errors = RecentErrors::default();
        for status in 400..400 + ERRORS as u16 + 5 {
            let (request_id, message, key) = ("req-1".to_owned(), "no".to_owned(), "bob".to_owned());
            errors.note(RecentError {
                time: 0,
                endpoint: "/v1/completions",
                request_id,
                status,
                message,
                key,
            });
        }
        let listed = errors.list(&Account::new("bob".to_owned(), false, RateLimits::default()));
        assert_eq!(listed.len(), ERRORS);
        assert_eq!(listed.first().map(|error| error.status), Some(404 + ERRORS as u16));
    }
}
