//! An answer on its way to the terminal.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::Value;

use crate::client::{Client, Delta};
use crate::terminal;

/// How soon Ctrl-C is noticed while nothing arrives.
const POLL: Duration = Duration::from_millis(50);

/// Streams one answer to standard output. The outer error is the terminal's, the inner one the server's. The
/// text is what the model answered, without its thinking, as far as it came.
pub(super) fn stream(
    client: &Client,
    body: Value,
    interrupted: &AtomicBool,
    interactive: bool,
) -> Result<Result<String>> {
    let (sender, receiver) = mpsc::channel();
    let client = client.clone();
    let stop = Arc::new(AtomicBool::new(false));
    let asked_to_stop = Arc::clone(&stop);
    // Reading blocks, so it has a thread of its own. When it is told to stop it ends at the next byte that
    // arrives, and closing the connection cancels the request.
    std::thread::spawn(move || {
        let mut take = |delta| !asked_to_stop.load(Ordering::Acquire) && sender.send(Ok(delta)).is_ok();
        if let Err(error) = client.chat(&body, &mut take) {
            let _ = sender.send(Err(error));
        }
    });
    let mut page = Page::new(std::io::stdout(), interactive);
    loop {
        match receiver.recv_timeout(POLL) {
            Ok(Ok(delta)) => page.add(delta)?,
            Ok(Err(error)) => {
                page.end("")?;
                return Ok(Err(error));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                page.end("")?;
                return Ok(Ok(page.answer));
            }
        }
        if interrupted.load(Ordering::Acquire) {
            stop.store(true, Ordering::Release);
            page.end("stopped")?;
            return Ok(Ok(page.answer));
        }
    }
}

/// Writes deltas: thinking dimmed, or in brackets where nothing can be dimmed.
struct Page<Out: Write> {
    out: Out,
    interactive: bool,
    answer: String,
    thinking: bool,
    first: Option<Instant>,
    tokens: u64,
    reason: String,
}

impl<Out: Write> Page<Out> {
    fn new(out: Out, interactive: bool) -> Self {
        Self {
            out,
            interactive,
            answer: String::new(),
            thinking: false,
            first: None,
            tokens: 0,
            reason: String::new(),
        }
    }

    fn add(&mut self, delta: Delta) -> std::io::Result<()> {
        match delta {
            Delta::Reasoning(text) => {
                self.first.get_or_insert_with(Instant::now);
                if !self.thinking {
                    self.thinking = true;
                    self.write(if self.interactive { "" } else { "[thinking]\n" })?;
                }
                let text = if self.interactive { dim_lines(&text) } else { text };
                self.write(&text)
            }
            Delta::Content(text) => {
                self.first.get_or_insert_with(Instant::now);
                if self.thinking {
                    self.thinking = false;
                    self.write(if self.interactive { "\n\n" } else { "\n[answer]\n" })?;
                }
                self.write(&text)?;
                self.answer.push_str(&text);
                Ok(())
            }
            Delta::Finish(reason) => {
                self.reason = reason;
                Ok(())
            }
            Delta::Usage(tokens) => {
                self.tokens = tokens;
                Ok(())
            }
        }
    }

    fn end(&mut self, note: &str) -> std::io::Result<()> {
        self.write("\n")?;
        if !self.interactive {
            return Ok(());
        }
        let mut notes: Vec<String> = Vec::new();
        if let (Some(first), true) = (self.first, self.tokens > 1) {
            let rate = (self.tokens - 1) as f64 / first.elapsed().as_secs_f64().max(1e-6);
            notes.push(format!("{} tokens, {rate:.1} tokens/s", self.tokens));
        }
        if self.reason == "length" {
            notes.push("cut off: no more tokens allowed".to_owned());
        }
        if !note.is_empty() {
            notes.push(note.to_owned());
        }
        if notes.is_empty() { Ok(()) } else { self.write(&format!("{}\n", terminal::dim(&notes.join(", ")))) }
    }

    fn write(&mut self, text: &str) -> std::io::Result<()> {
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }
}

/// Dims a piece line by line: a style that spans a line's end colours the rest of the row on some terminals.
fn dim_lines(text: &str) -> String {
    text.split('\n').map(terminal::dim).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(deltas: Vec<Delta>) -> (String, String) {
        let mut page = Page::new(Vec::new(), false);
        for delta in deltas {
            page.add(delta).unwrap();
        }
        page.end("").unwrap();
        (String::from_utf8(page.out).unwrap(), page.answer)
    }

    #[test]
    fn thinking_is_set_apart_and_not_part_of_the_answer() {
        let (text, answer) = page(vec![
            Delta::Reasoning("let me ".into()),
            Delta::Reasoning("see".into()),
            Delta::Content("4".into()),
            Delta::Content("2".into()),
            Delta::Finish("stop".into()),
        ]);
        assert_eq!(text, "[thinking]\nlet me see\n[answer]\n42\n");
        assert_eq!(answer, "42");
    }

    #[test]
    fn an_answer_alone_is_plain() {
        assert_eq!(page(vec![Delta::Content("hi".into()), Delta::Usage(1)]), ("hi\n".into(), "hi".into()));
    }
}
