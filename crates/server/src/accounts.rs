//! Who uses the server, and how much of it they may still use.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::error::{ApiError, whole_seconds};
use crate::keys::RateLimits;

/// The holder of a key.
pub(crate) struct Account {
    /// What logs and metrics call it.
    pub(crate) name: String,
    /// Whether it may touch what is not its own.
    pub(crate) admin: bool,
    limits: RateLimits,
    left: Mutex<Left>,
}

/// What may be used now. It grows with time up to a minute's worth, so that much may come at once. An answer's tokens
/// are known only when they are there: they may bring it below nothing, and time has to make up for that.
#[derive(Debug, Clone, Copy)]
struct Left {
    requests: f64,
    tokens: f64,
    at: Instant,
}

impl Account {
    pub(crate) fn new(name: String, admin: bool, limits: RateLimits) -> Self {
        let full = |limit: Option<u32>| f64::from(limit.unwrap_or(0));
        let (requests, tokens) = (full(limits.requests_per_minute), full(limits.tokens_per_minute));
        Self { name, admin, limits, left: Mutex::new(Left { requests, tokens, at: Instant::now() }) }
    }

    pub(crate) fn limits(&self) -> RateLimits {
        self.limits
    }

    /// Takes a request with so many prompt tokens, or says how long it has to wait. A prompt longer than a minute's
    /// worth is taken when a whole minute's worth is there.
    pub(crate) fn admit(&self, prompt_tokens: usize, now: Instant) -> Result<(), ApiError> {
        let RateLimits { requests_per_minute, tokens_per_minute } = self.limits;
        let mut left = self.left(now);
        if let Some(limit) = requests_per_minute
            && left.requests < 1.0
        {
            return Err(refusal("requests", limit, wait(1.0 - left.requests, limit)));
        }
        if let Some(limit) = tokens_per_minute {
            let needed = (prompt_tokens as f64).min(f64::from(limit));
            if left.tokens < needed {
                return Err(refusal("tokens", limit, wait(needed - left.tokens, limit)));
            }
        }
        left.requests -= 1.0;
        left.tokens -= prompt_tokens as f64;
        Ok(())
    }

    /// Tokens of an answer.
    pub(crate) fn charge(&self, tokens: usize, now: Instant) {
        if self.limits.tokens_per_minute.is_some() {
            self.left(now).tokens -= tokens as f64;
        }
    }

    /// Tells a client with limits where it stands, in the headers that the `OpenAI` clients look for.
    pub(crate) fn show(&self, now: Instant, headers: &mut HeaderMap) {
        let RateLimits { requests_per_minute, tokens_per_minute } = self.limits;
        let left = *self.left(now);
        if let Some(limit) = requests_per_minute {
            show_one(
                headers,
                ["limit-requests", "remaining-requests", "reset-requests"],
                limit,
                left.requests,
            );
        }
        if let Some(limit) = tokens_per_minute {
            show_one(headers, ["limit-tokens", "remaining-tokens", "reset-tokens"], limit, left.tokens);
        }
    }

    /// What is left at `now`.
    fn left(&self, now: Instant) -> MutexGuard<'_, Left> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let minutes = now.saturating_duration_since(left.at).as_secs_f64() / 60.0;
        let grow = |left: &mut f64, limit: Option<u32>| {
            let limit = f64::from(limit.unwrap_or(0));
            *left = (*left + limit * minutes).min(limit);
        };
        grow(&mut left.requests, self.limits.requests_per_minute);
        grow(&mut left.tokens, self.limits.tokens_per_minute);
        left.at = left.at.max(now);
        left
    }
}

/// Time until `missing` has grown.
fn wait(missing: f64, per_minute: u32) -> Duration {
    Duration::from_secs_f64(missing.max(0.0) * 60.0 / f64::from(per_minute.max(1)))
}

fn refusal(what: &str, limit: u32, wait: Duration) -> ApiError {
    let seconds = whole_seconds(wait);
    let message =
        format!("this key may use {limit} {what} a minute and has used them: try again in {seconds} s");
    let mut error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("rate_limit_exceeded");
    error.retry_after = Some(wait);
    error
}

fn show_one(headers: &mut HeaderMap, names: [&'static str; 3], limit: u32, left: f64) {
    let reset = wait(f64::from(limit) - left, limit).as_secs_f64();
    let values = [limit.to_string(), format!("{}", left.max(0.0).floor()), format!("{reset:.3}s")];
    for (name, value) in names.into_iter().zip(values) {
        let name = HeaderName::try_from(format!("x-ratelimit-{name}"));
        if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
            headers.insert(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(requests: Option<u32>, tokens: Option<u32>) -> (Account, Instant) {
        let limits = RateLimits { requests_per_minute: requests, tokens_per_minute: tokens };
        let account = Account::new("a".into(), false, limits);
        let start = account.left.lock().unwrap().at;
        (account, start)
    }

    #[test]
    fn requests_come_back_with_time() {
        let (account, start) = account(Some(6), None);
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        for _ in 0..6 {
            account.admit(1000, at(0.0)).unwrap();
        }
        let refused = account.admit(1, at(4.0)).unwrap_err();
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
        let wait = refused.retry_after.unwrap().as_secs_f64();
        assert!((wait - 6.0).abs() < 1e-6, "one comes back every ten seconds: {wait}");
        account.admit(1, at(10.01)).unwrap();
        account.admit(1, at(10.02)).unwrap_err();
        for _ in 0..6 {
            account.admit(1, at(1000.0)).unwrap();
        }
        account.admit(1, at(1000.0)).unwrap_err();
    }

    #[test]
    fn tokens_of_answers_are_paid_for_afterwards() {
        let (account, start) = account(None, Some(600));
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        account.admit(100, at(0)).unwrap();
        account.charge(700, at(0));
        let wait = account.admit(10, at(0)).unwrap_err().retry_after.unwrap().as_secs_f64();
        assert!((wait - 21.0).abs() < 1e-6, "210 tokens are missing: {wait}");
        account.admit(10, at(22)).unwrap();
        let long = account.admit(5000, at(30)).unwrap_err();
        assert!(long.message.contains("600 tokens a minute"), "{}", long.message);
        account.admit(5000, at(200)).unwrap();
    }

    #[test]
    fn headers_say_what_is_left() {
        let (limited, start) = account(Some(60), Some(1000));
        limited.admit(250, start).unwrap();
        let mut headers = HeaderMap::new();
        limited.show(start, &mut headers);
        let of = |name: &str| headers[name].to_str().unwrap().to_owned();
        assert_eq!(of("x-ratelimit-limit-requests"), "60");
        assert_eq!(of("x-ratelimit-remaining-requests"), "59");
        assert_eq!(of("x-ratelimit-reset-requests"), "1.000s");
        assert_eq!(of("x-ratelimit-remaining-tokens"), "750");
        assert_eq!(of("x-ratelimit-reset-tokens"), "15.000s");
        let (free, start) = account(None, None);
        let mut headers = HeaderMap::new();
        free.show(start, &mut headers);
        assert!(headers.is_empty());
        (0..100).for_each(|_| free.admit(1_000_000, start).unwrap());
    }
}
