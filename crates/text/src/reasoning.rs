//! Separates the thinking of a model from its answer.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";
/// The template writes a newline before the closing tag; it belongs to neither side.
const CLOSE_LINE: &str = "\n</think>";

/// After more of them at the start, a `<think>` is not repeated but written.
const MOST_NEWLINES: usize = 64;

/// Whether a rendered prompt ends inside an open thinking section, so that the model's output starts in it.
pub fn prompt_opens_reasoning(prompt: &str) -> bool {
    prompt.trim_end().ends_with(OPEN)
}

/// A part of the output that is text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prose {
    /// Thinking, without its tags.
    Reasoning(String),
    /// The answer.
    Content(String),
}

/// Splits streamed output at `</think>`; the result does not depend on how the text was cut.
///
/// When the output starts inside the thinking section: a repeated `<think>` at the start is dropped, with the
/// newlines around it; so are one newline before `</think>` and all newlines after it. Text that never closes
/// the section is all reasoning, but for one newline at its end: it is the one before a `</think>` to come. Later
/// tags are content. When the output starts outside, all of it is content.
pub(crate) struct ReasoningParser {
    state: State,
    /// Text that cannot be assigned yet.
    held: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before anything but newlines, where `<think>` may be repeated.
    Start,
    /// A repeated `<think>` was dropped: the newline after it goes too.
    AfterOpen,
    Reasoning,
    /// After `</think>`, where newlines are dropped.
    AfterClose,
    /// After a tool call that ended the thinking: a `</think>` may come late.
    AfterCall,
    Content,
}

impl ReasoningParser {
    /// `starts_inside`: see [`prompt_opens_reasoning`].
    pub(crate) fn new(starts_inside: bool) -> Self {
        Self { state: if starts_inside { State::Start } else { State::Content }, held: String::new() }
    }

    /// Takes the next chunk; gives the pieces that are certain, none of them empty.
    pub(crate) fn push(&mut self, chunk: &str) -> Vec<Prose> {
        self.held.push_str(chunk);
        let mut pieces = Vec::new();
        while self.step(&mut pieces) {}
        pieces
    }

    /// Whether what comes next may be thinking.
    pub(crate) fn is_inside(&self) -> bool {
        matches!(self.state, State::Start | State::AfterOpen | State::Reasoning)
    }

    /// A tool call comes next: it ends the thinking, closed or not.
    pub(crate) fn call_begins(&mut self) -> Vec<Prose> {
        if !self.is_inside() {
            return Vec::new();
        }
        let pieces = self.finish();
        self.state = State::AfterCall;
        pieces
    }

    /// The end of the output: text that was held back. Inside the thinking section a last newline is dropped, cut
    /// short or not: templates write it back together with the closing tag.
    pub(crate) fn finish(&mut self) -> Vec<Prose> {
        let rest = std::mem::take(&mut self.held);
        let piece = if self.is_inside() {
            Prose::Reasoning(rest.strip_suffix('\n').unwrap_or(&rest).to_owned())
        } else {
            Prose::Content(rest)
        };
        match &piece {
            Prose::Reasoning(text) | Prose::Content(text) if text.is_empty() => Vec::new(),
            _ => vec![piece],
        }
    }

    /// Moves on through the held text; false when more input is needed.
    fn step(&mut self, pieces: &mut Vec<Prose>) -> bool {
        match self.state {
            State::Start => self.step_start(),
            State::AfterOpen => {
                let decided = !self.held.is_empty();
                if decided {
                    if self.held.starts_with('\n') {
                        self.held.drain(..1);
                    }
                    self.state = State::Reasoning;
                }
                decided
            }
            State::Reasoning => self.step_reasoning(pieces),
            State::AfterClose => {
                self.held = self.held.trim_start_matches('\n').to_owned();
                let decided = !self.held.is_empty();
                if decided {
                    self.state = State::Content;
                }
                decided
            }
            State::AfterCall => self.step_after_call(),
            State::Content => {
                pieces.extend(self.finish());
                false
            }
        }
    }

    fn step_start(&mut self) -> bool {
        let text = self.held.trim_start_matches('\n');
        let newlines = self.held.len() - text.len();
        if let Some(rest) = text.strip_prefix(OPEN).filter(|_| newlines <= MOST_NEWLINES) {
            self.held = rest.to_owned();
            self.state = State::AfterOpen;
            return true;
        }
        let decided = newlines > MOST_NEWLINES || !OPEN.starts_with(text);
        if decided {
            self.state = State::Reasoning;
        }
        decided
    }

    fn step_after_call(&mut self) -> bool {
        let text = self.held.trim_start_matches('\n');
        if let Some(rest) = text.strip_prefix(CLOSE) {
            self.held = rest.to_owned();
            self.state = State::AfterClose;
            return true;
        }
        let decided = !CLOSE.starts_with(text);
        self.held = text.to_owned();
        if decided {
            self.state = State::Content;
        }
        decided
    }

