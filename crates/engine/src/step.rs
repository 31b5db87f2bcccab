//! The two kinds of step. Each first does everything that can fail on the device, and only then tells clients
//! about it, so that a step happens for all its members or for none. Drafts for the next round come last.

use std::sync::atomic::Ordering;
use std::time::Instant;

use qwill_contract::{Event, FinishReason, GuideError, TokenLogprobs};
use qwill_device::batch::PAGE_TOKENS;
use qwill_device::sample::ScoreRow;
use qwill_device::{Phase, Sampled};

use crate::StepModel;
use crate::batch::BatchBuilder;
use crate::draft_step::{Fresh, micros_since};
use crate::engine::Engine;
use crate::guided::{Guided, make_masks};
use crate::sampling::{Draw, sample_rows, seen_tokens, token_out};
use crate::schedule::{RequestKey, RoundPart, SequenceKey, SlicePart};
use crate::sequence::Sequence;
use crate::speculation::{self, Drafter, SpeculationOptions, SyntheticAcceptance};

/// A part of a slice on its way through a step.
pub(crate) struct PartRows {
    pub(crate) request: RequestKey,
    /// Prompt positions of the part.
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Row of the first position.
    pub(crate) first_row: usize,
    /// Row of logits of the first position, where all of the part's are wanted; else of the last one.
    first_logits_row: usize,
    /// Row of logits of the last position, where the prompt ends with it.
    last_logits_row: Option<usize>,
}

/// Why a sequence cannot go on.
enum Failure {
    Guide(GuideError),
    Unsound,
}

impl<M: StepModel> Engine<M> {
    /// Processes chunks of prompts. Where a prompt ends, its choices get their first token. Returns the rows.
    pub(crate) fn run_slice(&mut self, parts: &[SlicePart]) -> Result<usize, M::Error> {
        let mut builder = BatchBuilder::new(Phase::Prefill);
        let mut members = Vec::with_capacity(parts.len());
        for part in parts {
            members.push(self.add_part(part, &mut builder)?);
        }
        self.model.forward(builder.batch(), builder.logit_rows())?;
        for (part, member) in parts.iter().zip(&members) {
            self.note_prefilled(part, member);
        }
        self.prefill_mtp(&members)?;
        self.keep_snapshots(&members)?;
        let scored = self.score_prompts(&members)?;
        let (first_draws, last_rows) = self.first_draws(&members);
        let drawn = self.draw(&first_draws)?;
        for member in &members {
            self.copy_to_choices(member)?;
        }

        let mut scored = scored.into_iter();
        for member in &members {
            self.report_progress(member, &mut scored);
        }
        let mut fresh = Vec::new();
        for ((Draw { key, .. }, first_row), sampled) in first_draws.into_iter().zip(last_rows).zip(drawn) {
            // Its prompt may have had no sound logits.
            if !self.live.contains_key(&key.request) {
                continue;
            }
            self.schedule.add_running(key);
            let tokens = self.commit(key, vec![sampled]);
            fresh.extend(tokens.map(|tokens| Fresh { key, first_row, tokens }));
        }
        self.draft(fresh)?;
        Ok(builder.batch().rows())
    }

    /// Feeds every member's pending token and the drafts after it, and commits the drafts that are drawn again, with the
    /// token after them. Returns the rows.
    pub(crate) fn run_round(&mut self, parts: &[RoundPart]) -> Result<usize, M::Error> {
        let mut builder = BatchBuilder::new(Phase::Rows);
        let (mut draws, mut members) = (Vec::new(), Vec::new());
        for RoundPart { sequence: key, rows } in parts {
            let Some(sequence) = self.sequence_mut(*key) else { continue };
            sequence.drafts.truncate(rows - 1);
            sequence.cut_drafts();
            let rows = 1 + sequence.drafts.len();
            let first_row = builder.add_span(sequence, &sequence.round_tokens());
            let draw =
                |drafts| Draw { key: *key, drafts, logits_row: builder.want_logits(first_row + drafts) };
            draws.extend((0..rows).map(draw));
            members.push((*key, rows, first_row));
        }
        let started = Instant::now();
        self.model.forward(builder.batch(), builder.logit_rows())?;
        let mut drawn = self.draw(&draws)?.into_iter();
        self.step_times.record(parts.len(), builder.batch().rows(), micros_since(started));
        let mut fresh = Vec::new();
        for (key, rows, first_row) in members {
            let tokens = self.commit(key, drawn.by_ref().take(rows).collect());
            fresh.extend(tokens.map(|tokens| Fresh { key, first_row, tokens }));
        }
        self.draft(fresh)?;
        Ok(builder.batch().rows())
    }

