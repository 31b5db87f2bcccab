use std::error::Error;

use qwill_device::sample::ScoreRow;
use qwill_device::{Batch, Device, SampleRow, Sampled};
use qwill_model::{Model, ModelError};

/// What the engine needs of a model: steps over rows, draws from their logits, and care for slots and pages.
///
/// [`Model`] is the one that serves; tests put others in its place, which check every batch or fail on purpose.
/// After an error the contents of the pages and slots that took part are unspecified, all others are as before.
pub trait StepModel: 'static {
    /// What can go wrong.
    type Error: Error + Send + Sync + 'static;

    /// Runs the trunk over the batch. Logits of batch row `logit_rows[i]` end up in logits row `i`.
    fn forward(&mut self, batch: &Batch, logit_rows: &[usize]) -> Result<(), Self::Error>;
    /// Draws a token for each entry from the logits of the last step.
    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, Self::Error>;
    /// Log-probabilities of given tokens at the logits of the last step.
    fn score(&mut self, rows: &[ScoreRow]) -> Result<Vec<Sampled>, Self::Error>;
    /// Makes a slot the state before the first token.
    fn clear_slot(&mut self, slot: usize) -> Result<(), Self::Error>;
    /// Copies a recurrent state.
    fn copy_slot(&mut self, from: usize, to: usize) -> Result<(), Self::Error>;
    /// Copies a KV page.
    fn copy_page(&mut self, from: usize, to: usize) -> Result<(), Self::Error>;
}

impl<D: Device> StepModel for Model<D> {
    type Error = ModelError;

    fn forward(&mut self, batch: &Batch, logit_rows: &[usize]) -> Result<(), ModelError> {
        Model::forward(self, batch, logit_rows)
    }
    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, ModelError> {
        Model::sample(self, rows)
    }
    fn score(&mut self, rows: &[ScoreRow]) -> Result<Vec<Sampled>, ModelError> {
        Model::score(self, rows)
    }
    fn clear_slot(&mut self, slot: usize) -> Result<(), ModelError> {
        Model::clear_slot(self, slot)
    }
    fn copy_slot(&mut self, from: usize, to: usize) -> Result<(), ModelError> {
        Model::copy_slot(self, from, to)
    }
    fn copy_page(&mut self, from: usize, to: usize) -> Result<(), ModelError> {
        Model::copy_page(self, from, to)
    }
}
