//! What the terminal can do. Everything here is plain text when the output is a file or a pipe.

use console::{Style, Term};

/// Columns to fill: the terminal's, within reason; 100 elsewhere.
pub(crate) fn width() -> usize {
    let term = Term::stdout();
    if term.is_term() { usize::from(term.size().1).clamp(40, 120) } else { 100 }
}

/// Whether people are looking at standard output.
pub(crate) fn is_interactive() -> bool {
    Term::stdout().is_term()
}

/// Headings and names.
pub(crate) fn bold(text: &str) -> String {
    Style::new().bold().apply_to(text).to_string()
}

/// What matters less.
pub(crate) fn dim(text: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    Style::new().dim().apply_to(text).to_string()
}

/// Things to click or copy.
pub(crate) fn link(text: &str) -> String {
    Style::new().cyan().apply_to(text).to_string()
}

/// The word `warning` in a report on standard output.
pub(crate) fn caution(text: &str) -> String {
    Style::new().yellow().apply_to(text).to_string()
}

/// The word `problem` in a report on standard output.
pub(crate) fn bad(text: &str) -> String {
    Style::new().red().bold().apply_to(text).to_string()
}

/// The word `error` and its kin, on standard error.
pub(crate) fn alarm(text: &str) -> String {
    Style::new().for_stderr().red().bold().apply_to(text).to_string()
}

/// Advice, on standard error.
pub(crate) fn advice(text: &str) -> String {
    Style::new().for_stderr().cyan().apply_to(text).to_string()
}

/// Breaks text at spaces so that no line is longer than `columns`; a longer word keeps a line to itself.
pub(crate) fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        let needed = console::measure_text_width(&line) + 1 + console::measure_text_width(word);
        if !line.is_empty() && needed > columns {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    if !line.is_empty() {
        lines.push(line);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapping_keeps_words_whole() {
        assert_eq!(wrap("a bc def", 4), ["a bc", "def"]);
        assert_eq!(wrap("abcdefgh i", 4), ["abcdefgh", "i"]);
        assert_eq!(wrap("  ", 4), Vec::<String>::new());
        assert_eq!(wrap("a\u{301}b cd", 5), ["a\u{301}b cd"]);
    }
}
