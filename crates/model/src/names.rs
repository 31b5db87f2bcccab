//! The weight map: canonical names of a checkpoint's modules, and the shape of each.

use qwill_device::{Geometry, LayerKind};
use qwill_weights::MatrixSpec;

/// What a matrix is for, so that the memory plan can be read by people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    Embedding,
    Head,
    Attention,
    Gdn,
    Mlp,
    Mtp,
}

impl Group {
    pub(crate) const ALL: [Self; 6] =
        [Self::Embedding, Self::Gdn, Self::Attention, Self::Mlp, Self::Head, Self::Mtp];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Head => "head",
            Self::Attention => "attention layers",
            Self::Gdn => "GDN layers",
            Self::Mlp => "MLPs",
            Self::Mtp => "MTP module",
        }
    }
}

pub(crate) const ATTENTION_INPUTS: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
pub(crate) const ATTENTION_OUTPUT: &str = "self_attn.o_proj";
/// In the column order of [`qwill_device::GdnShape::projected`].
pub(crate) const GDN_INPUTS: [&str; 4] =
    ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"];
pub(crate) const GDN_OUTPUT: &str = "linear_attn.out_proj";
pub(crate) const MLP_INPUTS: [&str; 2] = ["mlp.gate_proj", "mlp.up_proj"];
pub(crate) const MLP_OUTPUT: &str = "mlp.down_proj";
pub(crate) const EMBEDDING: &str = "embed_tokens";
pub(crate) const HEAD: &str = "lm_head";
pub(crate) const MTP_FC: &str = "mtp.fc";

/// `layers.3.mlp.gate_proj` from 3 and `mlp.gate_proj`.
pub(crate) fn in_layer(layer: usize, module: &str) -> String {
    format!("layers.{layer}.{module}")
}

/// The same inside the MTP module.
pub(crate) fn in_mtp_layer(module: &str) -> String {
    format!("mtp.layers.0.{module}")
}

/// Shape `(outputs, inputs)` of a module, by the last part of its name.
pub(crate) fn matrix_shape(geometry: &Geometry, name: &str) -> (usize, usize) {
    let hidden = geometry.hidden;
    let attention = &geometry.attention;
    let gdn = &geometry.gdn;
    match name.rsplit('.').next().unwrap_or(name) {
        "q_proj" => (2 * attention.query_columns(), hidden),
        "k_proj" | "v_proj" => (attention.kv_columns(), hidden),
        "o_proj" => (hidden, attention.query_columns()),
        "in_proj_qkv" => (gdn.conv_channels(), hidden),
        "in_proj_z" => (gdn.value_columns(), hidden),
        "in_proj_a" | "in_proj_b" => (gdn.value_heads, hidden),
        "out_proj" => (hidden, gdn.value_columns()),
        "gate_proj" | "up_proj" => (geometry.intermediate, hidden),
        "down_proj" => (hidden, geometry.intermediate),
        "fc" => (hidden, 2 * hidden),
        _ => (geometry.vocab, hidden), // embed_tokens, lm_head
    }
}

/// A matrix as a checkpoint is asked for it.
pub(crate) fn matrix_spec(geometry: &Geometry, name: &str) -> MatrixSpec {
    let (rows, cols) = matrix_shape(geometry, name);
    MatrixSpec { name: name.to_owned(), rows, cols }
}

/// Every matrix of a model, with what it is for.
pub(crate) fn matrices(geometry: &Geometry) -> Vec<(String, Group)> {
    let mut found = vec![(EMBEDDING.to_owned(), Group::Embedding)];
    for (layer, kind) in geometry.layers.iter().enumerate() {
        let (inputs, output, group): (&[&str], _, _) = match kind {
            LayerKind::Gdn => (&GDN_INPUTS, GDN_OUTPUT, Group::Gdn),
            LayerKind::Attention => (&ATTENTION_INPUTS, ATTENTION_OUTPUT, Group::Attention),
        };
        found.extend(inputs.iter().chain([&output]).map(|module| (in_layer(layer, module), group)));
        found.extend(
            MLP_INPUTS.iter().chain([&MLP_OUTPUT]).map(|module| (in_layer(layer, module), Group::Mlp)),
        );
    }
    if !geometry.tied_head {
        found.push((HEAD.to_owned(), Group::Head));
    }
    if geometry.mtp_layers > 0 {
        found.push((MTP_FC.to_owned(), Group::Mtp));
        let modules =
            ATTENTION_INPUTS.iter().chain([&ATTENTION_OUTPUT]).chain(&MLP_INPUTS).chain([&MLP_OUTPUT]);
        found.extend(modules.map(|module| (in_mtp_layer(module), Group::Mtp)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_27b_has_the_published_number_of_parameters() {
        let geometry = Geometry::named("27b").unwrap();
        let parameters: usize = matrices(&geometry)
            .iter()
            .map(|(name, _)| {
                let (rows, cols) = matrix_shape(&geometry, name);
                rows * cols
            })
            .sum();
        // 24.327 G body, 2 × 1.271 G embedding and head, 0.425 G MTP, 0.024 G of a and b projections.
        assert!((27.3e9..27.4e9).contains(&(parameters as f64)), "{parameters}");
    }
}
