use std::error::Error;

use qwill_device::sample::ScoreRow;
use qwill_device::{Batch, Device, SampleRow, Sampled};
use qwill_model::{Model, ModelError, MtpHidden};

/// What the engine needs of a model: steps over rows, draws from their logits, and care for slots and pages.
///
/// [`Model`] is the one that serves; tests put others in its place, which check every batch or fail on purpose.
/// After an error the contents of the pages and slots that took part are unspecified, all others are as before.
pub trait StepModel: 'static {
    /// What can go wrong.
    type Error: Error + Send + Sync + 'static;

    /// Runs the trunk over the batch. Logits of batch row `logit_rows[i]` end up in logits row `i`.
    fn forward(&mut self, batch: &Batch, logit_rows: &[usize]) -> Result<(), Self::Error>;
    /// Whether the model has an MTP module.
    fn has_mtp(&self) -> bool;
    /// Runs the MTP module over the batch, as [`Model::mtp`] says; its logits take the place of the last step's, unless
    /// none are asked for.
    fn mtp(&mut self, batch: &Batch, hidden: MtpHidden<'_>, logit_rows: &[usize]) -> Result<(), Self::Error>;
    /// Draws a token for each entry from the logits of the last step.
    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, Self::Error>;
    /// Waits until all steps so far are done.
    fn wait(&mut self) -> Result<(), Self::Error>;
    /// Log-probabilities of given tokens at the logits of the last step.
    fn score(&mut self, rows: &[ScoreRow]) -> Result<Vec<Sampled>, Self::Error>;
    /// Makes a slot the state before the first token.
    fn clear_slot(&mut self, slot: usize) -> Result<(), Self::Error>;
    /// Copies a recurrent state.
    fn copy_slot(&mut self, from: usize, to: usize) -> Result<(), Self::Error>;
    /// Copies a KV page.
    fn copy_page(&mut self, from: usize, to: usize) -> Result<(), Self::Error>;

    /// Granules of the host store. 0: there is none, and the methods below fail.
    fn host_granules(&self) -> usize;
    /// Granules that a stored state takes; a stored page takes one.
    fn state_granules(&self) -> usize;
    /// Stores a page as it is now; it may be overwritten at once. Like the three below it does not wait for the copy,
    /// and whatever follows finds the copy done.
    fn store_page(&mut self, page: usize, granule: u32) -> Result<(), Self::Error>;
    /// Loads a page.
    fn load_page(&mut self, page: usize, granule: u32) -> Result<(), Self::Error>;
    /// Stores the state that prefill left in a slot, at a chunk that ended before `position`; the slot may be used on at
    /// once.
    fn store_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), Self::Error>;
    /// Makes a slot what it was when a state was stored, at that position; its ring is empty.
    fn load_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), Self::Error>;
    /// Whether all copies to and from the host store are done.
    fn stored(&mut self) -> Result<bool, Self::Error>;
    /// The bytes of a granule; waits for copies to it.
    fn read_granule(&mut self, granule: u32) -> Result<&[u8], Self::Error>;
    /// Sets the bytes of a granule; waits for copies to and from it.
    fn write_granule(&mut self, granule: u32, bytes: &[u8]) -> Result<(), Self::Error>;
}

impl<D: Device> StepModel for Model<D> {
    type Error = ModelError;

    fn forward(&mut self, batch: &Batch, logit_rows: &[usize]) -> Result<(), ModelError> {
        Model::forward(self, batch, logit_rows)
    }
    fn has_mtp(&self) -> bool {
        Model::has_mtp(self)
    }
    fn mtp(&mut self, batch: &Batch, hidden: MtpHidden<'_>, logit_rows: &[usize]) -> Result<(), ModelError> {
        Model::mtp(self, batch, hidden, logit_rows)
    }
    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, ModelError> {
        Model::sample(self, rows)
    }
    fn wait(&mut self) -> Result<(), ModelError> {
        Model::wait(self)
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
    fn host_granules(&self) -> usize {
        Model::host_granules(self)
    }
    fn state_granules(&self) -> usize {
        Model::state_granules(self)
    }
    fn store_page(&mut self, page: usize, granule: u32) -> Result<(), ModelError> {
        Model::store_page(self, page, granule)
    }
    fn load_page(&mut self, page: usize, granule: u32) -> Result<(), ModelError> {
        Model::load_page(self, page, granule)
    }
    fn store_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), ModelError> {
        Model::store_state(self, slot, position, granules)
    }
    fn load_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), ModelError> {
        Model::load_state(self, slot, position, granules)
    }
    fn stored(&mut self) -> Result<bool, ModelError> {
        Model::stored(self)
    }
    fn read_granule(&mut self, granule: u32) -> Result<&[u8], ModelError> {
        Model::read_granule(self, granule)
    }
    fn write_granule(&mut self, granule: u32, bytes: &[u8]) -> Result<(), ModelError> {
        Model::write_granule(self, granule, bytes)
    }
}
