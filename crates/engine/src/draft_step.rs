//! Drafts for the rounds to come, made as soon as a step's tokens are known: the trunk's states of the step's rows, which
//! the MTP module goes on from, last until the next step.

use std::ops::Range;
use std::time::Instant;

use qwill_device::Phase;
use qwill_device::batch::CHUNK_TOKENS;
use qwill_model::MtpHidden;

use crate::StepModel;
use crate::batch::BatchBuilder;
use crate::engine::Engine;
use crate::guided::{Guided, make_masks};
use crate::sampling::{Draw, sample_rows, seen_tokens};
use crate::schedule::SequenceKey;
use crate::sequence::Sequence;
use crate::speculation::{Candidate, DepthPolicy, Offer, Source};
use crate::step::PartRows;

/// What a step has brought a sequence that goes on.
pub(crate) struct Fresh {
    pub(crate) key: SequenceKey,
    /// The step's rows that the caches keep, from this one on: one for each of the tokens.
    pub(crate) first_row: usize,
    /// The tokens after these rows; the last one is pending.
    pub(crate) tokens: Vec<u32>,
}

/// A sequence in a chain of drafts.
struct Link {
    key: SequenceKey,
    /// Drafts that it is to have.
    depth: usize,
    /// Its last row in the module's last step.
    row: usize,
}

/// Rows of the MTP module behind those of a prefill.
struct MtpRows {
    builder: BatchBuilder,
    /// Rows of the trunk whose hidden states they take.
    states: Vec<usize>,
}

impl MtpRows {
    fn new() -> Self {
        Self { builder: BatchBuilder::new(Phase::Prefill), states: Vec::new() }
    }

    /// Those of a sequence's positions that have a next token; the trunk's rows begin at `first_row`.
    fn add(&mut self, sequence: &Sequence, tokens: &[u32], positions: Range<usize>, first_row: usize) {
        let start = positions.start;
        let end = (tokens.len() - 1).min(positions.end);
        if start >= end {
            return;
        }
        self.builder.add_mtp_span(sequence, start, &tokens[start + 1..=end]);
        let chunk_ends: Vec<usize> =
            (start..end).step_by(CHUNK_TOKENS).map(|chunk| (chunk + CHUNK_TOKENS).min(end)).collect();
        self.builder.add_chunks(&chunk_ends);
        self.states.extend((start..end).map(|position| first_row + position - start));
    }
}

impl<M: StepModel> Engine<M> {
    /// Gives the MTP module the rows of a slice whose next tokens are in the prompt: all but a prompt's last one.
    pub(crate) fn prefill_mtp(&mut self, members: &[PartRows]) -> Result<(), M::Error> {
        if !self.drafts_by_mtp() {
            return Ok(());
        }
        let mut rows = MtpRows::new();
        for PartRows { request, start, end, first_row, .. } in members {
            let live = &self.live[request];
            rows.add(live.sequence(0), &live.request.prompt, *start..*end, *first_row);
        }
        self.run_mtp_rows(&rows)
    }

    /// The same for rows of a prefill that are no request's.
    pub(crate) fn prefill_mtp_of(
        &mut self,
        sequence: &Sequence,
        tokens: &[u32],
        positions: Range<usize>,
    ) -> Result<(), M::Error> {
        if !self.drafts_by_mtp() {
            return Ok(());
        }
        let mut rows = MtpRows::new();
        rows.add(sequence, tokens, positions, 0);
        self.run_mtp_rows(&rows)
    }

    fn run_mtp_rows(&mut self, MtpRows { builder, states }: &MtpRows) -> Result<(), M::Error> {
        if states.is_empty() {
            return Ok(());
        }
        self.model.mtp(builder.batch(), MtpHidden::Trunk(states), &[])
    }

    /// Drafts for the sequences that a step has brought tokens, and lets the MTP module follow them.
    pub(crate) fn draft(&mut self, mut fresh: Vec<Fresh>) -> Result<(), M::Error> {
        // Only the choices of a prompt can be more than the rows of a step; the rest of them starts without drafts.
        fresh.truncate(self.options.max_rows.min(self.options.max_logit_rows));
        if fresh.is_empty() || !self.options.speculation.mode.drafts() {
            return Ok(());
        }
        let depths = self.choose_drafts(&fresh);
        if self.drafts_by_mtp() { self.run_chain(&fresh, &depths) } else { Ok(()) }
    }

    /// Whether the MTP module drafts.
    pub(crate) fn drafts_by_mtp(&self) -> bool {
        self.options.speculation.mode.uses_mtp() && self.model.has_mtp()
    }

    /// Decides how many drafts each sequence gets from where, and gives them those that are looked up. Returns how many
    /// the MTP module is to make.
    fn choose_drafts(&mut self, fresh: &[Fresh]) -> Vec<usize> {
        let offers = fresh.iter().map(|fresh| self.offer(fresh.key));
        let (mut candidates, tokens): (Vec<Candidate>, Vec<Vec<u32>>) = offers
            .map(|offer| {
                offer.map_or((Candidate::none(), Vec::new()), |offer| (offer.candidate, offer.tokens))
            })
            .unzip();
        // Sequences that have their drafts already take part in the round too.
        candidates.resize(self.schedule.running().max(fresh.len()), Candidate::none());
        let max_rows = self.options.max_rows.min(self.options.max_logit_rows);
        let policy = DepthPolicy { max_rows, adaptive: self.options.speculation.adaptive };
        let depths = policy.depths(&candidates, &self.step_times);
        let mut chain = Vec::with_capacity(fresh.len());
        for (((fresh, candidate), mut tokens), depth) in fresh.iter().zip(&candidates).zip(tokens).zip(depths)
        {
            let by_mtp = candidate.source == Source::Mtp;
            chain.push(if by_mtp { depth } else { 0 });
            if let Some(sequence) = self.sequence_mut(fresh.key) {
                tokens.truncate(depth);
                sequence.drafts = tokens;
                if let Some(drafter) = &mut sequence.drafter {
                    drafter.draft_from(candidate.source);
                }
            }
        }
        chain
    }

