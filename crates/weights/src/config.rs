//! `config.json` and `generation_config.json` to a [`Geometry`] and the defaults of generation.

use qwill_device::{AttentionShape, GdnShape, Geometry, LayerKind};
use serde_json::Value;

use crate::error::WeightsError;
use crate::json::{Fields, parse_object};
use crate::quantization::Quantization;

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
/// More layers than any model; a bound so that a typing error is not taken for a model.
const MAX_LAYERS: usize = 4096;

/// What the configuration files of a checkpoint say.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Every shape of the model.
    pub geometry: Geometry,
    /// Tokens that end generation: of `generation_config.json`, else of `config.json`; may be empty.
    pub eos_token_ids: Vec<u32>,
    /// Sampling defaults that the checkpoint's makers chose.
    pub generation: GenerationDefaults,
    /// How quantised tensors are to be read; `None` when the checkpoint names no method.
    pub(crate) quantization: Option<Quantization>,
    /// `tie_word_embeddings` as stated; without it, whether a head is stored decides.
    tied: Option<bool>,
    /// `mtp_num_hidden_layers` as stated; without it, whether MTP tensors are stored decides.
    mtp_layers: Option<usize>,
}

/// Sampling defaults of `generation_config.json`; `None` where it says nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Nucleus probability.
    pub top_p: Option<f32>,
    /// Number of most likely tokens kept.
    pub top_k: Option<u32>,
    /// Factor on the logits of tokens already seen.
    pub repetition_penalty: Option<f32>,
    /// Whether to sample at all (else greedy).
    pub do_sample: Option<bool>,
}

impl ModelConfig {
    /// Parses the bytes of `config.json` and, where there is one, `generation_config.json`.
    ///
    /// Accepts the multimodal nesting (`text_config`) and the flat text-only form. Fields that every released
    /// model of the family has at one value (`head_dim` 256, `rope_theta` 1e7, ...) default to it; sizes that
    /// differ between models are required. A field set to something that this engine does not run is an error.
    pub fn parse(config: &[u8], generation: Option<&[u8]>) -> Result<Self, WeightsError> {
        let top = parse_object(CONFIG, config)?;
        let top = Fields::new(CONFIG, &top);
        let fields = top.with_nested("text_config")?;
        check_architecture(&top)?;
        check_architecture(&fields)?;
        check_unsupported(&fields)?;
        let quantization = Quantization::parse(&fields)?;
        let tied = match top.flag("tie_word_embeddings")? {
            None => fields.flag("tie_word_embeddings")?,
            stated => stated,
        };
        let mtp_layers = fields.optional("mtp_num_hidden_layers", "0 or 1", |value| {
            value.as_u64().filter(|&layers| layers <= 1).map(|layers| layers as usize)
        })?;
        let geometry = geometry(&fields, tied.unwrap_or(false), mtp_layers.unwrap_or(0))?;

        let generation = generation.map(|bytes| parse_object(GENERATION, bytes)).transpose()?;
        let generation = generation.as_ref().map(|object| Fields::new(GENERATION, object));
        let own_eos = generation.as_ref().map_or(Ok(None), |fields| eos(fields, geometry.vocab))?;
        let eos_token_ids = match own_eos {
            Some(ids) => ids,
            None => eos(&fields, geometry.vocab)?.unwrap_or_default(),
        };
        let generation = generation.as_ref().map_or(Ok(GenerationDefaults::default()), defaults)?;
        Ok(Self { geometry, eos_token_ids, generation, quantization, tied, mtp_layers })
    }

    /// The configuration of random weights: a geometry and nothing else.
    pub(crate) fn of_geometry(geometry: &Geometry) -> Self {
        Self {
            geometry: geometry.clone(),
            eos_token_ids: Vec::new(),
            generation: GenerationDefaults::default(),
            quantization: None,
            tied: Some(geometry.tied_head),
            mtp_layers: Some(geometry.mtp_layers),
        }
    }

    /// Settles what the stored tensors decide: an unstated tie of the head, and whether the MTP module is
    /// there. Exports without any MTP tensor simply lack the module, whatever the configuration says; a part
    /// of it missing is an error that the tensor check finds. Names the geometry.
    pub(crate) fn settle(&mut self, name: &str, has_head: bool, has_mtp: bool) {
        self.geometry.tied_head = self.tied.unwrap_or(!has_head);
        self.geometry.mtp_layers = if has_mtp { self.mtp_layers.unwrap_or(1) } else { 0 };
        name.clone_into(&mut self.geometry.name);
        for known in Geometry::NAMES {
            let named = Geometry::named(known);
            if named.is_some_and(|named| Geometry { name: name.to_owned(), ..named } == self.geometry) {
                known.clone_into(&mut self.geometry.name);
            }
        }
    }
}

