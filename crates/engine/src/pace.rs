//! How fast prompts are processed, for slices that take no longer than a running stream may wait.

use std::time::Duration;

use qwill_device::batch::CHUNK_TOKENS;

/// Weight of a new slice: a prompt's later rows attend to more, so that old slices soon say too little.
const WEIGHT: f32 = 0.5;
/// Rows of a slice before anything is known.
const FIRST_ROWS: usize = 4 * CHUNK_TOKENS;

/// Time per row of recent slices.
#[derive(Debug, Default)]
pub(crate) struct SlicePace {
    us_per_row: Option<f32>,
}

impl SlicePace {
    /// Notes a slice.
    pub(crate) fn record(&mut self, rows: usize, took: Duration) {
        let us_per_row = took.as_secs_f32() * 1e6 / rows.max(1) as f32;
        self.us_per_row = Some(match self.us_per_row {
            Some(before) if before > us_per_row => before + WEIGHT * (us_per_row - before),
            _ => us_per_row,
        });
    }

    /// Rows of a slice that takes no longer than `most`, and no more than `limit`; but at least a chunk, which is not cut.
    pub(crate) fn rows_within(&self, most: Duration, limit: usize) -> usize {
        // Rows beyond what fits an integer are cut off by the conversion.
        let rows = self.us_per_row.map_or(FIRST_ROWS, |us| (most.as_secs_f32() * 1e6 / us) as usize);
        rows.min(limit).max(CHUNK_TOKENS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_as_long_as_the_time_allows() {
        let mut pace = SlicePace::default();
        let quarter = Duration::from_millis(250);
        assert_eq!(pace.rows_within(quarter, 2048), FIRST_ROWS, "nothing is known");
        pace.record(500, Duration::from_millis(100));
        assert_eq!(pace.rows_within(quarter, 2048), 1250);
        assert_eq!(pace.rows_within(quarter, 1024), 1024);
        assert_eq!(pace.rows_within(Duration::from_millis(1), 1024), CHUNK_TOKENS);
        assert_eq!(pace.rows_within(Duration::ZERO, 1024), CHUNK_TOKENS);
        pace.record(100, Duration::ZERO);
        pace.record(100, Duration::ZERO);
        assert!(pace.rows_within(quarter, usize::MAX) >= 4999);
    }

    #[test]
    fn slower_rows_count_at_once_and_faster_ones_by_and_by() {
        let mut pace = SlicePace::default();
        let rows = |pace: &SlicePace| pace.rows_within(Duration::from_millis(100), usize::MAX);
        pace.record(100, Duration::from_millis(10));
        pace.record(100, Duration::from_millis(40));
        assert_eq!(rows(&pace), 250);
        pace.record(100, Duration::from_millis(10));
        assert_eq!(rows(&pace), 400);
    }
}
