//! The Qwen3.5 family, written once against [`qwill_device::Device`]: embedding, Gated `DeltaNet` and gated
//! attention layers, MLP, head, and the multi-token-prediction module.
//!
//! A [`Model`] owns its device, its weights, its caches and one set of activation buffers. It knows batches of
//! rows, not requests: pages, slots and positions are the engine's business.

mod cost;
mod error;
mod forward;
mod host;
mod load;
mod mtp;
mod names;
mod plan;
mod record;
mod weights;
mod workspace;

pub use cost::{Arithmetic, OpCost, StoredAs, step_costs};
pub use error::ModelError;
pub use load::{LoadProgress, ModelOptions};
pub use mtp::MtpHidden;
pub use plan::{PlanGroup, plan_weights, workspace_bytes};

use qwill_device::sample::ScoreRow;
use qwill_device::{Device, Geometry, SampleRow, Sampled};

/// A model on its device.
pub struct Model<D: Device> {
    device: D,
    geometry: Geometry,
    weights: weights::Weights<D>,
    cache: D::Cache,
    host: Option<host::Host<D>>,
    work: workspace::Workspace<D>,
}

impl<D: Device> Model<D> {
    /// The model's shapes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The device, for its facts and for tests.
    pub fn device(&mut self) -> &mut D {
        &mut self.device
    }

    /// The device and the caches together, for reading states and pages.
    pub fn device_and_cache(&mut self) -> (&mut D, &mut D::Cache) {
        (&mut self.device, &mut self.cache)
    }

    /// Whether the checkpoint brought an MTP module.
    pub fn has_mtp(&self) -> bool {
        self.weights.mtp.is_some()
    }

    /// Draws tokens from the logits of the last step; see [`Device::sample`].
    pub fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, ModelError> {
        Ok(self.device.sample(&self.work.logits, rows)?)
    }

    /// Log-probabilities of given tokens at the logits of the last step; see [`Device::score`].
    pub fn score(&mut self, rows: &[ScoreRow]) -> Result<Vec<Sampled>, ModelError> {
        Ok(self.device.score(&self.work.logits, rows)?)
    }

    /// Waits until all steps so far are done; see [`Device::wait`].
    pub fn wait(&mut self) -> Result<(), ModelError> {
        Ok(self.device.wait()?)
    }

    /// The first `rows` rows of the logits of the last step, `vocab` values each.
    pub fn read_logits(&mut self, rows: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.device.read(&self.work.logits, rows)?)
    }

    /// Starts a sequence in a slot.
    pub fn clear_slot(&mut self, slot: usize) -> Result<(), ModelError> {
        Ok(self.device.clear_slot(&mut self.cache, slot)?)
    }

    /// Copies a sequence's recurrent state to another slot.
    pub fn copy_slot(&mut self, from: usize, to: usize) -> Result<(), ModelError> {
        Ok(self.device.copy_slot(&mut self.cache, from, to)?)
    }

    /// Copies a KV page, all layers.
    pub fn copy_page(&mut self, from: usize, to: usize) -> Result<(), ModelError> {
        Ok(self.device.copy_page(&mut self.cache, from, to)?)
    }
}