    /// What a sequence may draft for its next round.
    fn offer(&mut self, key: SequenceKey) -> Option<Offer> {
        let has_mtp = self.drafts_by_mtp();
        let Self { live, options, acceptance, .. } = self;
        let live = live.get_mut(&key.request)?;
        let sequence = live.sequences.get_mut(key.choice)?.as_mut()?;
        let rows = sequence.max_round_rows(&live.rule);
        let most = options.speculation.max_draft_len.min(rows.saturating_sub(1));
        let drafter = sequence.drafter.as_ref()?;
        let Some(guided) = &mut sequence.guided else {
            return Some(drafter.offer(most, has_mtp, Vec::new(), acceptance));
        };
        let mut offer = drafter.offer(most, has_mtp, guided.forced(), acceptance);
        offer.cut(guided.count_allowed(&offer.tokens));
        Some(offer)
    }

    /// Runs the MTP module over the rows that the caches keep, with the trunk's states, and from there a chain of drafts:
    /// each step takes the token drafted last and the state that the step before left. A draft is drawn as the trunk's
    /// token will be, with the same noise.
    fn run_chain(&mut self, fresh: &[Fresh], depths: &[usize]) -> Result<(), M::Error> {
        let mut builder = BatchBuilder::new(Phase::Rows);
        let mut states = Vec::new();
        let mut links = Vec::new();
        for (Fresh { key, first_row, tokens }, depth) in fresh.iter().zip(depths) {
            let sequence = self.live[&key.request].sequence(key.choice);
            let row =
                builder.add_mtp_span(sequence, sequence.position - tokens.len(), tokens) + tokens.len() - 1;
            states.extend(*first_row..first_row + tokens.len());
            if *depth > 0 {
                builder.want_logits(row);
                links.push(Link { key: *key, depth: *depth, row });
            }
        }
        self.model.mtp(builder.batch(), MtpHidden::Trunk(&states), builder.logit_rows())?;
        self.draw_drafts(&mut links)?;
        while !links.is_empty() {
            let started = Instant::now();
            let drafting = links.len();
            self.run_link(&mut links)?;
            self.draw_drafts(&mut links)?;
            self.step_times.record_draft(drafting, micros_since(started));
        }
        Ok(())
    }

    /// One step of the chain: a row for each link.
    fn run_link(&mut self, links: &mut [Link]) -> Result<(), M::Error> {
        let mut builder = BatchBuilder::new(Phase::Rows);
        let states: Vec<usize> = links.iter().map(|link| link.row).collect();
        for Link { key, row, .. } in links {
            let sequence = self.live[&key.request].sequence(key.choice);
            let drafted = sequence.drafts.len();
            *row = builder.add_mtp_span(
                sequence,
                sequence.position + drafted - 1,
                &sequence.drafts[drafted - 1..],
            );
            builder.want_logits(*row);
        }
        self.model.mtp(builder.batch(), MtpHidden::Draft(&states), builder.logit_rows())
    }

    /// Draws a draft for each link; those that have all of theirs leave the chain.
    fn draw_drafts(&mut self, links: &mut Vec<Link>) -> Result<(), M::Error> {
        let draw = |(logits_row, link): (usize, &Link)| {
            let sequence = self.live[&link.key.request].sequence(link.key.choice);
            Draw { key: link.key, drafts: sequence.drafts.len(), logits_row }
        };
        let draws: Vec<Draw> = links.iter().enumerate().map(draw).collect();
        if draws.is_empty() {
            return Ok(());
        }
        let vocab_limit = self.options.vocab_limit;
        make_masks(&mut self.live, &draws, vocab_limit);
        let seen = seen_tokens(&self.live, &draws);
        let mut rows = sample_rows(&self.live, &draws, &seen, vocab_limit);
        for row in &mut rows {
            row.top_logprobs = None;
        }
        let mut drawn = self.model.sample(&rows)?.into_iter();
        links.retain(|link| {
            let (Some(sampled), Some(sequence)) = (drawn.next(), self.sequence_mut(link.key)) else {
                return false;
            };
            let drafted = sequence.drafts.len();
            let forbids = |guided: &Guided| !guided.allows(drafted, sampled.token);
            // A token without text: the logits were no distribution.
            if sampled.token as usize >= vocab_limit || sequence.guided.as_ref().is_some_and(forbids) {
                return false;
            }
            sequence.drafts.push(sampled.token);
            sequence.drafts.len() < link.depth
        });
        Ok(())
    }
}

/// Microseconds, for [`crate::speculation::StepTimes`].
pub(crate) fn micros_since(started: Instant) -> f32 {
    started.elapsed().as_secs_f32() * 1e6
}
