//! Every tensor that a geometry needs, under its canonical name.

use qwill_device::{Geometry, LayerKind};

use crate::matrix::MatrixSpec;

/// A small tensor that is used in f32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VectorSpec {
    /// Full name, with `.weight` where the checkpoint has it.
    pub(crate) name: String,
    pub(crate) role: VectorRole,
    /// Elements.
    pub(crate) len: usize,
}

/// What a small tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VectorRole {
    /// Norm weight `w` used as `1 + w`.
    CentredNorm,
    /// Norm weight used as it is (the output norm of a GDN layer).
    PlainNorm,
    /// Logarithm of the decay rate per value head.
    DecayLog,
    /// Bias of the time step per value head.
    TimeStepBias,
    /// Convolution taps, `[channels, 1, width]` or `[channels, width]`.
    Convolution {
        /// Convolved channels.
        channels: usize,
    },
}

impl VectorSpec {
    /// The shapes in which it may be stored.
    pub(crate) fn shapes(&self) -> Vec<Vec<usize>> {
        match self.role {
            VectorRole::Convolution { channels } => {
                let width = self.len / channels;
                vec![vec![channels, 1, width], vec![channels, width]]
            }
            _ => vec![vec![self.len]],
        }
    }
}

/// All tensors of a model.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    pub(crate) matrices: Vec<MatrixSpec>,
    pub(crate) vectors: Vec<VectorSpec>,
}

impl Layout {
    /// The tensors of a geometry: embedding, layers, final norm, MTP module, head (unless tied).
    pub(crate) fn of(geometry: &Geometry) -> Self {
        let hidden = geometry.hidden;
        let mut layout = Self::default();
        layout.matrix("embed_tokens", geometry.vocab, hidden);
        for (n, kind) in geometry.layers.iter().enumerate() {
            layout.layer(&format!("layers.{n}"), *kind, geometry);
        }
        layout.vector("norm.weight", VectorRole::CentredNorm, hidden);
        if geometry.mtp_layers > 0 {
            layout.matrix("mtp.fc", hidden, 2 * hidden);
            for name in
                ["mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"]
            {
                layout.vector(name, VectorRole::CentredNorm, hidden);
            }
        }
        for n in 0..geometry.mtp_layers {
            layout.layer(&format!("mtp.layers.{n}"), LayerKind::Attention, geometry);
        }
        if !geometry.tied_head {
            layout.matrix("lm_head", geometry.vocab, hidden);
        }
        layout
    }

    fn layer(&mut self, prefix: &str, kind: LayerKind, geometry: &Geometry) {
        let (hidden, intermediate) = (geometry.hidden, geometry.intermediate);
        for name in ["input_layernorm", "post_attention_layernorm"] {
            self.vector(&format!("{prefix}.{name}.weight"), VectorRole::CentredNorm, hidden);
        }
        match kind {
            LayerKind::Attention => self.attention(&format!("{prefix}.self_attn"), geometry),
            LayerKind::Gdn => self.gdn(&format!("{prefix}.linear_attn"), geometry),
        }
        self.matrix(&format!("{prefix}.mlp.gate_proj"), intermediate, hidden);
        self.matrix(&format!("{prefix}.mlp.up_proj"), intermediate, hidden);
        self.matrix(&format!("{prefix}.mlp.down_proj"), hidden, intermediate);
    }

    fn attention(&mut self, prefix: &str, geometry: &Geometry) {
        let (hidden, shape) = (geometry.hidden, &geometry.attention);
        // Query and gate of each head lie side by side in q_proj.
        self.matrix(&format!("{prefix}.q_proj"), 2 * shape.query_columns(), hidden);
        self.matrix(&format!("{prefix}.k_proj"), shape.kv_columns(), hidden);
        self.matrix(&format!("{prefix}.v_proj"), shape.kv_columns(), hidden);
        self.matrix(&format!("{prefix}.o_proj"), hidden, shape.query_columns());
        for name in ["q_norm", "k_norm"] {
            self.vector(&format!("{prefix}.{name}.weight"), VectorRole::CentredNorm, shape.head_dim);
        }
    }

    fn gdn(&mut self, prefix: &str, geometry: &Geometry) {
        let (hidden, shape) = (geometry.hidden, &geometry.gdn);
        let (heads, channels) = (shape.value_heads, shape.conv_channels());
        self.matrix(&format!("{prefix}.in_proj_qkv"), channels, hidden);
        self.matrix(&format!("{prefix}.in_proj_z"), shape.value_columns(), hidden);
        self.matrix(&format!("{prefix}.in_proj_b"), heads, hidden);
        self.matrix(&format!("{prefix}.in_proj_a"), heads, hidden);
        self.matrix(&format!("{prefix}.out_proj"), hidden, shape.value_columns());
        let taps = channels * shape.conv_width;
        self.vector(&format!("{prefix}.conv1d.weight"), VectorRole::Convolution { channels }, taps);
        self.vector(&format!("{prefix}.A_log"), VectorRole::DecayLog, heads);
        self.vector(&format!("{prefix}.dt_bias"), VectorRole::TimeStepBias, heads);
        self.vector(&format!("{prefix}.norm.weight"), VectorRole::PlainNorm, shape.value_dim);
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) {
        self.matrices.push(MatrixSpec { name: name.to_owned(), rows, cols });
    }

    fn vector(&mut self, name: &str, role: VectorRole, len: usize) {
        self.vectors.push(VectorSpec { name: name.to_owned(), role, len });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_27b_has_its_published_tensors_and_parameters() {
        let layout = Layout::of(&Geometry::named("27b").unwrap());
        assert_eq!(layout.matrices.len() + layout.vectors.len(), 851 + 15);
        let of =
            |name: &str| layout.matrices.iter().find(|m| m.name == name).map(|m| (m.rows, m.cols)).unwrap();
        assert_eq!(of("layers.3.self_attn.q_proj"), (12288, 5120));
        assert_eq!(of("layers.0.linear_attn.in_proj_qkv"), (10240, 5120));
        assert_eq!(of("layers.0.linear_attn.out_proj"), (5120, 6144));
        assert_eq!(of("mtp.fc"), (5120, 10240));
        assert_eq!(of("lm_head"), (248_320, 5120));
        let parameters: usize = layout.matrices.iter().map(|m| m.rows * m.cols).sum::<usize>()
            + layout.vectors.iter().map(|v| v.len).sum::<usize>();
        assert!((27.31e9..27.33e9).contains(&(parameters as f64)), "{parameters}");
    }

    #[test]
    fn a_tied_head_is_not_a_tensor() {
        let layout = Layout::of(&Geometry::named("0.8b").unwrap());
        assert!(layout.matrices.iter().all(|m| m.name != "lm_head"));
    }
}
