//! Takes the output of a model apart: thinking, answer, tool calls.

use std::sync::Arc;

use crate::reasoning::{Prose, ReasoningParser};
use crate::tool_calls::{CallPiece, OfferedTool, Segment, ToolCallParser};

/// A part of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Thinking, without its tags.
    Reasoning(String),
    /// The answer, without its tool calls.
    Content(String),
    /// A part of a tool call.
    Call(CallPiece),
}

/// Splits streamed output into thinking, content and tool calls; the result does not depend on how the text was cut.
///
/// Thinking ends with `</think>`, or where a call of an offered tool begins. Without offered tools nothing is a call.
pub struct AnswerParser {
    calls: Option<ToolCallParser>,
    reasoning: ReasoningParser,
}

impl AnswerParser {
    /// `starts_inside`: whether the output begins with thinking, see [`crate::prompt_opens_reasoning`].
    pub fn new(starts_inside: bool, tools: Option<Arc<[OfferedTool]>>) -> Self {
        Self { calls: tools.map(ToolCallParser::new), reasoning: ReasoningParser::new(starts_inside) }
    }

    /// Takes the next chunk; gives the pieces that are certain, none of them empty.
    pub fn push(&mut self, chunk: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        match &mut self.calls {
            Some(calls) => {
                for segment in calls.push(chunk) {
                    self.take(segment, &mut pieces);
                }
            }
            None => pieces.extend(self.reasoning.push(chunk).into_iter().map(Piece::from)),
        }
        pieces
    }

    /// The end of the output: what was held back.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let segments = self.calls.as_mut().map(ToolCallParser::finish).unwrap_or_default();
        for segment in segments {
            self.take(segment, &mut pieces);
        }
        pieces.extend(self.reasoning.finish().into_iter().map(Piece::from));
        pieces
    }

    /// Whether what comes next may be thinking.
    pub fn is_thinking(&self) -> bool {
        self.reasoning.is_inside()
    }

    fn take(&mut self, segment: Segment, pieces: &mut Vec<Piece>) {
        match segment {
            Segment::Text(text) => pieces.extend(self.reasoning.push(&text).into_iter().map(Piece::from)),
            Segment::Call(part) => {
                if matches!(part, CallPiece::Begin { .. }) {
                    pieces.extend(self.reasoning.call_begins().into_iter().map(Piece::from));
                }
                pieces.push(Piece::Call(part));
            }
        }
    }
}

impl From<Prose> for Piece {
    fn from(prose: Prose) -> Self {
        match prose {
            Prose::Reasoning(text) => Self::Reasoning(text),
            Prose::Content(text) => Self::Content(text),
        }
    }
}
