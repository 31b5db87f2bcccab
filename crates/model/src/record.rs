//! Rounds recorded once at start, for devices that can replay them.

use qwill_device::batch::MAX_ROUND_ROWS;
use qwill_device::{Batch, Device, Phase, Span};

use crate::{Model, ModelError};

/// Rows that have a recording of their own; above, a step takes the next larger one and the rest of its rows idle.
const EXACT_ROWS: usize = 8;
/// Products take rows by eights, and by thirty-twos from 32 on.
const COARSE_ROWS: usize = 32;

/// Sizes of the recordings for rounds of at most `most_rows` rows, ascending.
fn recorded_rows(most_rows: usize) -> Vec<usize> {
    let steps = [1..=EXACT_ROWS, EXACT_ROWS + 1..=COARSE_ROWS].into_iter().zip([1, 8]);
    let fine = steps.flat_map(|(range, step)| range.clone().filter(move |rows| rows % step == 0));
    let coarse = (1..).map(|index| COARSE_ROWS * (index + 1)).take_while(|rows| *rows < most_rows);
    fine.chain(coarse).filter(|rows| *rows < most_rows).chain([most_rows]).collect()
}

/// A batch of `rows` rows in spans of at most `span_rows`.
fn stand_in(rows: usize, span_rows: usize) -> Batch {
    let span = |first_row| Span {
        first_row,
        rows: span_rows.min(rows - first_row),
        position: 0,
        slot: first_row / span_rows,
        ring_len: 0,
        first_page: first_row / span_rows,
    };
    let spans: Vec<Span> = (0..rows).step_by(span_rows).map(span).collect();
    Batch {
        phase: Phase::Rows,
        tokens: vec![0; rows],
        page_table: vec![0; spans.len()],
        spans,
        chunks: Vec::new(),
    }
}

impl<D: Device> Model<D> {
    /// Records rounds of all sizes, with one row a sequence and with several. Nothing is computed, no cache changes.
    pub(crate) fn record_rounds(&mut self, slots: usize) -> Result<(), ModelError> {
        for rows in recorded_rows(self.work.max_rows.min(self.work.max_logit_rows)) {
            let logit_rows: Vec<usize> = (0..rows).collect();
            // Of one row and of several; a single row is of the first kind.
            for span_rows in [1, MAX_ROUND_ROWS.min(rows)].into_iter().take(rows) {
                if rows.div_ceil(span_rows) > slots {
                    continue;
                }
                let batch = stand_in(rows, span_rows);
                if !self.device.begin_recording(&batch)? {
                    return Ok(());
                }
                self.embed(&batch)?;
                for layer in 0..self.weights.layers.len() {
                    self.layer(&batch, layer)?;
                }
                self.finish(&batch, &logit_rows)?;
                self.device.end_recording()?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_rounds_are_recorded_exactly_and_the_largest_always() {
        assert_eq!(recorded_rows(1), [1]);
        assert_eq!(recorded_rows(8), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(recorded_rows(13), [1, 2, 3, 4, 5, 6, 7, 8, 13]);
        assert_eq!(recorded_rows(80), [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 64, 80]);
    }

    #[test]
    fn stand_ins_are_batches() {
        for rows in [1, 2, 16, 17, 33] {
            for span_rows in [1, MAX_ROUND_ROWS.min(rows)] {
                let batch = stand_in(rows, span_rows);
                batch.check().unwrap();
                assert_eq!(batch.rows(), rows);
            }
        }
    }
}