/// Only the dense text models of the family.
fn check_architecture(fields: &Fields) -> Result<(), WeightsError> {
    const SUPPORTED: [&str; 2] = ["qwen3_5", "qwen3_5_text"];
    let Some((path, value)) = fields.get("model_type") else {
        return Err(fields.absent("model_type", SUPPORTED.join(", ")));
    };
    let experts = ["num_experts", "num_local_experts"].iter().find_map(|key| fields.get(key));
    let moe_type = value.as_str().is_some_and(|kind| kind.contains("moe"));
    if let Some((path, value)) = experts.filter(|(_, count)| count.as_u64() != Some(0)) {
        return Err(fields.fault(&path, value, "dense models; mixture-of-experts models are not"));
    }
    if moe_type {
        return Err(fields.fault(&path, value, "qwen3_5; mixture-of-experts models are not"));
    }
    if value.as_str().is_none_or(|kind| !SUPPORTED.contains(&kind)) {
        return Err(fields.fault(&path, value, SUPPORTED.join(", ")));
    }
    Ok(())
}

/// Switches of the architecture that no released model throws and that would change the arithmetic.
fn check_unsupported(fields: &Fields) -> Result<(), WeightsError> {
    for key in
        ["attention_bias", "mlp_bias", "layer_scale", "use_sliding_window", "mtp_use_dedicated_embeddings"]
    {
        if let Some((path, value)) = fields.get(key).filter(|(_, value)| value.as_bool() != Some(false)) {
            return Err(fields.fault(&path, value, "false"));
        }
    }
    if let Some((path, value)) = fields.get("attn_output_gate").filter(|(_, v)| v.as_bool() != Some(true)) {
        return Err(fields.fault(&path, value, "true"));
    }
    fields.choice("hidden_act", &["silu", "swish"])?;
    fields.choice("output_gate_type", &["silu", "swish"])?;
    Ok(())
}

fn geometry(fields: &Fields, tied_head: bool, mtp_layers: usize) -> Result<Geometry, WeightsError> {
    let norm_eps = fields.positive("rms_norm_eps", 1e-6)? as f32;
    let gdn = GdnShape {
        key_heads: fields.size("linear_num_key_heads", None)?,
        value_heads: fields.size("linear_num_value_heads", None)?,
        key_dim: fields.size("linear_key_head_dim", Some(128))?,
        value_dim: fields.size("linear_value_head_dim", Some(128))?,
        conv_width: fields.size("linear_conv_kernel_dim", Some(4))?,
        norm_eps,
    };
    check_divides(fields, "linear_num_value_heads", gdn.value_heads, "linear_num_key_heads", gdn.key_heads)?;
    let geometry = Geometry {
        name: String::new(),
        hidden: fields.size("hidden_size", None)?,
        intermediate: fields.size("intermediate_size", None)?,
        vocab: fields.size("vocab_size", None)?,
        layers: layers(fields)?,
        attention: attention(fields, norm_eps)?,
        gdn,
        norm_eps,
        tied_head,
        mtp_layers,
        max_context: fields.size("max_position_embeddings", Some(262_144))?,
    };
    check_widths(fields, &geometry)?;
    Ok(geometry)
}

/// Products of heads and widths stay in the range of sizes, so that no later arithmetic on shapes overflows.
fn check_widths(fields: &Fields, geometry: &Geometry) -> Result<(), WeightsError> {
    use crate::json::MAX_SIZE;
    let (attention, gdn) = (&geometry.attention, &geometry.gdn);
    let widths = [
        ("num_attention_heads", attention.query_heads * attention.head_dim),
        ("num_key_value_heads", attention.kv_heads * attention.head_dim),
        ("linear_num_key_heads", gdn.key_heads * gdn.key_dim),
        ("linear_num_value_heads", gdn.value_heads * gdn.value_dim),
    ];
    for (key, width) in widths {
        if let Some((path, value)) = fields.get(key).filter(|_| width > MAX_SIZE) {
            return Err(fields.fault(&path, value, "heads of at most 16777216 columns together"));
        }
    }
    Ok(())
}

