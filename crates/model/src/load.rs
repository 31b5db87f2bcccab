//! From a checkpoint to weights on the device: first all matrices, streamed block by block in bounded memory, then the
//! vectors and the order in which the forward step uses them.

use std::collections::HashMap;

use qwill_device::{CacheSpec, Device, GdnWeights, Geometry, KvType, LayerKind, StateType};
use qwill_weights::{Block, Checkpoint, MatrixSpec, Quantize, StreamOptions, stream};

use crate::host::Host;
use crate::names::{
    ATTENTION_INPUTS, ATTENTION_OUTPUT, EMBEDDING, GDN_INPUTS, GDN_OUTPUT, HEAD, MLP_INPUTS, MLP_OUTPUT,
    MTP_FC, in_layer, in_mtp_layer, matrices, matrix_spec,
};
use crate::weights::{
    AttentionWeights, GdnLayerWeights, LayerWeights, MixerWeights, MlpWeights, MtpWeights, Weights,
};
use crate::workspace::Workspace;
use crate::{Model, ModelError};

/// How much a model takes and in which form.
#[derive(Debug, Clone)]
pub struct ModelOptions {
    /// What to do with dense linear weights.
    pub quantize: Quantize,
    /// Storage of keys and values.
    pub kv_type: KvType,
    /// Storage of recurrent states.
    pub state_type: StateType,
    /// KV pages.
    pub pages: usize,
    /// State slots.
    pub slots: usize,
    /// Granules of the host store: [`CacheSpec::granule_bytes`] each. 0: none.
    pub host_granules: usize,
    /// Rows of a step at most.
    pub max_rows: usize,
    /// Rows whose logits a step may ask for at most.
    pub max_logit_rows: usize,
}

/// How far loading has come.
#[derive(Debug, Clone, Copy)]
pub struct LoadProgress<'a> {
    /// The matrix that some rows were just placed of.
    pub name: &'a str,
    /// Matrices placed completely so far.
    pub done: usize,
    /// Matrices in all.
    pub total: usize,
    /// Bytes placed so far, in the formats that the weights have on the device, without padding.
    pub bytes: u64,
    /// Those of all matrices.
    pub total_bytes: u64,
}

/// Sizes of the caches for a geometry and options.
pub(crate) fn cache_spec(geometry: &Geometry, options: &ModelOptions) -> CacheSpec {
    CacheSpec {
        kv_layers: geometry.kv_layers(),
        attention: geometry.attention,
        kv_type: options.kv_type,
        pages: options.pages,
        gdn_layers: geometry.gdn_layers(),
        gdn: geometry.gdn,
        state_type: options.state_type,
        slots: options.slots,
    }
}

impl<D: Device> Model<D> {
    /// Loads a checkpoint onto a device and makes caches and buffers. `progress` is called after every block of rows.
    pub fn load(
        mut device: D,
        checkpoint: &Checkpoint,
        options: &ModelOptions,
        progress: &mut dyn FnMut(LoadProgress<'_>),
    ) -> Result<Self, ModelError> {
        let geometry = checkpoint.config().geometry.clone();
        let placed = place_matrices(&mut device, checkpoint, options.quantize, progress)?;
        let mut loader = Loader { device, checkpoint, geometry: &geometry, placed };
        let weights = loader.weights()?;
        let mut device = loader.device;
        device.reserve(&geometry, options.max_rows, options.max_logit_rows)?;
        let spec = cache_spec(&geometry, options);
        let cache = device.cache(&spec)?;
        let host = Host::new(&mut device, &spec, options.host_granules)?;
        let work = Workspace::new(&mut device, &geometry, options.max_rows, options.max_logit_rows)?;
        let mut model = Self { device, geometry, weights, cache, host, work };
        model.record_rounds(options.slots)?;
        Ok(model)
    }
}

/// All matrices on the device, by name.
fn place_matrices<D: Device>(
    device: &mut D,
    checkpoint: &Checkpoint,
    quantize: Quantize,
    progress: &mut dyn FnMut(LoadProgress<'_>),
) -> Result<HashMap<String, D::Matrix>, ModelError> {
    let geometry = &checkpoint.config().geometry;
    let specs: Vec<MatrixSpec> =
        matrices(geometry).iter().map(|(name, _)| matrix_spec(geometry, name)).collect();
    let of_spec = |spec: &MatrixSpec| {
        let format = checkpoint.planned_format(&spec.name, quantize);
        format.map_or(0, |format| format.matrix_bytes(spec.rows, spec.cols))
    };
    let (mut done, mut bytes) = (0, 0);
    let total_bytes = specs.iter().map(of_spec).sum();
    let mut placed: Vec<Option<D::Matrix>> = specs.iter().map(|_| None).collect();
    let mut place = |block: Block<'_>| -> Result<(), ModelError> {
        let (spec, format) = (&specs[block.matrix], block.data.format());
        let slot = &mut placed[block.matrix];
        let matrix = match slot {
            Some(matrix) => matrix,
            None => slot.insert(device.empty_matrix(format, spec.rows, spec.cols)?),
        };
        device.fill_rows(matrix, block.first_row, &block.data)?;
        done += usize::from(block.completes);
        bytes += format.matrix_bytes(block.data.rows, spec.cols);
        progress(LoadProgress { name: &spec.name, done, total: specs.len(), bytes, total_bytes });
        Ok(())
    };
    stream(checkpoint, &specs, quantize, StreamOptions::default(), &mut place)?;
    let names = specs.iter().map(|spec| spec.name.clone());
    Ok(names.zip(placed).filter_map(|(name, matrix)| Some((name, matrix?))).collect())
}

struct Loader<'a, D: Device> {
    device: D,
    checkpoint: &'a Checkpoint,
    geometry: &'a Geometry,
    placed: HashMap<String, D::Matrix>,
}

