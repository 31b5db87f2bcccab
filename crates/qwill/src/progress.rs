//! How far loading has come: a bar for people, a line every few seconds for logs.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use qwill_model::LoadProgress;

use crate::units;

/// Lines come this often when nobody watches a bar.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Shows [`LoadProgress`].
pub(crate) struct LoadDisplay {
    bar: ProgressBar,
    verb: &'static str,
    started: Instant,
    last_line: Instant,
}

impl LoadDisplay {
    /// `verb` says what is done to the weights: "loading", "quantising to int4".
    pub(crate) fn new(verb: &'static str) -> Self {
        // Hidden by itself when standard error is not a terminal.
        let bar = ProgressBar::new(0);
        let style =
            ProgressStyle::with_template("  {prefix} {wide_bar:.cyan/dim} {percent:>3} %, {msg}, {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━━─"));
        bar.set_prefix(verb);
        let now = Instant::now();
        Self { bar, verb, started: now, last_line: now }
    }

    /// Some more rows are in place.
    pub(crate) fn show(&mut self, progress: LoadProgress<'_>) {
        if self.bar.is_hidden() && self.last_line.elapsed() < LINE_INTERVAL {
            return;
        }
        let rate = progress.bytes as f64 / self.started.elapsed().as_secs_f64().max(1e-3);
        let placed = format!("{} at {}/s", units::bytes(progress.bytes), units::bytes(rate as u64));
        if self.bar.is_hidden() {
            self.last_line = Instant::now();
            tracing::info!("{}: {} of {} matrices, {placed}", self.verb, progress.done, progress.total);
            return;
        }
        self.bar.set_length(progress.total_bytes);
        self.bar.set_message(placed);
        self.bar.set_position(progress.bytes);
    }
}

impl Drop for LoadDisplay {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
