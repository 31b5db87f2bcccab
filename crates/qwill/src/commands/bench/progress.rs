//! How far a measurement has come: a bar for people, a line per row otherwise. All on standard error.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use qwill_bench::Observer;
use qwill_bench::protocol::{Prompts, Row};
use qwill_bench::sample::Sample;

/// The bar's clock moves this often while a request takes long.
const TICK: Duration = Duration::from_millis(250);

/// Shows what the measurement tells.
pub(super) struct Progress {
    bar: ProgressBar,
    failed: AtomicUsize,
}

impl Progress {
    pub(super) fn new() -> Self {
        // Hidden by itself when standard error is not a terminal.
        let bar = ProgressBar::new(0);
        let style =
            ProgressStyle::with_template("  {prefix} {wide_bar:.cyan/dim} {pos}/{len}{msg}, {elapsed}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━━─"));
        bar.enable_steady_tick(TICK);
        Self { bar, failed: AtomicUsize::new(0) }
    }

    fn begin(&self, what: String, requests: usize) {
        if self.bar.is_hidden() {
            eprintln!("{what}");
        }
        self.failed.store(0, Ordering::Relaxed);
        self.bar.set_prefix(what);
        self.bar.set_message("");
        self.bar.set_length(requests as u64);
        self.bar.set_position(0);
        self.bar.reset_elapsed();
    }
}

impl Observer for Progress {
    fn stage(&self, what: &str, requests: usize) {
        self.begin(what.to_owned(), requests);
    }

    fn row_began(&self, row: &Row, at: usize, of: usize) {
        let shape = match row.prompts {
            Prompts::Chats => "chats".to_owned(),
            Prompts::RandomTokens(tokens) => format!("{tokens} tokens"),
            Prompts::SharedTokens(tokens) => format!("{tokens} tokens in common"),
            Prompts::Talks { talks, tokens } => format!("{talks} talks of {tokens} tokens"),
        };
        let what =
            format!("{} of {of}: {}, {shape}, {} at once", at + 1, row.protocol.name(), row.concurrency);
        self.begin(what, row.requests);
    }

    fn request_ended(&self, sample: &Sample) {
        if !sample.is_ok() {
            let failed = self.failed.fetch_add(1, Ordering::Relaxed) + 1;
            self.bar.set_message(format!(", {failed} failed"));
        }
        self.bar.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
