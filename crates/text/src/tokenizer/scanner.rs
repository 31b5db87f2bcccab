//! The pre-tokenizer: cuts text into the pieces within which BPE may merge.
//!
//! A hand-written equivalent of the Qwen pattern
//! `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`:
//! every alternative needs only one or two characters of lookahead and the end of a whitespace run, so each
//! character is looked at a bounded number of times, whatever the text.

use std::sync::OnceLock;

use regex_syntax::hir::{Class, HirKind};

/// Where combining marks (`\p{M}`) belong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Marks {
    /// With the letters of a word: the Qwen3.5 family.
    InWords,
    /// With the symbols: Qwen2 and Qwen3.
    AsSymbols,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Letter,
    Mark,
    Number,
    Newline,
    Space,
    Symbol,
}

/// General categories of all code points: 0 for none of L, M, N.
struct Categories(Box<[u8]>);

const LETTER: u8 = 1;
const MARK: u8 = 2;
const NUMBER: u8 = 3;

impl Categories {
    fn shared() -> &'static Self {
        static TABLE: OnceLock<Categories> = OnceLock::new();
        TABLE.get_or_init(|| {
            let mut table = vec![0; char::MAX as usize + 1].into_boxed_slice();
            for (pattern, category) in [(r"\p{L}", LETTER), (r"\p{M}", MARK), (r"\p{N}", NUMBER)] {
                let class = regex_syntax::parse(pattern).map(regex_syntax::hir::Hir::into_kind);
                let Ok(HirKind::Class(Class::Unicode(class))) = class else {
                    unreachable!("the pattern {pattern} is a Unicode class");
                };
                for range in class.ranges() {
                    table[range.start() as usize..=range.end() as usize].fill(category);
                }
            }
            Self(table)
        })
    }

    fn kind(&self, c: char) -> Kind {
        match self.0[c as usize] {
            LETTER => Kind::Letter,
            MARK => Kind::Mark,
            NUMBER => Kind::Number,
            _ if matches!(c, '\r' | '\n') => Kind::Newline,
            _ if c.is_whitespace() => Kind::Space,
            _ => Kind::Symbol,
        }
    }
}

/// Iterator over the pieces of a text; joined they are the text.
pub(super) struct Pieces<'a> {
    rest: &'a str,
    marks: Marks,
    categories: &'static Categories,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(text: &'a str, marks: Marks) -> Self {
        Self { rest: text, marks, categories: Categories::shared() }
    }

    fn kind(&self, c: char) -> Kind {
        match self.categories.kind(c) {
            Kind::Mark if self.marks == Marks::AsSymbols => Kind::Symbol,
            kind => kind,
        }
    }

    /// Length in bytes of the characters at the start of `text` that satisfy `wanted`.
    fn run_bytes(&self, text: &str, wanted: impl Fn(Kind) -> bool) -> usize {
        text.char_indices().find(|&(_, c)| !wanted(self.kind(c))).map_or(text.len(), |(at, _)| at)
    }

    fn word_bytes(&self, text: &str) -> usize {
        self.run_bytes(text, |kind| matches!(kind, Kind::Letter | Kind::Mark))
    }

    /// `[^\s\p{L}\p{M}\p{N}]+[\r\n]*`, 0 if there is no symbol.
    fn symbols_bytes(&self, text: &str) -> usize {
        let symbols = self.run_bytes(text, |kind| kind == Kind::Symbol);
        if symbols == 0 {
            return 0;
        }
        symbols + self.run_bytes(&text[symbols..], |kind| kind == Kind::Newline)
    }

    /// `\s*[\r\n]+|\s+(?!\S)|\s+` on text that starts with whitespace.
    fn space_bytes(&self, text: &str) -> usize {
        let run = &text[..self.run_bytes(text, |kind| matches!(kind, Kind::Space | Kind::Newline))];
        if let Some(last_newline) = run.rfind(['\r', '\n']) {
            return last_newline + 1;
        }
        // The last space before a word belongs to that word, unless it is the only one.
        match run.char_indices().next_back() {
            Some((last, _)) if last > 0 && run.len() < text.len() => last,
            _ => run.len(),
        }
    }

    fn next_bytes(&self) -> Option<usize> {
        let text = self.rest;
        let first = text.chars().next()?;
        let after_first = &text[first.len_utf8()..];
        let contraction = contraction_bytes(text);
        if contraction > 0 {
            return Some(contraction);
        }
        let bytes = match self.kind(first) {
            Kind::Letter => self.word_bytes(text),
            Kind::Number => first.len_utf8(),
            Kind::Newline => self.space_bytes(text),
            kind => {
                // Any character but a letter, number or newline may lead a word.
                let word = self.word_bytes(after_first);
                let symbols = if first == ' ' { self.symbols_bytes(after_first) } else { 0 };
                match kind {
                    _ if word > 0 => first.len_utf8() + word,
                    Kind::Mark => first.len_utf8(),
                    Kind::Symbol => self.symbols_bytes(text),
                    _ if symbols > 0 => 1 + symbols,
                    _ => self.space_bytes(text),
                }
            }
        };
        Some(bytes)
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let (piece, rest) = self.rest.split_at(self.next_bytes()?);
        self.rest = rest;
        Some(piece)
    }
}

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)`, 0 if the text starts with none of them.
fn contraction_bytes(text: &str) -> usize {
    let Some(tail) = text.strip_prefix('\'') else { return 0 };
    let mut chars = tail.chars();
    let Some(first) = chars.next() else { return 0 };
    match first.to_ascii_lowercase() {
        // U+017F is an s to a case-insensitive pattern.
        's' | 't' | 'm' | 'd' | 'ſ' => 1 + first.len_utf8(),
        one @ ('r' | 'v' | 'l') => {
            let wanted = if one == 'l' { 'l' } else { 'e' };
            let two = chars.next().is_some_and(|second| second.to_ascii_lowercase() == wanted);
            if two { 3 } else { 0 }
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &str) -> Vec<&str> {
        Pieces::new(text, Marks::InWords).collect()
    }

    #[test]
    fn words_take_one_leading_character() {
        assert_eq!(pieces("Hello, wide  world"), ["Hello", ",", " wide", " ", " world"]);
        assert_eq!(pieces("\tif x"), ["\tif", " x"]);
        assert_eq!(pieces("(a)b"), ["(a", ")b"]);
    }

    #[test]
    fn contractions_ignore_case_and_win_over_words() {
        assert_eq!(pieces("I'LL we've 'ſo 'rx"), ["I", "'LL", " we", "'ve", " '", "ſo", " '", "rx"]);
    }

    #[test]
    fn digits_are_single() {
        assert_eq!(pieces("a12 3"), ["a", "1", "2", " ", "3"]);
    }

    #[test]
    fn newlines_end_their_whitespace() {
        assert_eq!(pieces("a \n \n  b"), ["a", " \n \n", " ", " b"]);
        assert_eq!(pieces("x!\n\ny"), ["x", "!\n\n", "y"]);
        assert_eq!(pieces("a   "), ["a", "   "]);
        assert_eq!(pieces("a   1"), ["a", "  ", " ", "1"]);
    }

    #[test]
    fn marks_follow_the_chosen_pattern() {
        let text = "e\u{301}x \u{301}1";
        assert_eq!(pieces(text), ["e\u{301}x", " \u{301}", "1"]);
        let symbols: Vec<&str> = Pieces::new(text, Marks::AsSymbols).collect();
        assert_eq!(symbols, ["e", "\u{301}x", " \u{301}", "1"]);
    }
}
