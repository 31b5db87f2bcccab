//! What is kept of one request.

use serde::Serialize;

/// Times and counts of one request. Times are on the client's monotonic clock.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Sample {
    /// Which of the row's requests.
    pub index: usize,
    /// When it was sent, µs after the row began.
    pub start_us: u64,
    /// When each chunk with text arrived, µs after it was sent. Chunks that arrive in one packet share a time.
    pub chunk_us: Vec<u64>,
    /// When the chunk with the finish reason arrived, µs after it was sent.
    pub finish_us: Option<u64>,
    /// When the answer ended or failed, µs after it was sent.
    pub end_us: u64,
    /// Prompt tokens by the server's count.
    pub prompt_tokens: u64,
    /// Prompt tokens that the server did not compute anew, where it says so.
    pub cached_tokens: Option<u64>,
    /// Generated tokens by the server's count.
    pub completion_tokens: u64,
    /// Which question of its conversation it was, counted from 0.
    pub turn: usize,
    /// The text, without thinking: conversations send it back.
    #[serde(skip)]
    pub answer: String,
    /// Why generation ended: `stop`, `length`.
    pub finish_reason: Option<String>,
    /// Why the request failed. A failed request takes part in no figure but the count of failures and the wall
    /// clock.
    pub error: Option<String>,
}

impl Sample {
    /// Whether it counts.
    pub fn is_ok(&self) -> bool {
        self.error.is_none()
    }

    /// Time to the first token: to the first chunk with text, or, when no token had any, to the end.
    pub fn first_us(&self) -> Option<u64> {
        self.chunk_us.first().copied().or(self.finish_us)
    }

    /// Time to the last token: to the last chunk with text or the finish reason, whichever came later.
    pub fn last_us(&self) -> Option<u64> {
        self.chunk_us.last().copied().max(self.finish_us)
    }

    /// Time per output token after the first, ms: (last - first) / (tokens - 1). `None` below two tokens.
    pub fn per_token_ms(&self) -> Option<f64> {
        let steps = self.completion_tokens.checked_sub(1).filter(|&steps| steps > 0)?;
        Some((self.last_us()? - self.first_us()?) as f64 / 1e3 / steps as f64)
    }

    /// Tokens a second after the first. `None` below two tokens, or when no time passed.
    pub fn decode_tokens_per_s(&self) -> Option<f64> {
        self.per_token_ms().filter(|&ms| ms > 0.0).map(|ms| 1e3 / ms)
    }

    /// Times between successive chunks, ms.
    pub fn gaps_ms(&self) -> impl Iterator<Item = f64> {
        self.chunk_us.windows(2).map(|pair| (pair[1] - pair[0]) as f64 / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_follow_from_chunks_and_usage() {
        let sample = Sample {
            chunk_us: vec![100_000, 110_000, 140_000],
            finish_us: Some(140_000),
            completion_tokens: 5,
            ..Sample::default()
        };
        assert_eq!(sample.first_us(), Some(100_000));
        // Five tokens in three chunks: four steps in 40 ms.
        assert_eq!(sample.per_token_ms(), Some(10.0));
        assert_eq!(sample.decode_tokens_per_s(), Some(100.0));
        assert_eq!(sample.gaps_ms().collect::<Vec<f64>>(), [10.0, 30.0]);
    }

    #[test]
    fn tokens_without_text_are_timed_by_the_end() {
        let silent = Sample { finish_us: Some(50_000), completion_tokens: 1, ..Sample::default() };
        assert_eq!(silent.first_us(), Some(50_000));
        assert_eq!(silent.per_token_ms(), None);
        let tail = Sample {
            chunk_us: vec![10_000],
            finish_us: Some(30_000),
            completion_tokens: 3,
            ..Sample::default()
        };
        assert_eq!(tail.per_token_ms(), Some(10.0));
    }

    #[test]
    fn nothing_follows_from_nothing() {
        let nothing = Sample::default();
        assert_eq!((nothing.first_us(), nothing.per_token_ms()), (None, None));
        let at_once = Sample { chunk_us: vec![5, 5], completion_tokens: 2, ..Sample::default() };
        assert_eq!(at_once.decode_tokens_per_s(), None);
    }
}
