//! Times of steps, measured before an engine is ready: the first requests already get the drafts that pay.

use std::time::{Duration, Instant};

use qwill_device::{Phase, SampleRow};
use qwill_model::MtpHidden;

use crate::StepModel;
use crate::batch::BatchBuilder;
use crate::draft_step::micros_since;
use crate::engine::Engine;
use crate::sequence::Sequence;
use crate::speculation::StepTimes;

/// Nothing more is measured after this time: a start should not show it. Two dozen rounds of the 27B, each twice, take
/// as long on an H200.
const PATIENCE: Duration = Duration::from_millis(500);
/// Each step is run so often and its shortest time taken: the first one is slower.
const RUNS: usize = 2;

impl<M: StepModel> Engine<M> {
    /// Measures rounds of several sizes and steps of the chain of drafts, all at the beginning of a text: with free
    /// slots, and a page whose contents do not matter.
    pub(crate) fn warm_up(&mut self) -> Result<(), String> {
        let speculation = &self.options.speculation;
        if !speculation.mode.drafts() || !speculation.adaptive {
            return Ok(());
        }
        let slots = self.slots.take(self.slots.free()).ok_or("no slot is free")?;
        let pages = self.pages.take(1).ok_or("no page is free")?;
        let cleared = slots.iter().try_for_each(|slot| self.model.clear_slot(*slot));
        let sequence = |slot: &usize| Sequence { slot: *slot, pages: pages.clone(), ..Sequence::default() };
        let sequences: Vec<Sequence> = slots.iter().map(sequence).collect();
        let measured = cleared
            .and_then(|()| self.measure_rounds(&sequences))
            .and_then(|()| self.measure_drafts(&sequences));
        self.pages.release(&pages);
        for slot in slots {
            self.slots.release(slot);
        }
        measured.map_err(|error| error.to_string())
    }

    fn measure_rounds(&mut self, sequences: &[Sequence]) -> Result<(), M::Error> {
        let begin = Instant::now();
        let max_rows = self.options.max_rows.min(self.options.max_logit_rows);
        for (count, rows) in StepTimes::to_measure(sequences.len(), max_rows) {
            if begin.elapsed() > PATIENCE {
                break;
            }
            let mut builder = BatchBuilder::new(Phase::Rows);
            for (index, sequence) in sequences.iter().take(count).enumerate() {
                let each = rows.div_ceil(count);
                builder.add_span(sequence, &vec![0; each.min(rows - index * each)]);
            }
            want_all_logits(&mut builder);
            let us = self.shortest_us(|engine| {
                engine.model.forward(builder.batch(), builder.logit_rows())?;
                engine.draw_from(builder.batch().rows())
            })?;
            self.step_times.measured(count, builder.batch().rows(), us);
        }
        Ok(())
    }

    fn measure_drafts(&mut self, sequences: &[Sequence]) -> Result<(), M::Error> {
        if !self.drafts_by_mtp() {
            return Ok(());
        }
        let begin = Instant::now();
        let max_rows = self.options.max_rows.min(self.options.max_logit_rows).min(sequences.len());
        let mut count = 1;
        while count <= max_rows && begin.elapsed() < PATIENCE {
            let mut builder = BatchBuilder::new(Phase::Rows);
            for sequence in &sequences[..count] {
                builder.add_mtp_span(sequence, 0, &[0]);
            }
            want_all_logits(&mut builder);
            let states: Vec<usize> = (0..count).collect();
            let us = self.shortest_us(|engine| {
                engine.model.mtp(builder.batch(), MtpHidden::Draft(&states), builder.logit_rows())?;
                engine.draw_from(count)
            })?;
            self.step_times.draft_measured(count, us);
            count *= 2;
        }
        Ok(())
    }

    fn shortest_us(
        &mut self,
        mut step: impl FnMut(&mut Self) -> Result<(), M::Error>,
    ) -> Result<f32, M::Error> {
        let mut shortest = f32::MAX;
        for _ in 0..RUNS {
            let started = Instant::now();
            step(self)?;
            shortest = shortest.min(micros_since(started));
        }
        Ok(shortest)
    }

    /// Waits for rows of logits by drawing from them.
    fn draw_from(&mut self, rows: usize) -> Result<(), M::Error> {
        let rows: Vec<SampleRow<'_>> =
            (0..rows).map(|row| SampleRow::greedy(row, self.options.vocab_limit)).collect();
        self.model.sample(&rows).map(|_| ())
    }
}

fn want_all_logits(builder: &mut BatchBuilder) {
    for row in 0..builder.batch().rows() {
        builder.want_logits(row);
    }
}
