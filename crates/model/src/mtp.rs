//! The multi-token-prediction module: one attention layer that drafts the token after the next.

use qwill_device::{Batch, Device};

use crate::forward::LayerStep;
use crate::{Model, ModelError};

/// Where an MTP step's hidden states come from; one entry per batch row, naming a row of that source.
#[derive(Debug, Clone, Copy)]
pub enum MtpHidden<'a> {
    /// Rows of the trunk's last step (after the final norm): first drafts and prompt rows.
    Trunk(&'a [usize]),
    /// Rows of the last MTP step (after its own norm): the next draft of a chain.
    Draft(&'a [usize]),
}

impl<D: Device> Model<D> {
    /// Runs the MTP module. Batch row `r` at position p carries token p + 1 and the hidden state of position p;
    /// its logits predict token p + 2. The module has its own KV layer in the sequence's pages; the batch's
    /// phase, slots and chunks do not matter to it.
    ///
    /// Afterwards logits row `i` belongs to batch row `logit_rows[i]`. The trunk's residual stream is
    /// overwritten, its final states are kept.
    pub fn mtp(
        &mut self,
        batch: &Batch,
        hidden: MtpHidden<'_>,
        logit_rows: &[usize],
    ) -> Result<(), ModelError> {
        self.check(batch)?;
        self.check_logit_rows(batch, logit_rows)?;
        let kv_layer = self.geometry.attention_layers();
        let Self { device, geometry, weights, cache, work, .. } = self;
        let mtp = weights.mtp.as_ref().ok_or(ModelError::NoMtp)?;
        let (sources, from) = match hidden {
            MtpHidden::Trunk(rows) => (rows, &work.hidden),
            MtpHidden::Draft(rows) => (rows, &work.mtp_out),
        };
        if sources.len() != batch.rows() || sources.iter().any(|row| *row >= work.max_rows) {
            let message = format!("{} hidden rows for {} batch rows", sources.len(), batch.rows());
            return Err(ModelError::Batch(message));
        }
        device.begin_step(batch)?;
        device.gather(sources, from, &mut work.mtp_hidden)?;
        let (embed_norm, hidden_norm) = (&mtp.embed_norm, &mtp.hidden_norm);
        device.mtp_combine(
            batch,
            &weights.embedding,
            &work.mtp_hidden,
            embed_norm,
            hidden_norm,
            geometry.norm_eps,
            &mut work.mtp_input,
        )?;
        device.linear(batch.rows(), &work.mtp_input, &mtp.fc, &mut work.residual)?;
        let mut step = LayerStep { device, geometry, cache, work, batch };
        step.attention(kv_layer, &mtp.attention)?;
        step.mlp(&mtp.mlp)?;
        device.rms_norm(batch.rows(), &work.residual, &mtp.norm, geometry.norm_eps, &mut work.mtp_out)?;
        if !logit_rows.is_empty() {
            device.head(logit_rows, &work.mtp_out, weights.head(), &mut work.logits)?;
        }
        Ok(())
    }

    /// The MTP module's states after its norm, `hidden` values a row.
    pub fn read_mtp_hidden(&mut self, rows: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.device.read(&self.work.mtp_out, rows)?)
    }
}
