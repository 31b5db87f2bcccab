//! Activation buffers: one set, sized once, reused by every layer.

use qwill_device::{Device, Geometry, Precision};

use crate::ModelError;

/// Width of every buffer, by name: the one list from which buffers are made and the plan is counted.
pub(crate) struct Widths {
    pub(crate) residual: usize,
    pub(crate) hidden: usize,
    pub(crate) projected: usize,
    pub(crate) mixed: usize,
    pub(crate) query: usize,
    pub(crate) scanned: usize,
    pub(crate) attention_out: usize,
    pub(crate) gdn_out: usize,
    pub(crate) gate_up: usize,
    pub(crate) mlp: usize,
    pub(crate) mtp_hidden: usize,
    pub(crate) mtp_input: usize,
    pub(crate) mtp_out: usize,
}

impl Widths {
    pub(crate) fn of(geometry: &Geometry) -> Self {
        let (attention, gdn) = (&geometry.attention, &geometry.gdn);
        let with_mtp = |width: usize| if geometry.mtp_layers > 0 { width } else { 0 };
        Self {
            residual: geometry.hidden,
            hidden: geometry.hidden,
            projected: attention.projected().max(gdn.projected()),
            mixed: gdn.mixed(),
            query: attention.query_columns(),
            scanned: gdn.value_columns(),
            attention_out: attention.query_columns(),
            gdn_out: gdn.value_columns(),
            gate_up: 2 * geometry.intermediate,
            mlp: geometry.intermediate,
            mtp_hidden: with_mtp(geometry.hidden),
            mtp_input: with_mtp(2 * geometry.hidden),
            mtp_out: with_mtp(geometry.hidden),
        }
    }

    /// All of them with what they hold.
    pub(crate) fn all(&self) -> [(usize, Precision); 13] {
        let activation = |width| (width, Precision::Activation);
        [
            activation(self.residual),
            activation(self.hidden),
            activation(self.projected),
            (self.mixed, Precision::Full),
            activation(self.query),
            activation(self.scanned),
            activation(self.attention_out),
            activation(self.gdn_out),
            activation(self.gate_up),
            activation(self.mlp),
            activation(self.mtp_hidden),
            activation(self.mtp_input),
            activation(self.mtp_out),
        ]
    }
}

pub(crate) struct Workspace<D: Device> {
    /// Residual stream.
    pub(crate) residual: D::Buffer,
    /// After the final norm: input of the head and of the MTP module.
    pub(crate) hidden: D::Buffer,
    pub(crate) projected: D::Buffer,
    pub(crate) mixed: D::Buffer,
    pub(crate) query: D::Buffer,
    pub(crate) scanned: D::Buffer,
    pub(crate) attention_out: D::Buffer,
    pub(crate) gdn_out: D::Buffer,
    pub(crate) gate_up: D::Buffer,
    pub(crate) mlp: D::Buffer,
    pub(crate) mtp_hidden: D::Buffer,
    pub(crate) mtp_input: D::Buffer,
    pub(crate) mtp_out: D::Buffer,
    pub(crate) logits: D::Buffer,
    pub(crate) max_rows: usize,
    pub(crate) max_logit_rows: usize,
}

impl<D: Device> Workspace<D> {
    pub(crate) fn new(
        device: &mut D,
        geometry: &Geometry,
        max_rows: usize,
        max_logit_rows: usize,
    ) -> Result<Self, ModelError> {
        let widths = Widths::of(geometry);
        let mut buffer = |width: usize| device.buffer(max_rows, width, Precision::Activation);
        Ok(Self {
            residual: buffer(widths.residual)?,
            hidden: buffer(widths.hidden)?,
            projected: buffer(widths.projected)?,
            query: buffer(widths.query)?,
            scanned: buffer(widths.scanned)?,
            attention_out: buffer(widths.attention_out)?,
            gdn_out: buffer(widths.gdn_out)?,
            gate_up: buffer(widths.gate_up)?,
            mlp: buffer(widths.mlp)?,
            mtp_hidden: buffer(widths.mtp_hidden)?,
            mtp_input: buffer(widths.mtp_input)?,
            mtp_out: buffer(widths.mtp_out)?,
            mixed: device.buffer(max_rows, widths.mixed, Precision::Full)?,
            logits: device.buffer(max_logit_rows, geometry.vocab, Precision::Full)?,
            max_rows,
            max_logit_rows,
        })
    }
}