    fn add_part(&mut self, part: &SlicePart, builder: &mut BatchBuilder) -> Result<PartRows, M::Error> {
        let live = &self.live[&part.request];
        let work = live.prompt_work();
        let ends = &work.chunk_ends[part.chunks.clone()];
        let (start, end) = (work.chunk_start(part.chunks.start), ends.last().copied().unwrap_or_default());
        let sequence = live.sequence(0);
        if start == 0 {
            self.model.clear_slot(sequence.slot)?;
        }
        let first_row = builder.add_span(sequence, &live.request.prompt[start..end]);
        builder.add_chunks(ends);
        let last = end == live.request.prompt.len();
        let wanted = match (work.all_logits, last) {
            (true, _) => start..end,
            (false, true) => end - 1..end,
            (false, false) => end..end,
        };
        let logits_rows: Vec<usize> =
            wanted.map(|position| builder.want_logits(first_row + position - start)).collect();
        Ok(PartRows {
            request: part.request,
            start,
            end,
            first_row,
            first_logits_row: logits_rows.first().copied().unwrap_or_default(),
            last_logits_row: logits_rows.last().copied().filter(|_| last),
        })
    }

    fn note_prefilled(&mut self, part: &SlicePart, member: &PartRows) {
        let Some(live) = self.live.get_mut(&part.request) else { return };
        live.next_chunk = part.chunks.end;
        for sequence in live.sequences.iter_mut().flatten() {
            sequence.prefilled(member.end);
        }
        self.load.prompt_tokens.fetch_add((member.end - member.start) as u64, Ordering::Relaxed);
    }

    /// Keeps the states of those members that have come to a position where one is wanted.
    fn keep_snapshots(&mut self, members: &[PartRows]) -> Result<(), M::Error> {
        for member in members {
            let Some(live) = self.live.get_mut(&member.request) else { continue };
            if live.stops.front() != Some(&member.end) {
                continue;
            }
            live.stops.pop_front();
            let (path, sequence) = (live.path.clone(), live.sequence(0));
            let (slot, pages) = (sequence.slot, sequence.pages.clone());
            self.keep_snapshot(&path, member.end, slot, &pages)?;
        }
        Ok(())
    }

    /// Log-probabilities of the prompt tokens that follow the slice's rows, for the members that want them.
    fn score_prompts(&mut self, members: &[PartRows]) -> Result<Vec<Sampled>, M::Error> {
        let mut rows = Vec::new();
        for member in members {
            let request = &self.live[&member.request].request;
            let Some(top_logprobs) = request.prompt_logprobs else { continue };
            let following = request.prompt.iter().enumerate().take(member.end + 1).skip(member.start + 1);
            rows.extend(following.map(|(position, token)| ScoreRow {
                logits_row: member.first_logits_row + position - 1 - member.start,
                token: *token,
                vocab_limit: self.options.vocab_limit,
                top_logprobs,
            }));
        }
        if rows.is_empty() { Ok(Vec::new()) } else { self.model.score(&rows) }
    }

    /// The first token of every choice of every prompt that ends here, from the same logits, each with its own seed; and
    /// the row of each.
    fn first_draws(&self, members: &[PartRows]) -> (Vec<Draw>, Vec<usize>) {
        let mut draws = Vec::new();
        for member in members {
            let PartRows { request, start, end, first_row, .. } = *member;
            let live = &self.live[&request];
            let Some(logits_row) = member.last_logits_row.filter(|_| live.rule.new_tokens > 0) else {
                continue;
            };
            let draw = |choice| Draw { key: SequenceKey { request, choice }, drafts: 0, logits_row };
            draws.extend(live.running().map(|(choice, _)| (draw(choice), first_row + end - start - 1)));
        }
        draws.into_iter().unzip()
    }

    fn draw(&mut self, draws: &[Draw]) -> Result<Vec<Sampled>, M::Error> {
        if draws.is_empty() {
            return Ok(Vec::new());
        }
        make_masks(&mut self.live, draws, self.options.vocab_limit);
        let seen = seen_tokens(&self.live, draws);
        self.model.sample(&sample_rows(&self.live, draws, &seen, self.options.vocab_limit))
    }

    /// Gives the other choices of a finished prompt what the first one has: its state and its last, partly filled
    /// page. The full pages are shared.
    fn copy_to_choices(&mut self, member: &PartRows) -> Result<(), M::Error> {
        let live = &self.live[&member.request];
        if member.last_logits_row.is_none() || live.rule.new_tokens == 0 {
            return Ok(());
        }
        let mut sequences = live.sequences.iter().flatten();
        let Some(first) = sequences.next() else { return Ok(()) };
        for other in sequences {
            self.model.copy_slot(first.slot, other.slot)?;
            if !member.end.is_multiple_of(PAGE_TOKENS) {
                let page = member.end / PAGE_TOKENS;
                self.model.copy_page(first.pages[page] as usize, other.pages[page] as usize)?;
            }
        }
        Ok(())
    }

