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
    /// `verb` says what is done to the weights: "loading", "quantising to int4"; `parameters` how many there are.
    pub(crate) fn new(verb: &'static str, parameters: u64) -> Self {
        // Hidden by itself when standard error is not a terminal.
        let bar = ProgressBar::new(parameters);
        let style =
            ProgressStyle::with_template("  {prefix} {wide_bar:.cyan/dim} {percent:>3} %, {msg}, {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━━─"));
        bar.set_prefix(verb);
        let now = Instant::now();
        Self { bar, verb, started: now, last_line: now }
    }

    /// One more matrix is in place.
    pub(crate) fn show(&mut self, progress: LoadProgress<'_>) {
        if self.bar.is_hidden() && self.last_line.elapsed() < LINE_INTERVAL {
            return;
        }
        let rate = progress.parameters as f64 / self.started.elapsed().as_secs_f64().max(1e-3);
        let rate = format!("{} parameters/s", units::parameters(rate as u64));
        if self.bar.is_hidden() {
            self.last_line = Instant::now();
            tracing::info!("{}: {} of {} matrices, {rate}", self.verb, progress.done, progress.total);
            return;
        }
        self.bar.set_message(rate);
        self.bar.set_position(progress.parameters);
    }
}

impl Drop for LoadDisplay {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
