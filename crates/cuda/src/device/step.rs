//! The step's rows on the device, uploaded in one block from page-locked memory.

use std::sync::Arc;

use qwill_device::{Batch, DeviceError};

use super::Scratch;
use crate::driver::{Driver, Memory};
use crate::launch::StepParams;
use crate::pinned::Pinned;

/// Bytes of a block: enough for 64 sequences of 262,144 tokens, with their rows.
pub(super) const BLOCK_BYTES: u64 = 2 << 20;

/// Words of `struct Span` in common.cuh.
const SPAN_WORDS: usize = 8;

/// Where the step's values are, and which step it is.
#[derive(Debug)]
pub(super) struct StepMemory {
    /// Of steps whose ops run one by one; grows where a step needs more.
    block: Scratch,
    block_pinned: Option<Pinned>,
    /// Of recorded steps, which know its address.
    recorded: Option<RecordedBlock>,
    params: StepParams,
    shape: Shape,
    /// The ops are being recorded.
    recording: bool,
}

/// Recorded steps find their values at fixed places of this block.
#[derive(Debug)]
struct RecordedBlock {
    memory: Memory,
    pinned: Pinned,
    rows: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Shape {
    rows: usize,
    spans: usize,
    pages: usize,
}

impl Shape {
    fn of(batch: &Batch) -> Self {
        Self { rows: batch.rows(), spans: batch.spans.len(), pages: batch.page_table.len() }
    }
}

/// Room of each array before the page table, which comes last.
#[derive(Debug, Clone, Copy)]
struct Room {
    logit_rows: usize,
    rows: usize,
    spans: usize,
    chunks: usize,
}

impl StepMemory {
    pub(super) fn new() -> Self {
        Self {
            block: Scratch::new("the step's rows"),
            block_pinned: None,
            recorded: None,
            params: StepParams::default(),
            shape: Shape::default(),
            recording: false,
        }
    }

    /// Makes both blocks, for recorded steps of at most `recorded_rows` rows.
    pub(super) fn reserve(&mut self, driver: &Arc<Driver>, recorded_rows: usize) -> Result<(), DeviceError> {
        self.reserve_block(driver)?;
        self.recorded = Some(RecordedBlock {
            memory: driver.allocate("the rows of recorded steps", BLOCK_BYTES)?,
            pinned: Pinned::new(driver, BLOCK_BYTES as usize / 4)?,
            rows: recorded_rows,
        });
        Ok(())
    }

    fn reserve_block(&mut self, driver: &Arc<Driver>) -> Result<(), DeviceError> {
        self.block.at_least(driver, BLOCK_BYTES)?;
        if self.block_pinned.is_none() {
            self.block_pinned = Some(Pinned::new(driver, BLOCK_BYTES as usize / 4)?);
        }
        Ok(())
    }

    /// Uploads a batch that [`Batch::check`] accepts.
    pub(super) fn upload(&mut self, driver: &Arc<Driver>, batch: &Batch) -> Result<(), DeviceError> {
        self.reserve_block(driver)?;
        let room =
            Room { logit_rows: 0, rows: batch.rows(), spans: batch.spans.len(), chunks: batch.chunks.len() };
        let words = words(batch, &[], room);
        let memory = self.block.at_least(driver, words.len() as u64 * 4)?;
        match &mut self.block_pinned {
            Some(pinned) if words.len() * 4 <= BLOCK_BYTES as usize => {
                pinned.send("begin_step", &words, memory)?;
            }
            _ => memory.write("begin_step", 0, &words)?,
        }
        self.params = params(memory.address(), room);
        self.shape = Shape::of(batch);
        Ok(())
    }

    /// From now on ops are given the places of recorded steps. `false`: steps of this size are not recorded.
    pub(super) fn begin_recording(&mut self, batch: &Batch) -> bool {
        let Some(block) = self.recorded.as_ref().filter(|block| batch.rows() <= block.rows) else {
            return false;
        };
        self.params = params(block.memory.address(), block.room());
        self.shape = Shape::of(batch);
        self.recording = true;
        true
    }

    pub(super) fn end_recording(&mut self) {
        self.recording = false;
    }

    /// Uploads a batch to where recorded steps look for it. `false`: it has no room there.
    pub(super) fn upload_recorded(
        &mut self,
        batch: &Batch,
        logit_rows: &[usize],
    ) -> Result<bool, DeviceError> {
        let Some(block) = &mut self.recorded else { return Ok(false) };
        if batch.rows() > block.rows || logit_rows.len() > block.rows {
            return Ok(false);
        }
        let words = words(batch, logit_rows, block.room());
        if words.len() * 4 > BLOCK_BYTES as usize {
            return Ok(false);
        }
        block.pinned.send("replay", &words, &block.memory)?;
        Ok(true)
    }

    /// Whether ops are being recorded.
    pub(super) fn recording(&self) -> bool {
        self.recording
    }

    /// Spans that the launches of a step must reach: as many as there may be at replay.
    pub(super) fn spans(&self) -> usize {
        if self.recording { self.shape.rows } else { self.shape.spans }
    }

