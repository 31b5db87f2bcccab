//! Where an answer has the model's thinking.

use crate::choice::Delta;

/// What stands around thinking in the content, as templates write it.
const BEGIN: &str = "<think>\n";
const END: &str = "\n</think>\n\n";

/// Where a request wants the thinking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ThinkingOutput {
    /// Apart from the content.
    Apart,
    /// In the content, between its tags.
    Inline,
    /// Nowhere.
    Hidden,
}

/// Puts the thinking of one answer there.
pub(crate) struct ShownThinking {
    output: ThinkingOutput,
    /// Whether the content has got to its thinking and not further.
    open: bool,
}

impl ShownThinking {
    pub(crate) fn new(output: ThinkingOutput) -> Self {
        Self { output, open: false }
    }

    pub(crate) fn place(&mut self, delta: &mut Delta) {
        match self.output {
            ThinkingOutput::Apart => {}
            ThinkingOutput::Hidden => delta.reasoning.clear(),
            ThinkingOutput::Inline => {
                let thinking = std::mem::take(&mut delta.reasoning);
                let rest = std::mem::take(&mut delta.content);
                let begins = !thinking.is_empty() && !self.open;
                self.open |= begins;
                let ends = self.open && !(rest.is_empty() && delta.tool_calls.is_empty());
                self.open &= !ends;
                let (begin, end) = (if begins { BEGIN } else { "" }, if ends { END } else { "" });
                delta.content = [begin, &thinking, end, &rest].concat();
            }
        }
    }
}