    fn report_progress(&mut self, member: &PartRows, scored: &mut impl Iterator<Item = Sampled>) {
        let Some(live) = self.live.get_mut(&member.request) else { return };
        if live.request.prompt_logprobs.is_some() {
            let tokens = (live.request.prompt.len() - 1).min(member.end) - member.start;
            let scored: Vec<Sampled> = scored.take(tokens).collect();
            if let Some(at) = scored.iter().position(|token| !token.is_sound()) {
                let reason = self.unsound(member.request, "slice", member.start + at + 1);
                return self.end_request(member.request, &reason);
            }
            let logprobs = |token: Sampled| Some(TokenLogprobs { logprob: token.logprob, top: token.top });
            live.prompt_logprobs.extend(scored.into_iter().map(logprobs));
        }
        live.send(Event::Progress { processed_tokens: member.end });
        if !live.prompt_done() {
            return;
        }
        if live.request.prompt_logprobs.is_some() {
            let logprobs = std::mem::take(&mut live.prompt_logprobs);
            live.send(Event::PromptLogprobs(logprobs));
        }
        let nothing_to_generate = live.rule.new_tokens == 0;
        self.schedule.remove_prompt(member.request);
        if nothing_to_generate {
            self.end_request(member.request, &FinishReason::Length);
        }
    }

    /// Takes what was drawn after a sequence's rows into it, as far as it is right, and reports it. Returns the tokens
    /// where the sequence goes on.
    fn commit(&mut self, key: SequenceKey, mut drawn: Vec<Sampled>) -> Option<Vec<u32>> {
        let Self { live, options, acceptance, load, .. } = self;
        let SpeculationOptions { mode, synthetic, .. } = &options.speculation;
        let live = live.get_mut(&key.request)?;
        let sequence = live.sequences[key.choice].as_mut().expect("only running choices are scheduled");
        if let Some(table) = synthetic {
            pretend(table, sequence, &mut drawn);
        }
        // Behind a guide's failure, and from logits that are no distribution, nothing was drawn as it should be.
        let guide = sequence.guided.as_ref().and_then(Guided::failure);
        let guide = guide.map(|(drafts, error)| (drafts, Failure::Guide(error)));
        let unsound = drawn.iter().position(|sampled| !sampled.is_sound());
        let unsound = unsound.map(|drafts| (drafts, Failure::Unsound));
        let failure = [guide, unsound].into_iter().flatten().min_by_key(|(drafts, _)| *drafts);
        drawn.truncate(failure.as_ref().map_or(drawn.len(), |(drafts, _)| *drafts));
        let drafted = sequence.drafts.len();
        let mut tokens: Vec<u32> = drawn.iter().map(|sampled| sampled.token).collect();
        let right = sequence.drafts.iter().zip(&tokens).take_while(|(draft, token)| draft == token).count();
        let before = sequence.generated();
        let end = sequence.accept(&tokens, &live.rule);
        let failure = failure.filter(|(drafts, _)| *drafts == right && end.is_none());
        let position = sequence.position + sequence.pending.len();
        tokens.truncate(sequence.generated() - before);
        if let (Some(guided), None, None) = (&mut sequence.guided, &end, &failure) {
            guided.advance(right, tokens.len(), &sequence.output);
        }
        match &mut sequence.drafter {
            Some(drafter) => {
                let accepted = right.min(tokens.len());
                speculation::metrics::round(drafter.source(), drafted, accepted, tokens.len());
                if drafted > 0 {
                    load.speculation.record(drafted, accepted);
                }
                acceptance.record(drafter.source(), drafted, accepted);
                drafter.record(drafted, accepted);
                drafter.extend(&tokens);
            }
            None if mode.drafts() => {
                let drafter = sequence.drafter.insert(Drafter::new(*mode, &live.request.prompt));
                drafter.extend(&tokens);
            }
            None => {}
        }
        load.generated_tokens.fetch_add(tokens.len() as u64, Ordering::Relaxed);
        let sampling = &live.request.sampling;
        let out: Vec<_> = drawn.into_iter().take(tokens.len()).map(|one| token_out(one, sampling)).collect();
        if !out.is_empty() {
            live.send(Event::Tokens { choice: key.choice, tokens: out });
        }
        let failed = failure.map(|(_, failure)| match failure {
            Failure::Guide(error) => FinishReason::Guide { message: error.to_string() },
            Failure::Unsound => {
                self.unsound(key.request, if before == 0 { "slice" } else { "round" }, position)
            }
        });
        match end.or(failed) {
            Some(reason) => {
                self.end(key.request, &[key.choice], &reason);
                None
            }
            None => Some(tokens),
        }
    }
}

/// Replaces what was drawn by as many drafts as a table says, and the draw after them.
fn pretend(table: &SyntheticAcceptance, sequence: &Sequence, drawn: &mut Vec<Sampled>) {
    let drafts = &sequence.drafts[..drawn.len() - 1];
    let accepted = table.accepted(sequence.seed, sequence.draw_position(0), drafts.len());
    drawn.truncate(accepted + 1);
    for (sampled, draft) in drawn.iter_mut().zip(&drafts[..accepted]) {
        sampled.token = *draft;
    }
}
