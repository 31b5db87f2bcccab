//! The trunk's step: embedding, layers, final norm, head.

use qwill_device::{Batch, Device};

use crate::weights::{AttentionWeights, GdnLayerWeights, MixerWeights, MlpWeights};
use crate::workspace::Workspace;
use crate::{Model, ModelError};

impl<D: Device> Model<D> {
    /// Runs one step over the trunk. Afterwards logits row `i` belongs to batch row `logit_rows[i]`.
    pub fn forward(&mut self, batch: &Batch, logit_rows: &[usize]) -> Result<(), ModelError> {
        self.check(batch)?;
        self.check_logit_rows(batch, logit_rows)?;
        if self.device.replay(batch, logit_rows)? {
            return Ok(());
        }
        self.device.begin_step(batch)?;
        self.embed(batch)?;
        for layer in 0..self.weights.layers.len() {
            self.layer(batch, layer)?;
        }
        self.finish(batch, logit_rows)
    }

    /// First part of [`Model::forward`]: checks the batch and looks up the embeddings.
    pub fn begin(&mut self, batch: &Batch) -> Result<(), ModelError> {
        self.check(batch)?;
        self.device.begin_step(batch)?;
        self.embed(batch)
    }

    pub(crate) fn embed(&mut self, batch: &Batch) -> Result<(), ModelError> {
        self.device.embed(&self.weights.embedding, batch, &mut self.work.residual)?;
        Ok(())
    }

    /// One decoder layer of [`Model::forward`].
    pub fn layer(&mut self, batch: &Batch, layer: usize) -> Result<(), ModelError> {
        let Self { device, geometry, weights, cache, work, .. } = self;
        let weights = &weights.layers[layer];
        let mut step = LayerStep { device, geometry, cache, work, batch };
        match &weights.mixer {
            MixerWeights::Gdn(gdn) => step.gdn(weights.cache_layer, gdn)?,
            MixerWeights::Attention(attention) => step.attention(weights.cache_layer, attention)?,
        }
        step.mlp(&weights.mlp)
    }

    /// Last part of [`Model::forward`]: final norm and the logits of some rows.
    pub fn finish(&mut self, batch: &Batch, logit_rows: &[usize]) -> Result<(), ModelError> {
        self.check_logit_rows(batch, logit_rows)?;
        let Self { device, geometry, weights, work, .. } = self;
        device.rms_norm(
            batch.rows(),
            &work.residual,
            &weights.final_norm,
            geometry.norm_eps,
            &mut work.hidden,
        )?;
        if !logit_rows.is_empty() {
            device.head(logit_rows, &work.hidden, weights.head(), &mut work.logits)?;
        }
        Ok(())
    }

    /// The residual stream of the last step, `hidden` values a row.
    pub fn read_residual(&mut self, rows: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.device.read(&self.work.residual, rows)?)
    }

    /// The states after the final norm of the last step, `hidden` values a row.
    pub fn read_hidden(&mut self, rows: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.device.read(&self.work.hidden, rows)?)
    }

    pub(crate) fn check(&self, batch: &Batch) -> Result<(), ModelError> {
        batch.check().map_err(ModelError::Batch)?;
        if batch.rows() == 0 || batch.rows() > self.work.max_rows {
            let message = format!("{} rows, a step takes 1 to {}", batch.rows(), self.work.max_rows);
            return Err(ModelError::Batch(message));
        }
        match batch.tokens.iter().find(|token| **token as usize >= self.geometry.vocab) {
            Some(token) => {
                Err(ModelError::Batch(format!("token {token} of a vocabulary of {}", self.geometry.vocab)))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn check_logit_rows(&self, batch: &Batch, logit_rows: &[usize]) -> Result<(), ModelError> {
        if logit_rows.len() > self.work.max_logit_rows {
            let message =
                format!("logits of {} rows, at most {}", logit_rows.len(), self.work.max_logit_rows);
            return Err(ModelError::Batch(message));
        }
        match logit_rows.iter().find(|row| **row >= batch.rows()) {
            Some(row) => Err(ModelError::Batch(format!("logits of row {row} of {}", batch.rows()))),
            None => Ok(()),
        }
    }
}

/// What the parts of a layer share.
pub(crate) struct LayerStep<'a, D: Device> {
    pub(crate) device: &'a mut D,
    pub(crate) geometry: &'a qwill_device::Geometry,
    pub(crate) cache: &'a mut D::Cache,
    pub(crate) work: &'a mut Workspace<D>,
    pub(crate) batch: &'a Batch,
}

impl<D: Device> LayerStep<'_, D> {
    fn gdn(&mut self, gdn_layer: usize, weights: &GdnLayerWeights<D>) -> Result<(), ModelError> {
        let Self { device, geometry, cache, work, batch } = self;
        let (rows, shape) = (batch.rows(), &geometry.gdn);
        let inputs: [&D::Matrix; 4] = weights.inputs.each_ref();
        device.norm_linears(
            rows,
            &work.residual,
            &weights.input_norm,
            geometry.norm_eps,
            &inputs,
            &mut work.projected,
        )?;
        device.gdn_layer(
            batch,
            gdn_layer,
            shape,
            &weights.small,
            &work.projected,
            cache,
            (&mut work.mixed, &mut work.scanned),
            &mut work.gdn_out,
        )?;
        device.linear_add(rows, &work.gdn_out, &weights.output, &mut work.residual)?;
        Ok(())
    }

    pub(crate) fn attention(
        &mut self,
        kv_layer: usize,
        weights: &AttentionWeights<D>,
    ) -> Result<(), ModelError> {
        let Self { device, geometry, cache, work, batch } = self;
        let (rows, shape) = (batch.rows(), &geometry.attention);
        let inputs: [&D::Matrix; 3] = weights.inputs.each_ref();
        device.norm_linears(
            rows,
            &work.residual,
            &weights.input_norm,
            geometry.norm_eps,
            &inputs,
            &mut work.projected,
        )?;
        let (q_norm, k_norm) = (&weights.q_norm, &weights.k_norm);
        device.attention_prepare(
            batch,
            kv_layer,
            shape,
            &work.projected,
            q_norm,
            k_norm,
            cache,
            &mut work.query,
        )?;
        device.attention(
            batch,
            kv_layer,
            shape,
            &work.query,
            &work.projected,
            cache,
            &mut work.attention_out,
        )?;
        device.linear_add(rows, &work.attention_out, &weights.output, &mut work.residual)?;
        Ok(())
    }

    pub(crate) fn mlp(&mut self, weights: &MlpWeights<D>) -> Result<(), ModelError> {
        let Self { device, geometry, work, batch, .. } = self;
        let rows = batch.rows();
        let inputs: [&D::Matrix; 2] = weights.inputs.each_ref();
        device.norm_swiglu(
            rows,
            &work.residual,
            &weights.norm,
            geometry.norm_eps,
            (inputs, geometry.intermediate),
            &mut work.gate_up,
            &mut work.mlp,
        )?;
        device.linear_add(rows, &work.mlp, &weights.output, &mut work.residual)?;
        Ok(())
    }
}
