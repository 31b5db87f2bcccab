//! Weights on the device, in the shape the forward step wants them.

use qwill_device::{Device, GdnWeights};

/// A matrix group on one normed input, and the way back to the residual stream.
pub(crate) struct AttentionWeights<D: Device> {
    pub(crate) input_norm: D::Vector,
    pub(crate) inputs: [D::Matrix; 3],
    pub(crate) q_norm: D::Vector,
    pub(crate) k_norm: D::Vector,
    pub(crate) output: D::Matrix,
}

pub(crate) struct GdnLayerWeights<D: Device> {
    pub(crate) input_norm: D::Vector,
    pub(crate) inputs: [D::Matrix; 4],
    pub(crate) small: GdnWeights<D>,
    pub(crate) output: D::Matrix,
}

pub(crate) enum MixerWeights<D: Device> {
    Gdn(GdnLayerWeights<D>),
    Attention(AttentionWeights<D>),
}

pub(crate) struct MlpWeights<D: Device> {
    pub(crate) norm: D::Vector,
    pub(crate) inputs: [D::Matrix; 2],
    pub(crate) output: D::Matrix,
}

/// One decoder layer, and its index among the layers of its kind (which cache it uses).
pub(crate) struct LayerWeights<D: Device> {
    pub(crate) mixer: MixerWeights<D>,
    pub(crate) mlp: MlpWeights<D>,
    pub(crate) cache_layer: usize,
}

pub(crate) struct MtpWeights<D: Device> {
    pub(crate) embed_norm: D::Vector,
    pub(crate) hidden_norm: D::Vector,
    pub(crate) fc: D::Matrix,
    pub(crate) attention: AttentionWeights<D>,
    pub(crate) mlp: MlpWeights<D>,
    pub(crate) norm: D::Vector,
}

pub(crate) struct Weights<D: Device> {
    pub(crate) embedding: D::Matrix,
    pub(crate) layers: Vec<LayerWeights<D>>,
    pub(crate) final_norm: D::Vector,
    /// `None` for a tied head: the embedding serves.
    pub(crate) head: Option<D::Matrix>,
    pub(crate) mtp: Option<MtpWeights<D>>,
}

impl<D: Device> Weights<D> {
    pub(crate) fn head(&self) -> &D::Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}