    /// The uploaded batch, where it has the shape of the one that an op is given.
    pub(super) fn params(&self, op: &'static str, batch: &Batch) -> Result<StepParams, DeviceError> {
        let given = Shape::of(batch);
        if given == self.shape {
            return Ok(self.params);
        }
        let reason = format!("{given:?}, but the step was begun with {:?}", self.shape);
        Err(DeviceError::shape(op, reason))
    }

    /// Where a recorded step finds the rows whose logits are wanted.
    pub(super) fn logit_rows(&self) -> u64 {
        self.params.logit_rows
    }
}

impl RecordedBlock {
    fn room(&self) -> Room {
        Room { logit_rows: self.rows, rows: self.rows, spans: self.rows, chunks: 0 }
    }
}

/// Word offsets of: counts, logit rows, tokens, span of each row, spans, chunks, page table.
fn starts(room: Room) -> [usize; 7] {
    let sizes = [4, room.logit_rows, room.rows, room.rows, room.spans * SPAN_WORDS, room.chunks * 2];
    let mut starts = [0; 7];
    for (index, size) in sizes.into_iter().enumerate() {
        starts[index + 1] = starts[index] + size;
    }
    starts
}

fn params(address: u64, room: Room) -> StepParams {
    let [counts, logit_rows, tokens, row_span, spans, chunks, page_table] =
        starts(room).map(|start| address + start as u64 * 4);
    StepParams { counts, logit_rows, tokens, row_span, spans, chunks, page_table }
}

/// All arrays one after another as 32-bit words, each padded with zeros to its room.
fn words(batch: &Batch, logit_rows: &[usize], room: Room) -> Vec<u32> {
    let starts = starts(room);
    let mut words = vec![0; starts[6]];
    let mut put = |start: usize, values: &mut dyn Iterator<Item = u32>| {
        for (at, value) in values.enumerate() {
            words[start + at] = value;
        }
    };
    put(starts[0], &mut [batch.rows() as u32, batch.spans.len() as u32].into_iter());
    put(starts[1], &mut logit_rows.iter().map(|row| *row as u32));
    put(starts[2], &mut batch.tokens.iter().copied());
    let spans = batch.spans.iter().enumerate();
    put(starts[3], &mut spans.flat_map(|(index, span)| (0..span.rows).map(move |_| index as u32)));
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
        put(starts[4] + index * SPAN_WORDS, &mut fields.into_iter().map(|field| field as u32));
        first_chunk += chunks;
    }
    let chunks = batch.chunks.iter().flat_map(|chunk| [chunk.first_row as u32, chunk.rows as u32]);
    put(starts[5], &mut chunks.into_iter());
    words.extend_from_slice(&batch.page_table);
    words
}

#[cfg(test)]
mod tests {
    use qwill_device::{Chunk, Phase, Span};

    use super::*;

    fn batch() -> Batch {
        let span = |first_row, rows, first_page| Span {
            first_row,
            rows,
            position: 0,
            slot: 3,
            ring_len: 0,
            first_page,
        };
        Batch {
            phase: Phase::Prefill,
            tokens: vec![7, 8, 9],
            spans: vec![span(0, 2, 0), span(2, 1, 1)],
            page_table: vec![5, 6],
            chunks: vec![
                Chunk { span: 0, first_row: 0, rows: 1 },
                Chunk { span: 0, first_row: 1, rows: 1 },
                Chunk { span: 1, first_row: 2, rows: 1 },
            ],
        }
    }

    #[test]
    fn arrays_follow_one_another_and_spans_know_their_chunks() {
        let batch = batch();
        batch.check().unwrap();
        let room = Room { logit_rows: 1, rows: 3, spans: 2, chunks: 3 };
        assert_eq!(starts(room), [0, 4, 5, 8, 11, 27, 33]);
        let words = words(&batch, &[2], room);
        assert_eq!(words[..5], [3, 2, 0, 0, 2]);
        assert_eq!(words[5..11], [7, 8, 9, 0, 0, 1]);
        assert_eq!(words[11..19], [0, 2, 0, 3, 0, 0, 0, 2]);
        assert_eq!(words[19..27], [2, 1, 0, 3, 0, 1, 2, 1]);
        assert_eq!(words[27..], [0, 1, 1, 1, 2, 1, 5, 6]);
    }

    #[test]
    fn a_recorded_step_finds_its_values_at_the_same_places_whatever_its_size() {
        let room = Room { logit_rows: 8, rows: 8, spans: 8, chunks: 3 };
        let words = words(&batch(), &[0, 2], room);
        let [_, logit_rows, tokens, row_span, spans, chunks, page_table] = starts(room);
        assert_eq!(words[logit_rows..tokens], [0, 2, 0, 0, 0, 0, 0, 0]);
        assert_eq!(words[tokens..row_span], [7, 8, 9, 0, 0, 0, 0, 0]);
        assert_eq!(words[row_span..spans], [0, 0, 1, 0, 0, 0, 0, 0]);
        assert!(words[spans + 2 * SPAN_WORDS..chunks].iter().all(|word| *word == 0));
        assert_eq!(words[page_table..], [5, 6]);
    }
}