    fn step_reasoning(&mut self, pieces: &mut Vec<Prose>) -> bool {
        let closed = self.held.find(CLOSE);
        let certain = match closed {
            Some(at) => self.held[..at].strip_suffix('\n').map_or(at, str::len),
            None => self.held.len() - held_back_bytes(&self.held),
        };
        if certain > 0 {
            pieces.push(Prose::Reasoning(self.held[..certain].to_owned()));
        }
        match closed {
            Some(at) => {
                self.held.drain(..at + CLOSE.len());
                self.state = State::AfterClose;
            }
            None => {
                self.held.drain(..certain);
            }
        }
        closed.is_some()
    }
}

/// Length of the longest end of `text` that may be the start of the closing tag, with or without its newline.
fn held_back_bytes(text: &str) -> usize {
    let longest = CLOSE_LINE.len() - 1;
    (1..=longest)
        .rev()
        .find(|&n| {
            let with_line = text.ends_with(&CLOSE_LINE[..n]);
            with_line || (n < CLOSE.len() && text.ends_with(&CLOSE[..n]))
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reasoning and content of output pushed in these chunks.
    fn run<'a>(starts_inside: bool, chunks: impl IntoIterator<Item = &'a str>) -> (String, String) {
        let mut parser = ReasoningParser::new(starts_inside);
        let mut pieces: Vec<Prose> = chunks.into_iter().flat_map(|chunk| parser.push(chunk)).collect();
        pieces.extend(parser.finish());
        let (mut reasoning, mut content) = (String::new(), String::new());
        for piece in pieces {
            match piece {
                Prose::Reasoning(text) => {
                    assert!(content.is_empty() && !text.is_empty(), "reasoning comes first");
                    reasoning += &text;
                }
                Prose::Content(text) => {
                    assert!(!text.is_empty());
                    content += &text;
                }
            }
        }
        (reasoning, content)
    }

    #[test]
    fn splits_at_the_closing_tag() {
        let cases = [
            ("hm\n</think>\n\nyes", "hm", "yes"),
            ("hm</think>yes", "hm", "yes"),
            ("hm\n\n</think>\n yes\n", "hm\n", " yes\n"),
            ("\n</think>\n\n", "", ""),
            ("</think>a</think>b", "", "a</think>b"),
            ("never closed\n</thin", "never closed\n</thin", ""),
            ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
            ("\n\n<think>hm</think>yes", "hm", "yes"),
            ("\nhm </think>yes", "\nhm ", "yes"),
            ("a <think> b</think>c", "a <think> b", "c"),
            ("<thi", "<thi", ""),
            ("cut short\n", "cut short", ""),
            ("cut short\n\n", "cut short\n", ""),
            ("\n", "", ""),
            ("<think>\n", "", ""),
            ("<think>\n</think>x", "", "x"),
            ("<think>\n\nhm</think>x", "\nhm", "x"),
            ("hm</think>\n<tool_call>\n", "hm", "<tool_call>\n"),
        ];
        let lines = "\n".repeat(65);
        assert_eq!(run(true, [&*(lines.clone() + "<think>")]), (lines + "<think>", String::new()));
        for (output, reasoning, content) in cases {
            assert_eq!(run(true, [output]), (reasoning.into(), content.into()), "{output:?}");
        }
    }

    #[test]
    fn one_newline_goes_after_a_repeated_opening() {
        assert_eq!(run(true, ["<think>", "\n", "\n", "hm</think>x"]), ("\nhm".into(), "x".into()));
    }

    #[test]
    fn outside_everything_is_content() {
        assert_eq!(run(false, ["\n<think>a</think>", "b"]), (String::new(), "\n<think>a</think>b".into()));
    }

    #[test]
    fn streams_what_is_certain() {
        let mut parser = ReasoningParser::new(true);
        assert_eq!(parser.push("one two\n"), [Prose::Reasoning("one two".into())]);
        assert_eq!(parser.push("three"), [Prose::Reasoning("\nthree".into())]);
        assert_eq!(parser.push("\n</th"), []);
        assert_eq!(parser.push("ink>\n\n"), []);
        assert_eq!(parser.push("four\n"), [Prose::Content("four\n".into())]);
        assert_eq!(parser.finish(), []);
    }

    #[test]
    fn the_prompt_tells_where_output_starts() {
        assert!(prompt_opens_reasoning("<|im_start|>assistant\n<think>\n"));
        assert!(!prompt_opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
        assert!(!prompt_opens_reasoning("<|im_start|>assistant\n"));
    }

    proptest! {
        #[test]
        fn any_chunking_gives_the_same(
            parts in prop::collection::vec(
                prop::sample::select(vec!["<think>", "</think>", "<", "</", "think>", "\n", "a", "é", "<tool_call>"]),
                0..12,
            ),
            starts_inside: bool,
            cuts in prop::collection::vec(1usize..5, 1..8),
        ) {
            let whole = parts.concat();
            let chars: Vec<char> = whole.chars().collect();
            let mut chunks = Vec::new();
            let mut rest = &chars[..];
            for cut in cuts.iter().cycle().take_while(|_| !chars.is_empty()) {
                let (chunk, after) = rest.split_at((*cut).min(rest.len()));
                chunks.push(chunk.iter().collect::<String>());
                rest = after;
                if rest.is_empty() {
                    break;
                }
            }
            let by_chunk = run(starts_inside, chunks.iter().map(String::as_str));
            prop_assert_eq!(by_chunk, run(starts_inside, [whole.as_str()]));
        }
    }
}
