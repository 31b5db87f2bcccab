//! Added tokens: fixed texts that are one token each, such as `<|im_end|>` or `<think>`.

/// Which marker spellings in a text become marker tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Markers {
    /// All of them: text written by a template.
    All,
    /// Those flagged special are plain text, the others (`<think>`, `<tool_call>`) are parsed.
    SpecialAsText,
    /// None: text of a user.
    None,
}

/// One added token.
pub(crate) struct Marker {
    pub text: String,
    pub id: u32,
    pub special: bool,
}

/// All added tokens, searchable.
pub(crate) struct MarkerTable {
    /// Longest first, so that the first that fits is the longest.
    markers: Vec<Marker>,
    starts: [bool; 256],
}

impl MarkerTable {
    pub(super) fn new(mut markers: Vec<Marker>) -> Self {
        markers.retain(|marker| !marker.text.is_empty());
        markers.sort_by(|a, b| b.text.len().cmp(&a.text.len()).then_with(|| a.text.cmp(&b.text)));
        let mut starts = [false; 256];
        for marker in &markers {
            starts[usize::from(marker.text.as_bytes()[0])] = true;
        }
        Self { markers, starts }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Marker> {
        self.markers.iter()
    }

    /// The longest marker that starts at byte `at` of `text` and that `accept` takes.
    fn at(&self, text: &str, at: usize, accept: impl Fn(&Marker) -> bool) -> Option<&Marker> {
        let tail = &text.as_bytes()[at..];
        self.markers.iter().find(|marker| tail.starts_with(marker.text.as_bytes()) && accept(marker))
    }

    /// Leftmost marker at or after byte `from` that `accept` takes, with its position.
    pub(crate) fn find(
        &self,
        text: &str,
        from: usize,
        accept: impl Fn(usize, &Marker) -> bool,
    ) -> Option<(usize, &Marker)> {
        let bytes = text.as_bytes();
        (from..bytes.len())
            .filter(|&at| self.starts[usize::from(bytes[at])])
            .find_map(|at| Some((at, self.at(text, at, |marker| accept(at, marker))?)))
    }
}
