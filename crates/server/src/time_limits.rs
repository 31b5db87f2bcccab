//! How long a request may take.

use std::pin::Pin;
use std::time::{Duration, Instant};

use tokio::time::{Sleep, sleep_until};

/// Which time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Over {
    /// That for the whole request.
    Whole(Duration),
    /// That for waiting.
    Queue(Duration),
}

/// The times that a request has, both from its arrival on.
pub(crate) struct TimeLimits {
    whole: Option<Timer>,
    queue: Option<Timer>,
}

struct Timer {
    limit: Duration,
    sleep: Pin<Box<Sleep>>,
}

impl Timer {
    fn new(arrived: Instant, limit: Option<Duration>) -> Option<Self> {
        let limit = limit?;
        Some(Self { limit, sleep: Box::pin(sleep_until((arrived + limit).into())) })
    }
}

impl TimeLimits {
    pub(crate) fn new(arrived: Instant, whole: Option<Duration>, queue: Option<Duration>) -> Self {
        Self { whole: Timer::new(arrived, whole), queue: Timer::new(arrived, queue) }
    }

    /// Nothing of the request waits any more.
    pub(crate) fn waited(&mut self) {
        self.queue = None;
    }

    /// Completes when a time is over, and says which; each once.
    pub(crate) async fn over(&mut self) -> Over {
        let Self { whole, queue } = self;
        let (over, timer) = tokio::select! {
            limit = ring(whole) => (Over::Whole(limit), whole),
            limit = ring(queue) => (Over::Queue(limit), queue),
        };
        *timer = None;
        over
    }
}

async fn ring(timer: &mut Option<Timer>) -> Duration {
    match timer {
        Some(timer) => {
            timer.sleep.as_mut().await;
            timer.limit
        }
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_time_is_over_once_and_waiting_may_end_before() {
        let (short, long) = (Duration::from_millis(5), Duration::from_millis(20));
        let start = Instant::now();
        let mut limits = TimeLimits::new(start, Some(long), Some(short));
        assert_eq!(limits.over().await, Over::Queue(short));
        assert_eq!(limits.over().await, Over::Whole(long));
        assert!(start.elapsed() >= long);
        let mut limits = TimeLimits::new(start, Some(long), Some(short));
        limits.waited();
        assert_eq!(limits.over().await, Over::Whole(long));
        let mut none = TimeLimits::new(start, None, None);
        assert!(tokio::time::timeout(short, none.over()).await.is_err());
    }
}
