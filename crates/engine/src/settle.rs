//! Settling: what was generated enters the prefix cache as prefill computes it, in time that nobody else needs.
//!
//! A decode round leaves other bits behind than a prefill of the same tokens would, so a prompt that repeats an answer
//! must not begin at what the rounds left. When a sequence has ended, its prompt and its answer up to the last chunk
//! boundary are processed once more, from the deepest snapshot on, and a snapshot is kept there. The engine does this a
//! slice at a time while there is nothing else to do. What it takes for that, it gives back as soon as a request needs
//! it; the work is then begun again later.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use qwill_contract::{EngineState, StepKind};
use qwill_device::Phase;
use qwill_device::batch::{CHUNK_TOKENS, PAGE_TOKENS};

use crate::StepModel;
use crate::batch::BatchBuilder;
use crate::caching::{Beginning, PromptPath};
use crate::chunks::ChunkRule;
use crate::engine::Engine;
use crate::live::{Live, chunks_before};
use crate::sequence::Sequence;

/// Texts that wait to be settled; beyond that the oldest is given up.
const MOST_WAITING: usize = 64;

/// Texts to settle.
#[derive(Debug, Default)]
pub(crate) struct Settling {
    waiting: VecDeque<PromptPath>,
    active: Option<Active>,
}

/// The text that is being settled.
#[derive(Debug)]
struct Active {
    path: PromptPath,
    sequence: Sequence,
    stops: VecDeque<usize>,
}

impl Settling {
    /// Notes that the text of an ended sequence is to be settled. Of several choices any may be continued, or none: they
    /// are not.
    pub(crate) fn add(&mut self, live: &Live, sequence: &Sequence, chunk_rule: &ChunkRule) {
        if live.request.choices > 1 || !live.prompt_done() {
            return;
        }
        let mut tokens = [&live.request.prompt[..], &sequence.output].concat();
        let chunk_ends = chunk_rule.lasting_ends(&tokens);
        // The MTP module wants one token more.
        tokens.truncate(chunk_ends.last().copied().unwrap_or_default() + 1);
        let salt = live.path.salt.clone();
        let path = PromptPath { salt, tokens: tokens.into(), chunk_ends: chunk_ends.into(), may_hit: true };
        self.waiting.push_back(path);
        if self.waiting.len() > MOST_WAITING {
            self.waiting.pop_front();
        }
    }

    /// The sequence that is being processed.
    pub(crate) fn sequence(&self) -> Option<&Sequence> {
        self.active.as_ref().map(|active| &active.sequence)
    }
}

impl<M: StepModel> Engine<M> {
    /// Settles a slice. False where there is nothing to do.
    pub(crate) fn settle(&mut self) -> Result<bool, String> {
        if self.load.state() == EngineState::Draining {
            self.stop_settling();
            return Ok(false);
        }
        let worked =
            self.begin_settling().and_then(|begun| if begun { self.settle_slice() } else { Ok(false) });
        worked.or_else(|error| {
            self.stop_settling();
            self.recover("settle", &error).map(|()| true)
        })
    }

    /// Gives back what settling holds, to begin again later. False where it holds nothing.
    pub(crate) fn pause_settling(&mut self) -> bool {
        let path = self.end_settling();
        let held = path.is_some();
        self.settling.waiting.extend(path);
        held
    }

    /// Gives up all texts.
    pub(crate) fn stop_settling(&mut self) {
        self.end_settling();
        self.settling.waiting.clear();
    }

    fn end_settling(&mut self) -> Option<PromptPath> {
        let Active { path, sequence, .. } = self.settling.active.take()?;
        self.pages.release(&sequence.pages);
        self.slots.release(sequence.slot);
        Some(path)
    }

    /// Sees to it that a text is being settled, if there is one that is worth it and has room.
    fn begin_settling(&mut self) -> Result<bool, M::Error> {
        while self.settling.active.is_none() {
            let Some(path) = self.settling.waiting.pop_front() else { return Ok(false) };
            let found = self.look_up(&path);
            let from = found.hit.map_or(0, |hit| hit.position);
            let end = end_of(&path);
            if end < from + CHUNK_TOKENS || self.cache.contains(&path.salt, &path.tokens[..end]) {
                continue;
            }
            let Some(beginning) = self.begin(&path, end.div_ceil(PAGE_TOKENS), 1)? else {
                continue;
            };
            let Beginning { pages, slots, position, .. } = beginning;
            let slot = slots.first().copied().unwrap_or_default();
            let stops = self.snapshot_rule.settled_stops(&path.chunk_ends, position).into();
            let sequence = Sequence { slot, pages, position, ..Sequence::default() };
            self.settling.active = Some(Active { path, sequence, stops });
        }
        Ok(true)
    }

    fn settle_slice(&mut self) -> Result<bool, M::Error> {
        let Some(active) = &self.settling.active else { return Ok(false) };
        let Active { path, sequence, stops } = active;
        let start = sequence.position;
        let stop = stops.front().copied().unwrap_or(end_of(path));
        let limit = stop.min(start + self.options.prefill_slice_tokens);
        let ends =
            &path.chunk_ends[chunks_before(&path.chunk_ends, start)..chunks_before(&path.chunk_ends, limit)];
        let end = ends.last().copied().unwrap_or(start);
        let mut builder = BatchBuilder::new(Phase::Prefill);
        builder.add_span(sequence, &path.tokens[start..end]);
        builder.add_chunks(ends);
        if start == 0 {
            self.model.clear_slot(sequence.slot)?;
        }
        self.load.step_begins(StepKind::Settle, 1);
        let outcome = self.model.forward(builder.batch(), &[]);
        self.load.step_ends();
        outcome?;
        let (sequence, path) = (sequence.clone(), path.clone());
        self.prefill_mtp_of(&sequence, &path.tokens, start..end)?;
        self.load.cache.settled_tokens.fetch_add((end - start) as u64, Ordering::Relaxed);
        self.settled_to(end, stop)?;
        Ok(true)
    }

    fn settled_to(&mut self, end: usize, stop: usize) -> Result<(), M::Error> {
        let Some(active) = &mut self.settling.active else { return Ok(()) };
        active.sequence.prefilled(end);
        let done = end == end_of(&active.path);
        if end == stop {
            active.stops.pop_front();
            let (path, slot, pages) =
                (active.path.clone(), active.sequence.slot, active.sequence.pages.clone());
            self.keep_snapshot(&path, end, slot, &pages)?;
        }
        if done {
            self.end_settling();
        }
        self.publish();
        Ok(())
    }
}

/// Where a text's last chunk ends.
fn end_of(path: &PromptPath) -> usize {
    path.chunk_ends.last().copied().unwrap_or_default()
}
