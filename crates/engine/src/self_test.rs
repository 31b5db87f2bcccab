//! Proof that the model generates: asked for before an engine is ready and after a step has failed.

use qwill_device::{Phase, SampleRow};

use crate::StepModel;
use crate::batch::BatchBuilder;
use crate::engine::Engine;
use crate::sequence::Sequence;

impl<M: StepModel> Engine<M> {
    /// Processes a prompt of one token and generates two, with a free slot and page. Says what is wrong.
    pub(crate) fn self_test(&mut self) -> Result<(), String> {
        let pages = self.pages.take(1).ok_or("no page is free")?;
        let Some(slots) = self.slots.take(1) else {
            self.pages.release(&pages);
            return Err("no slot is free".to_owned());
        };
        let result = self.generate_two(slots[0], &pages);
        self.slots.release(slots[0]);
        self.pages.release(&pages);
        result
    }

    fn generate_two(&mut self, slot: usize, pages: &[u32]) -> Result<(), String> {
        let mut sequence = Sequence {
            slot,
            pages: pages.to_vec(),
            position: 0,
            ring_len: 0,
            pending: vec![self.options.chunk_boundary_token.unwrap_or(0)],
            ..Sequence::default()
        };
        self.model.clear_slot(slot).map_err(|error| error.to_string())?;
        for phase in [Phase::Prefill, Phase::Rows] {
            let token = self.generate_one(phase, &sequence)?;
            let position = sequence.position + 1;
            sequence.prefilled(position);
            sequence.pending = vec![token];
        }
        Ok(())
    }

    fn generate_one(&mut self, phase: Phase, sequence: &Sequence) -> Result<u32, String> {
        let vocab_limit = self.options.vocab_limit;
        let mut builder = BatchBuilder::new(phase);
        let row = builder.add_span(sequence, &sequence.pending);
        if phase == Phase::Prefill {
            builder.add_chunks(&[sequence.position + sequence.pending.len()]);
        }
        let logits_row = builder.want_logits(row);
        self.model.forward(builder.batch(), builder.logit_rows()).map_err(|error| error.to_string())?;
        let draw = SampleRow { top_logprobs: Some(1), ..SampleRow::greedy(logits_row, vocab_limit) };
        let drawn = self.model.sample(&[draw]).map_err(|error| error.to_string())?;
        match drawn.as_slice() {
            [one] if (one.token as usize) < vocab_limit && one.logprob.is_finite() => Ok(one.token),
            other => Err(format!("the {phase:?} phase drew {other:?} from {vocab_limit} tokens")),
        }
    }
}
