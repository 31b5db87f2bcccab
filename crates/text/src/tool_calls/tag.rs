//! The tags around calls, as models write them: with stray spaces, quotes or attributes where none belong.

/// Longer than this, the `<` starts no tag.
const LONGEST_TAG_BYTES: usize = 512;

/// A tag with the name in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag<'a> {
    CallOpen,
    CallClose,
    FunctionOpen(&'a str),
    FunctionClose,
    ParameterOpen(&'a str),
    ParameterClose,
}

/// What the start of a text is. It depends on the text before the end of what is found and on nothing after that,
/// so more text never changes a `Yes` or a `No`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Match<T> {
    /// With its length in bytes.
    Yes(T, usize),
    /// The text ended too early to tell.
    Maybe,
    No,
}

/// The tag that `text` starts with.
pub(super) fn tag_at(text: &str) -> Match<Tag<'_>> {
    let cut = text.floor_char_boundary(LONGEST_TAG_BYTES);
    let mut cursor = Cursor { text: &text[..cut], at: 0 };
    match cursor.tag() {
        Ok(tag) => Match::Yes(tag, cursor.at),
        Err(Miss::End) if text.len() < LONGEST_TAG_BYTES => Match::Maybe,
        Err(_) => Match::No,
    }
}

/// Why there is no tag.
enum Miss {
    /// The text ended within what could become one.
    End,
    Other,
}

struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn tag(&mut self) -> Result<Tag<'a>, Miss> {
        self.word("<")?;
        self.blanks();
        if self.peek()? == '/' {
            self.word("/")?;
            self.blanks();
            let (word, tag) = match self.peek()? {
                't' => ("tool_call", Tag::CallClose),
                'f' => ("function", Tag::FunctionClose),
                'p' => ("parameter", Tag::ParameterClose),
                _ => return Err(Miss::Other),
            };
            self.word(word)?;
            self.close()?;
            return Ok(tag);
        }
        match self.peek()? {
            't' => {
                self.word("tool_call")?;
                self.close()?;
                Ok(Tag::CallOpen)
            }
            'f' => {
                self.word("function")?;
                self.name().map(Tag::FunctionOpen)
            }
            'p' => {
                self.word("parameter")?;
                self.name().map(Tag::ParameterOpen)
            }
            _ => Err(Miss::Other),
        }
    }

    fn peek(&self) -> Result<char, Miss> {
        self.text[self.at..].chars().next().ok_or(Miss::End)
    }

    fn word(&mut self, word: &str) -> Result<(), Miss> {
        let rest = &self.text[self.at..];
        if rest.starts_with(word) {
            self.at += word.len();
            return Ok(());
        }
        Err(if word.starts_with(rest) { Miss::End } else { Miss::Other })
    }

    fn blanks(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start_matches([' ', '\t']).len();
    }

    fn close(&mut self) -> Result<(), Miss> {
        self.blanks();
        self.word(">")
    }

    /// `=NAME>`, or ` name="NAME">` with whatever else stands there.
    fn name(&mut self) -> Result<&'a str, Miss> {
        self.blanks();
        let attribute = self.peek()? == 'n';
        if attribute {
            self.word("name")?;
            self.blanks();
        }
        self.word("=")?;
        let rest = &self.text[self.at..];
        let end = rest.find(['>', '<', '\n']).ok_or(Miss::End)?;
        if !rest[end..].starts_with('>') {
            return Err(Miss::Other);
        }
        self.at += end + 1;
        let inside = rest[..end].trim_matches([' ', '\t']);
        let quote = inside.chars().next().filter(|c| ['"', '\''].contains(c));
        let name = match quote {
            Some(quote) => {
                let unquoted = &inside[1..];
                let end = unquoted.find(quote);
                // Attributes after the name say nothing that is not known.
                if attribute {
                    &unquoted[..end.unwrap_or(unquoted.len())]
                } else {
                    unquoted.trim_end_matches(quote)
                }
            }
            None => inside,
        };
        let name = name.trim_matches([' ', '\t']);
        if name.is_empty() { Err(Miss::Other) } else { Ok(name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_in_every_spelling() {
        let cases = [
            ("<tool_call>", Tag::CallOpen),
            ("< tool_call >", Tag::CallOpen),
            ("</tool_call>", Tag::CallClose),
            ("< / tool_call\t>", Tag::CallClose),
            ("<function=f>", Tag::FunctionOpen("f")),
            ("<function = f >", Tag::FunctionOpen("f")),
            ("<function=\"f\">", Tag::FunctionOpen("f")),
            ("<function name=\"f\">", Tag::FunctionOpen("f")),
            ("<function name = 'f g' kind=\"x\">", Tag::FunctionOpen("f g")),
            ("</function>", Tag::FunctionClose),
            ("<parameter=é b>", Tag::ParameterOpen("é b")),
            ("<parameter name=\"city\" type=\"string\">", Tag::ParameterOpen("city")),
            ("</ parameter >", Tag::ParameterClose),
        ];
        for (text, tag) in cases {
            assert_eq!(tag_at(text), Match::Yes(tag, text.len()), "{text}");
            assert_eq!(tag_at(&format!("{text}>x")), Match::Yes(tag, text.len()), "{text}");
            for (cut, _) in text.char_indices() {
                assert_eq!(tag_at(&text[..cut]), Match::Maybe, "{}", &text[..cut]);
            }
        }
    }

    #[test]
    fn other_text_is_none() {
        let long = format!("<function={}", "x".repeat(600));
        for text in [
            "< b",
            "<think>",
            "</think>",
            "<functions>",
            "<function>",
            "<function=>",
            "<function=a\n>",
            "</function=f>",
            &long,
        ] {
            assert_eq!(tag_at(text), Match::No, "{text}");
        }
    }
}
