//! Stop strings in streamed text.

/// Finds the first stop string in text that arrives in chunks, and holds back text that may belong to one.
///
/// First is the one whose last byte comes first; of several that end there, the longest. That is known the
/// moment it ends, so the result does not depend on how the text was cut. Empty stop strings never match.
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    include_stop: bool,
    /// Text not yet given out: a prefix of some stop string.
    held: String,
    matched: Option<usize>,
}

/// What a chunk brought.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct StopOutcome {
    /// Text that is safe to give out.
    pub text: String,
    /// Index of the stop string that matched, now or earlier. Text after it is discarded.
    pub matched: Option<usize>,
}

/// A stop string with its automaton (Knuth, Morris, Pratt): linear in the text for any stop string.
struct Pattern {
    text: Vec<u8>,
    /// `fallback[n]`: length of the longest proper border of the first n bytes.
    fallback: Vec<usize>,
    /// How many bytes of `text` the stream currently ends with.
    state: usize,
}

impl Pattern {
    fn new(text: String) -> Self {
        let text = text.into_bytes();
        let mut fallback = vec![0; text.len() + 1];
        let mut border = 0;
        for at in 1..text.len() {
            while border > 0 && text[at] != text[border] {
                border = fallback[border];
            }
            if text[at] == text[border] {
                border += 1;
            }
            fallback[at + 1] = border;
        }
        Self { text, fallback, state: 0 }
    }

    /// Takes one byte of the stream; whether it completes the stop string. The automaton is not used after that.
    fn advance(&mut self, byte: u8) -> bool {
        if self.text.is_empty() {
            return false;
        }
        while self.state > 0 && self.text[self.state] != byte {
            self.state = self.fallback[self.state];
        }
        if self.text[self.state] == byte {
            self.state += 1;
        }
        self.state == self.text.len()
    }
}

impl StopMatcher {
    /// With `include_stop` the matched stop string is part of the text, otherwise it is hidden.
    pub fn new(stops: Vec<String>, include_stop: bool) -> Self {
        let patterns = stops.into_iter().map(Pattern::new).collect();
        Self { patterns, include_stop, held: String::new(), matched: None }
    }

    /// Takes the next chunk of text.
    pub fn push(&mut self, chunk: &str) -> StopOutcome {
        if self.matched.is_some() {
            return StopOutcome { text: String::new(), matched: self.matched };
        }
        let mut text = std::mem::take(&mut self.held);
        let held_bytes = text.len();
        text.push_str(chunk);
        for (at, &byte) in chunk.as_bytes().iter().enumerate() {
            if let Some(index) = self.advance(byte) {
                self.matched = Some(index);
                let end = held_bytes + at + 1;
                let hidden = if self.include_stop { 0 } else { self.patterns[index].text.len() };
                text.truncate(end - hidden);
                return StopOutcome { text, matched: self.matched };
            }
        }
        // A stop string starts with a whole character, so this cut is between characters.
        let keep = self.patterns.iter().map(|pattern| pattern.state).max().unwrap_or(0);
        self.held = text.split_off(text.len() - keep);
        StopOutcome { text, matched: None }
    }

    /// The end of the stream, or of a stretch that no stop string reaches beyond: text that was held back and
    /// turned out to be none of a stop string.
    pub fn finish(&mut self) -> String {
        for pattern in &mut self.patterns {
            pattern.state = 0;
        }
        std::mem::take(&mut self.held)
    }

    /// Index of the longest stop string that `byte` completes.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        let mut longest: Option<usize> = None;
        for index in 0..self.patterns.len() {
            let done = self.patterns[index].advance(byte);
            let bytes = |index: usize| self.patterns[index].text.len();
            if done && longest.is_none_or(|best| bytes(index) > bytes(best)) {
                longest = Some(index);
            }
        }
        longest
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All text given out, and the match, for a text pushed in these chunks.
    fn run<'a>(
        stops: &[&str],
        include_stop: bool,
        chunks: impl IntoIterator<Item = &'a str>,
    ) -> (String, Option<usize>) {
        let stops = stops.iter().map(ToString::to_string).collect();
        let mut matcher = StopMatcher::new(stops, include_stop);
        let mut all = String::new();
        let mut matched = None;
        for chunk in chunks {
            let outcome = matcher.push(chunk);
            all += &outcome.text;
            matched = outcome.matched;
        }
        (all + &matcher.finish(), matched)
    }

    #[test]
    fn hides_or_keeps_the_stop_string() {
        assert_eq!(run(&["END"], false, ["some EN", "D more"]), ("some ".into(), Some(0)));
        assert_eq!(run(&["END"], true, ["some EN", "D more"]), ("some END".into(), Some(0)));
    }

    #[test]
    fn holds_back_only_what_could_start_a_stop_string() {
        let mut matcher = StopMatcher::new(vec!["\n\nUser:".into()], false);
        assert_eq!(matcher.push("hello\n"), StopOutcome { text: "hello".into(), matched: None });
        assert_eq!(matcher.push("\nUs"), StopOutcome { text: String::new(), matched: None });
        assert_eq!(matcher.push("e it"), StopOutcome { text: "\n\nUse it".into(), matched: None });
        assert_eq!(matcher.push("\n\n\nUser"), StopOutcome { text: "\n".into(), matched: None });
        assert_eq!(matcher.finish(), "\n\nUser");
    }

    #[test]
    fn the_first_to_end_wins_and_then_the_longest() {
        assert_eq!(run(&["abcd", "bc"], false, ["xabcd"]), ("xa".into(), Some(1)));
        assert_eq!(run(&["bc", "abc"], false, ["xabcd"]), ("x".into(), Some(1)));
        assert_eq!(run(&["", "b"], false, ["ab"]), ("a".into(), Some(1)));
        assert_eq!(run(&[], false, ["ab"]), ("ab".into(), None));
    }

    #[test]
    fn repetitive_stop_strings_are_found_after_near_misses() {
        assert_eq!(run(&["aab"], false, ["aaaab"]), ("aa".into(), Some(0)));
        assert_eq!(run(&["ééx"], false, ["éé", "éx"]), ("é".into(), Some(0)));
    }

    /// What the definition says, by trying every end.
    fn expected(stops: &[&str], text: &str) -> (String, Option<usize>) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let at_end =
                stops.iter().enumerate().filter(|(_, s)| !s.is_empty() && text[..end].ends_with(**s));
            if let Some((index, stop)) = at_end.rev().max_by_key(|(_, stop)| stop.len()) {
                return (text[..end - stop.len()].into(), Some(index));
            }
        }
        (text.into(), None)
    }

    proptest! {
        #[test]
        fn any_chunking_gives_the_defined_result(
            chunks in prop::collection::vec("[abé]{0,4}", 0..8),
            stops in prop::collection::vec("[abé]{0,4}", 0..4),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let whole = chunks.concat();
            let by_chunk = run(&stops, false, chunks.iter().map(String::as_str));
            prop_assert_eq!(&by_chunk, &expected(&stops, &whole));
            let by_char: Vec<String> = whole.chars().map(String::from).collect();
            prop_assert_eq!(&by_chunk, &run(&stops, false, by_char.iter().map(String::as_str)));
        }
    }
}
