//! Builds the device's batch from sequences.

use qwill_device::{Batch, Chunk, Phase, Span};

use crate::sequence::Sequence;

/// A batch in the making, and the rows whose logits are wanted.
#[derive(Debug)]
pub(crate) struct BatchBuilder {
    batch: Batch,
    logit_rows: Vec<usize>,
}

impl BatchBuilder {
    pub(crate) fn new(phase: Phase) -> Self {
        let (tokens, spans, page_table, chunks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { batch: Batch { phase, tokens, spans, page_table, chunks }, logit_rows: Vec::new() }
    }

    pub(crate) fn batch(&self) -> &Batch {
        &self.batch
    }

    pub(crate) fn logit_rows(&self) -> &[usize] {
        &self.logit_rows
    }

    /// The next tokens of a sequence, whose caches end at `sequence.position`. Returns the first row.
    pub(crate) fn add_span(&mut self, sequence: &Sequence, tokens: &[u32]) -> usize {
        self.add(sequence, sequence.position, sequence.ring_len, tokens)
    }

    /// Rows of the MTP module, which has no recurrent state: the row of a position has the token after it.
    pub(crate) fn add_mtp_span(&mut self, sequence: &Sequence, position: usize, tokens: &[u32]) -> usize {
        self.add(sequence, position, 0, tokens)
    }

    fn add(&mut self, sequence: &Sequence, position: usize, ring_len: usize, tokens: &[u32]) -> usize {
        let first_row = self.batch.rows();
        let (rows, slot) = (tokens.len(), sequence.slot);
        let first_page = self.batch.page_table.len();
        let span = Span { first_row, rows, position, slot, ring_len, first_page };
        self.batch.page_table.extend_from_slice(&sequence.pages[..span.pages()]);
        self.batch.tokens.extend_from_slice(tokens);
        self.batch.spans.push(span);
        first_row
    }

    /// The chunks of the span added last: `ends` are positions in the sequence, ascending.
    pub(crate) fn add_chunks(&mut self, ends: &[usize]) {
        let index = self.batch.spans.len() - 1;
        let span = &self.batch.spans[index];
        let mut start = span.position;
        for end in ends {
            let first_row = span.first_row + start - span.position;
            self.batch.chunks.push(Chunk { span: index, first_row, rows: end - start });
            start = *end;
        }
    }

    /// Asks for a row's logits; returns the row of logits they will be in.
    pub(crate) fn want_logits(&mut self, row: usize) -> usize {
        self.logit_rows.push(row);
        self.logit_rows.len() - 1
    }
}