fn attention(fields: &Fields, norm_eps: f32) -> Result<AttentionShape, WeightsError> {
    let query_heads = fields.size("num_attention_heads", None)?;
    let kv_heads = fields.size("num_key_value_heads", None)?;
    let head_dim = fields.size("head_dim", Some(256))?;
    check_divides(fields, "num_attention_heads", query_heads, "num_key_value_heads", kv_heads)?;
    // Newer files have `rope_parameters`, possibly per layer kind; older ones have `rope_scaling` for the
    // variants and plain fields for the rest.
    for key in ["rope_scaling", "rope_parameters"] {
        let rope = fields.with_nested(key)?.with_nested("full_attention")?;
        rope.choice("rope_type", &["default"])?;
        rope.choice("type", &["default"])?;
    }
    let rope = fields.with_nested("rope_parameters")?.with_nested("full_attention")?;
    let partial = rope.positive("partial_rotary_factor", 0.25)?;
    let rope_dims = (head_dim as f64 * partial) as usize;
    if partial > 1.0 || rope_dims == 0 || !rope_dims.is_multiple_of(2) {
        let supported = format!("at most 1, with an even number of the {head_dim} head dimensions rotated");
        let path = rope.get("partial_rotary_factor").map_or("head_dim".to_owned(), |(path, _)| path);
        return Err(rope.fault(&path, &Value::from(partial), supported));
    }
    let rope_theta = rope.positive("rope_theta", 1e7)?;
    Ok(AttentionShape { query_heads, kv_heads, head_dim, rope_dims, rope_theta, norm_eps })
}

fn check_divides(
    fields: &Fields,
    many_key: &str,
    many: usize,
    few_key: &str,
    few: usize,
) -> Result<(), WeightsError> {
    if many.is_multiple_of(few) {
        return Ok(());
    }
    Err(match fields.get(many_key) {
        Some((path, value)) => fields.fault(&path, value, format!("a multiple of {few_key}, which is {few}")),
        None => fields.absent(many_key, format!("a multiple of {few_key}, which is {few}")),
    })
}

/// `layer_types` where given, else every `full_attention_interval`-th layer is attention.
fn layers(fields: &Fields) -> Result<Vec<LayerKind>, WeightsError> {
    const SUPPORTED: &str = "a list of linear_attention and full_attention";
    let count = fields.optional("num_hidden_layers", "an integer from 1 to 4096", |value| {
        value.as_u64().map(|n| n as usize).filter(|n| (1..=MAX_LAYERS).contains(n))
    })?;
    let Some((path, value)) = fields.get("layer_types") else {
        let count = count.ok_or_else(|| fields.absent("num_hidden_layers", "an integer from 1 to 4096"))?;
        let interval = fields.size("full_attention_interval", Some(4))?;
        let kind = |n: usize| if n.is_multiple_of(interval) { LayerKind::Attention } else { LayerKind::Gdn };
        return Ok((1..=count).map(kind).collect());
    };
    let list = value.as_array().ok_or_else(|| fields.fault(&path, value, SUPPORTED))?;
    let count = count.unwrap_or(list.len());
    if list.len() != count || list.is_empty() || list.len() > MAX_LAYERS {
        let found = Value::from(format!("{} entries", list.len()));
        return Err(fields.fault(&path, &found, format!("num_hidden_layers entries, which is {count}")));
    }
    list.iter()
        .enumerate()
        .map(|(n, kind)| match kind.as_str() {
            Some("linear_attention") => Ok(LayerKind::Gdn),
            Some("full_attention") => Ok(LayerKind::Attention),
            _ => Err(fields.fault(&format!("{path}[{n}]"), kind, "linear_attention, full_attention")),
        })
        .collect()
}

/// `eos_token_id`: one id or a list.
fn eos(fields: &Fields, vocab: usize) -> Result<Option<Vec<u32>>, WeightsError> {
    let supported = format!("a token id or a list of them, each below vocab_size {vocab}");
    let id = |value: &Value| value.as_u64().filter(|&id| id < vocab as u64).map(|id| id as u32);
    fields.optional("eos_token_id", &supported, |value| match value {
        Value::Array(ids) => ids.iter().map(id).collect(),
        one => id(one).map(|id| vec![id]),
    })
}

fn defaults(fields: &Fields) -> Result<GenerationDefaults, WeightsError> {
    let number = |key, supported: &str, most: f64| {
        fields.optional(key, supported, |value| {
            value.as_f64().filter(|n| (0.0..=most).contains(n)).map(|n| n as f32)
        })
    };
    Ok(GenerationDefaults {
        temperature: number("temperature", "a number from 0 to 100", 100.0)?,
        top_p: number("top_p", "a number from 0 to 1", 1.0)?,
        top_k: fields.optional("top_k", "an integer from 0", |value| {
            value.as_u64().and_then(|k| u32::try_from(k).ok())
        })?,
        repetition_penalty: number("repetition_penalty", "a number from 0 to 100", 100.0)?,
        do_sample: fields.flag("do_sample")?,
    })
}
