//! The step's rows on the device, uploaded in one block.

use std::sync::Arc;

use qwill_device::{Batch, DeviceError};

use super::Scratch;
use crate::driver::Driver;
use crate::launch::StepParams;

/// Enough for 64 sequences of 262,144 tokens, with their rows.
const FIRST_BYTES: u64 = 2 << 20;

/// The block and what is in it.
#[derive(Debug)]
pub(super) struct StepMemory {
    scratch: Scratch,
    params: StepParams,
    rows: usize,
    spans: usize,
    pages: usize,
}

impl StepMemory {
    pub(super) fn new(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        let mut scratch = Scratch::new("the step's rows");
        scratch.at_least(driver, FIRST_BYTES)?;
        let params = StepParams { tokens: 0, row_span: 0, spans: 0, chunks: 0, page_table: 0 };
        Ok(Self { scratch, params, rows: 0, spans: 0, pages: 0 })
    }

    /// Uploads a batch that [`Batch::check`] accepts.
    pub(super) fn upload(&mut self, driver: &Arc<Driver>, batch: &Batch) -> Result<(), DeviceError> {
        let (words, starts) = words(batch);
        let memory = self.scratch.at_least(driver, words.len() as u64 * 4)?;
        memory.write("begin_step", 0, &words)?;
        let [tokens, row_span, spans, chunks, page_table] =
            starts.map(|start| memory.address() + start as u64 * 4);
        self.params = StepParams { tokens, row_span, spans, chunks, page_table };
        (self.rows, self.spans, self.pages) = (batch.rows(), batch.spans.len(), batch.page_table.len());
        Ok(())
    }

    /// The uploaded batch, where it has the shape of the one that an op is given.
    pub(super) fn params(&self, op: &'static str, batch: &Batch) -> Result<StepParams, DeviceError> {
        let given = (batch.rows(), batch.spans.len(), batch.page_table.len());
        let begun = (self.rows, self.spans, self.pages);
        if given == begun {
            return Ok(self.params);
        }
        let reason = format!("rows, spans and pages {given:?}, but the step was begun with {begun:?}");
        Err(DeviceError::shape(op, reason))
    }
}

/// All arrays one after another as 32-bit words, and where each starts: tokens, span of each row, spans, chunks, pages.
fn words(batch: &Batch) -> (Vec<u32>, [usize; 5]) {
    let mut words = batch.tokens.clone();
    let row_span = words.len();
    for (index, span) in batch.spans.iter().enumerate() {
        words.extend((0..span.rows).map(|_| index as u32));
    }
    let spans = words.len();
    let mut first_chunk = 0;
    for (index, span) in batch.spans.iter().enumerate() {
        let chunks = batch.chunks.iter().filter(|chunk| chunk.span == index).count();
        let fields = [
            span.first_row,
            span.rows,
            span.position,
            span.slot,
            span.ring_len,
            span.first_page,
            first_chunk,
            chunks,
        ];
        words.extend(fields.map(|field| field as u32));
        first_chunk += chunks;
    }
    let chunks = words.len();
    words.extend(batch.chunks.iter().flat_map(|chunk| [chunk.first_row as u32, chunk.rows as u32]));
    let pages = words.len();
    words.extend_from_slice(&batch.page_table);
    (words, [0, row_span, spans, chunks, pages])
}

#[cfg(test)]
mod tests {
    use qwill_device::{Chunk, Phase, Span};

    use super::*;

    #[test]
    fn arrays_follow_one_another_and_spans_know_their_chunks() {
        let span = |first_row, rows, first_page| Span {
            first_row,
            rows,
            position: 0,
            slot: 3,
            ring_len: 0,
            first_page,
        };
        let batch = Batch {
            phase: Phase::Prefill,
            tokens: vec![7, 8, 9],
            spans: vec![span(0, 2, 0), span(2, 1, 1)],
            page_table: vec![5, 6],
            chunks: vec![
                Chunk { span: 0, first_row: 0, rows: 1 },
                Chunk { span: 0, first_row: 1, rows: 1 },
                Chunk { span: 1, first_row: 2, rows: 1 },
            ],
        };
        batch.check().unwrap();
        let (words, starts) = words(&batch);
        assert_eq!(starts, [0, 3, 6, 22, 28]);
        assert_eq!(words[..6], [7, 8, 9, 0, 0, 1]);
        assert_eq!(words[6..14], [0, 2, 0, 3, 0, 0, 0, 2]);
        assert_eq!(words[14..22], [2, 1, 0, 3, 0, 1, 2, 1]);
        assert_eq!(words[22..], [0, 1, 1, 1, 2, 1, 5, 6]);
    }
}
