//! A request from its admission to the end of its last choice.

use std::collections::VecDeque;

use qwill_contract::{Event, EventSink, PromptToken, Request, Submission};

use crate::caching::PromptPath;
use crate::schedule::PromptWork;
use crate::sequence::{EndRule, Sequence};

/// What the engine keeps of an admitted request.
pub(crate) struct Live {
    pub(crate) request: Request,
    pub(crate) rule: EndRule,
    /// By choice; `None` once it has ended. All are there while the prompt is processed, which the first one does
    /// for all.
    pub(crate) sequences: Vec<Option<Sequence>>,
    pub(crate) path: PromptPath,
    /// Positions at which snapshots of the state are to be taken, ascending; all of them are to come.
    pub(crate) stops: VecDeque<usize>,
    /// First chunk of the prompt that is not in the caches.
    pub(crate) next_chunk: usize,
    /// Log-probabilities of the prompt so far.
    pub(crate) prompt_logprobs: Vec<PromptToken>,
    sink: Box<dyn EventSink>,
    closed: bool,
}

impl Live {
    pub(crate) fn new(
        submission: Submission,
        rule: EndRule,
        path: PromptPath,
        position: usize,
        stops: Vec<usize>,
        sequences: Vec<Sequence>,
    ) -> Self {
        let Submission { request, sink, .. } = submission;
        Self {
            next_chunk: chunks_before(&path.chunk_ends, position),
            path,
            stops: stops.into(),
            // Nothing comes before the first token.
            prompt_logprobs: request.prompt_logprobs.map(|_| None).into_iter().collect(),
            request,
            rule,
            sequences: sequences.into_iter().map(Some).collect(),
            sink,
            closed: false,
        }
    }

    /// Delivers an event, unless the receiver has gone.
    pub(crate) fn send(&mut self, event: Event) {
        self.closed = self.closed || self.sink.send(event).is_err();
    }

    /// The running choices whose rest nobody waits for. While the prompt is processed they end together or not at
    /// all: the first one does it for the others.
    pub(crate) fn gone_choices(&self) -> Vec<usize> {
        let is_gone = |choice: usize| self.closed || self.request.choice_is_cancelled(choice);
        let gone: Vec<usize> =
            self.running().map(|(choice, _)| choice).filter(|choice| is_gone(*choice)).collect();
        if self.prompt_done() || gone.len() == self.sequences.len() { gone } else { Vec::new() }
    }

    pub(crate) fn prompt_work(&self) -> PromptWork<'_> {
        let chunk_ends = &self.path.chunk_ends;
        let stop = self.stops.front().copied().unwrap_or(self.request.prompt.len());
        PromptWork {
            chunk_ends,
            next_chunk: self.next_chunk,
            stop_chunk: chunks_before(chunk_ends, stop),
            all_logits: self.request.prompt_logprobs.is_some(),
        }
    }

    pub(crate) fn prompt_done(&self) -> bool {
        self.next_chunk == self.path.chunk_ends.len()
    }

    /// Tokens of the prompt that are in the caches.
    pub(crate) fn processed_tokens(&self) -> usize {
        self.prompt_work().chunk_start(self.next_chunk)
    }

    /// Where a snapshot of this prompt would serve another one best: the last chunk end of both that is still to come.
    pub(crate) fn shared_end(&self, other: &PromptPath) -> Option<usize> {
        if self.prompt_done() || self.path.salt != other.salt {
            return None;
        }
        let common = self.path.tokens.iter().zip(&*other.tokens).take_while(|(a, b)| a == b).count();
        let ends = other.chunk_ends.iter().rev().copied();
        let mut shared = ends.filter(|end| *end <= common && *end < other.tokens.len());
        let is_own = |end: &usize| self.path.chunk_ends.binary_search(end).is_ok();
        shared.find(is_own).filter(|end| *end > self.processed_tokens())
    }

    /// Takes a snapshot at a chunk end that is still to come.
    pub(crate) fn add_stop(&mut self, position: usize) {
        if let Err(index) = self.stops.binary_search(&position) {
            self.stops.insert(index, position);
        }
    }

    /// A choice that has not ended; the schedule knows no other.
    pub(crate) fn sequence(&self, choice: usize) -> &Sequence {
        self.sequences[choice].as_ref().expect("only running choices are scheduled")
    }

    /// Rows that a choice wants in the next round: its pending token's and its drafts'.
    pub(crate) fn round_rows(&self, choice: usize) -> usize {
        let sequence = self.sequence(choice);
        (1 + sequence.drafts.len()).min(sequence.max_round_rows(&self.rule))
    }

    /// The sequences that have not ended, with their choices.
    pub(crate) fn running(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.sequences.iter().enumerate().filter_map(|(choice, sequence)| Some((choice, sequence.as_ref()?)))
    }
}

/// Chunks that end at a position or before.
pub(crate) fn chunks_before(chunk_ends: &[usize], position: usize) -> usize {
    chunk_ends.partition_point(|end| *end <= position)
}