impl<D: Device> Loader<'_, D> {
    fn weights(&mut self) -> Result<Weights<D>, ModelError> {
        let hidden = self.geometry.hidden;
        Ok(Weights {
            embedding: self.matrix(EMBEDDING)?,
            layers: self.layers()?,
            final_norm: self.norm("norm.weight", hidden)?,
            head: if self.geometry.tied_head { None } else { Some(self.matrix(HEAD)?) },
            mtp: if self.geometry.mtp_layers > 0 { Some(self.mtp()?) } else { None },
        })
    }

    fn layers(&mut self) -> Result<Vec<LayerWeights<D>>, ModelError> {
        let (mut gdn_layers, mut attention_layers) = (0, 0);
        let mut layers = Vec::with_capacity(self.geometry.layers.len());
        for (index, kind) in self.geometry.layers.iter().enumerate() {
            let name = |module: &str| in_layer(index, module);
            let (mixer, counter) = match kind {
                LayerKind::Gdn => (MixerWeights::Gdn(self.gdn(&name)?), &mut gdn_layers),
                LayerKind::Attention => {
                    (MixerWeights::Attention(self.attention(&name)?), &mut attention_layers)
                }
            };
            layers.push(LayerWeights { mixer, mlp: self.mlp(&name)?, cache_layer: *counter });
            *counter += 1;
        }
        Ok(layers)
    }

    fn attention(&mut self, name: &dyn Fn(&str) -> String) -> Result<AttentionWeights<D>, ModelError> {
        let (hidden, head_dim) = (self.geometry.hidden, self.geometry.attention.head_dim);
        Ok(AttentionWeights {
            input_norm: self.norm(&name("input_layernorm.weight"), hidden)?,
            inputs: self.matrices(&ATTENTION_INPUTS, name)?,
            q_norm: self.norm(&name("self_attn.q_norm.weight"), head_dim)?,
            k_norm: self.norm(&name("self_attn.k_norm.weight"), head_dim)?,
            output: self.matrix(&name(ATTENTION_OUTPUT))?,
        })
    }

    fn gdn(&mut self, name: &dyn Fn(&str) -> String) -> Result<GdnLayerWeights<D>, ModelError> {
        let shape = self.geometry.gdn;
        let decay_rate: Vec<f32> = self
            .checkpoint
            .vector(&name("linear_attn.A_log"), shape.value_heads)?
            .iter()
            .map(|log| -log.exp())
            .collect();
        let conv_elements = shape.conv_channels() * shape.conv_width;
        let conv = self.checkpoint.vector(&name("linear_attn.conv1d.weight"), conv_elements)?;
        let small = GdnWeights {
            conv: self.device.conv_taps(&conv, shape.conv_width)?,
            decay_rate: self.device.vector(&decay_rate)?,
            dt_bias: self.vector(&name("linear_attn.dt_bias"), shape.value_heads)?,
            norm: self.vector(&name("linear_attn.norm.weight"), shape.value_dim)?,
        };
        Ok(GdnLayerWeights {
            input_norm: self.norm(&name("input_layernorm.weight"), self.geometry.hidden)?,
            inputs: self.matrices(&GDN_INPUTS, name)?,
            small,
            output: self.matrix(&name(GDN_OUTPUT))?,
        })
    }

    fn mlp(&mut self, name: &dyn Fn(&str) -> String) -> Result<MlpWeights<D>, ModelError> {
        Ok(MlpWeights {
            norm: self.norm(&name("post_attention_layernorm.weight"), self.geometry.hidden)?,
            inputs: self.matrices(&MLP_INPUTS, name)?,
            output: self.matrix(&name(MLP_OUTPUT))?,
        })
    }

    fn mtp(&mut self) -> Result<MtpWeights<D>, ModelError> {
        let hidden = self.geometry.hidden;
        Ok(MtpWeights {
            embed_norm: self.norm("mtp.pre_fc_norm_embedding.weight", hidden)?,
            hidden_norm: self.norm("mtp.pre_fc_norm_hidden.weight", hidden)?,
            fc: self.matrix(MTP_FC)?,
            attention: self.attention(&in_mtp_layer)?,
            mlp: self.mlp(&in_mtp_layer)?,
            norm: self.norm("mtp.norm.weight", hidden)?,
        })
    }

    fn matrices<const N: usize>(
        &mut self,
        modules: &[&str; N],
        name: &dyn Fn(&str) -> String,
    ) -> Result<[D::Matrix; N], ModelError> {
        let mut placed = Vec::with_capacity(N);
        for module in modules {
            placed.push(self.matrix(&name(module))?);
        }
        placed.try_into().map_err(|_| ModelError::Batch("matrix group of another size".into()))
    }

    fn matrix(&mut self, name: &str) -> Result<D::Matrix, ModelError> {
        self.placed.remove(name).ok_or_else(|| ModelError::Batch(format!("no matrix `{name}` was loaded")))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<D::Vector, ModelError> {
        let values = self.checkpoint.vector(name, len)?;
        Ok(self.device.vector(&values)?)
    }

    /// A zero-centred norm weight: the factor is 1 + w, added in f32 because bfloat16 would lose bits.
    fn norm(&mut self, name: &str, len: usize) -> Result<D::Vector, ModelError> {
        let factors: Vec<f32> = self.checkpoint.vector(name, len)?.iter().map(|w| 1.0 + w).collect();
        Ok(self.device.vector(&factors)?)
    }
}
