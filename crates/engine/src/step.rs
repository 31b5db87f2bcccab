//! The two kinds of step. Each first does everything that can fail on the device, and only then tells clients
//! about it, so that a step happens for all its members or for none.

use std::sync::atomic::Ordering;

use qwill_contract::{Event, FinishReason, TokenLogprobs};
use qwill_device::batch::PAGE_TOKENS;
use qwill_device::sample::ScoreRow;
use qwill_device::{Phase, Sampled};

use crate::StepModel;
use crate::batch::BatchBuilder;
use crate::engine::Engine;
use crate::sampling::{Draw, sample_rows, seen_tokens, token_out};
use crate::schedule::{RequestKey, RoundPart, SequenceKey, SlicePart};

/// A part of a slice on its way through a step.
struct PartRows {
    request: RequestKey,
    /// Prompt positions of the part.
    start: usize,
    end: usize,
    /// Row of logits of the first position, where all of the part's are wanted; else of the last one.
    first_logits_row: usize,
    /// Row of logits of the last position, where the prompt ends with it.
    last_logits_row: Option<usize>,
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
        let scored = self.score_prompts(&members)?;
        let first_draws = self.first_draws(&members);
        let drawn = self.draw(&first_draws)?;
        for member in &members {
            self.copy_to_choices(member)?;
        }

        let mut scored = scored.into_iter();
        for member in &members {
            self.report_progress(member, &mut scored);
        }
        for (draw, sampled) in first_draws.into_iter().zip(drawn) {
            self.schedule.add_running(draw.key);
            self.commit(draw.key, vec![sampled]);
        }
        Ok(builder.batch().rows())
    }

    /// Feeds every member's pending token and the drafts after it, and commits the drafts that are drawn again, with the
    /// token after them. Returns the rows.
    pub(crate) fn run_round(&mut self, parts: &[RoundPart]) -> Result<usize, M::Error> {
        let mut builder = BatchBuilder::new(Phase::Rows);
        let mut draws = Vec::new();
        for RoundPart { sequence: key, rows } in parts {
            let sequence = self.live[&key.request].sequence(key.choice);
            let first_row = builder.add_span(sequence, &sequence.round_tokens(*rows));
            let draw =
                |drafts| Draw { key: *key, drafts, logits_row: builder.want_logits(first_row + drafts) };
            draws.extend((0..*rows).map(draw));
        }
        self.model.forward(builder.batch(), builder.logit_rows())?;
        let mut drawn = self.draw(&draws)?.into_iter();
        for part in parts {
            self.commit(part.sequence, drawn.by_ref().take(part.rows).collect());
        }
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

    /// The first token of every choice of every prompt that ends here, from the same logits, each with its own seed.
    fn first_draws(&self, members: &[PartRows]) -> Vec<Draw> {
        let mut draws = Vec::new();
        for member in members {
            let live = &self.live[&member.request];
            let Some(row) = member.last_logits_row.filter(|_| live.rule.new_tokens > 0) else { continue };
            let key = |choice| SequenceKey { request: member.request, choice };
            draws.extend(live.running().map(|(choice, _)| Draw {
                key: key(choice),
                drafts: 0,
                logits_row: row,
            }));
        }
        draws
    }

    fn draw(&mut self, draws: &[Draw]) -> Result<Vec<Sampled>, M::Error> {
        if draws.is_empty() {
            return Ok(Vec::new());
        }
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
            let scored = scored.take(tokens);
            live.prompt_logprobs
                .extend(scored.map(|token| Some(TokenLogprobs { logprob: token.logprob, top: token.top })));
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

    /// Takes what was drawn after a sequence's rows into it, as far as it is right, and reports it.
    fn commit(&mut self, key: SequenceKey, drawn: Vec<Sampled>) {
        let Some(live) = self.live.get_mut(&key.request) else { return };
        let sequence = live.sequences[key.choice].as_mut().expect("only running choices are scheduled");
        let before = sequence.generated;
        let ids: Vec<u32> = drawn.iter().map(|sampled| sampled.token).collect();
        let end = sequence.accept(&ids, &live.rule);
        let taken = sequence.generated - before;
        self.load.generated_tokens.fetch_add(taken as u64, Ordering::Relaxed);
        let sampling = &live.request.sampling;
        let tokens: Vec<_> =
            drawn.into_iter().take(taken).map(|sampled| token_out(sampled, sampling)).collect();
        if !tokens.is_empty() {
            live.send(Event::Tokens { choice: key.choice, tokens });
        }
        if let Some(reason) = end {
            self.end(key.request, &[key.choice], &reason);
        }
    }
}
