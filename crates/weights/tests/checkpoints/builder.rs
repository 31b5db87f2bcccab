//! A complete checkpoint of a model small enough to read, to be broken in one place at a time.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};

/// Files of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// An owned tensor.
#[derive(Debug, Clone)]
pub(crate) struct Owned {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Owned {
    /// bf16 values that differ from element to element.
    pub(crate) fn bf16(shape: &[usize]) -> Self {
        let elements: usize = shape.iter().product();
        let bytes =
            (0..elements).flat_map(|n| half::bf16::from_f32((n % 13) as f32 / 16.0 - 0.25).to_le_bytes());
        Self { dtype: Dtype::BF16, shape: shape.to_vec(), bytes: bytes.collect() }
    }

    pub(crate) fn words(shape: &[usize], word: u32) -> Self {
        let elements: usize = shape.iter().product();
        let bytes = (0..elements).flat_map(|_| word.to_le_bytes());
        Self { dtype: Dtype::I32, shape: shape.to_vec(), bytes: bytes.collect() }
    }

    pub(crate) fn f16(shape: &[usize], value: f32) -> Self {
        let elements: usize = shape.iter().product();
        let bytes = (0..elements).flat_map(|_| half::f16::from_f32(value).to_le_bytes());
        Self { dtype: Dtype::F16, shape: shape.to_vec(), bytes: bytes.collect() }
    }
}

pub(crate) type Tensors = BTreeMap<String, Owned>;

/// The file of these tensors, written by the format's own library.
pub(crate) fn safetensors_file(tensors: &Tensors) -> Vec<u8> {
    let views = tensors
        .iter()
        .map(|(name, t)| (name.as_str(), TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    serialize(views, None).unwrap()
}

/// Hidden 128, two layers (GDN, attention), MTP. Every tensor under its text-only name.
pub(crate) fn micro_tensors() -> Tensors {
    let mut tensors = Tensors::new();
    let mut add = |name: &str, shape: &[usize]| {
        tensors.insert(name.to_owned(), Owned::bf16(shape));
    };
    add("model.embed_tokens.weight", &[32, 128]);
    add("model.norm.weight", &[128]);
    add("lm_head.weight", &[32, 128]);
    add("model.layers.0.linear_attn.in_proj_qkv.weight", &[16, 128]);
    add("model.layers.0.linear_attn.in_proj_z.weight", &[8, 128]);
    add("model.layers.0.linear_attn.in_proj_a.weight", &[2, 128]);
    add("model.layers.0.linear_attn.in_proj_b.weight", &[2, 128]);
    add("model.layers.0.linear_attn.out_proj.weight", &[128, 8]);
    add("model.layers.0.linear_attn.conv1d.weight", &[16, 1, 4]);
    add("model.layers.0.linear_attn.A_log", &[2]);
    add("model.layers.0.linear_attn.dt_bias", &[2]);
    add("model.layers.0.linear_attn.norm.weight", &[4]);
    add("mtp.fc.weight", &[128, 256]);
    add("mtp.norm.weight", &[128]);
    add("mtp.pre_fc_norm_embedding.weight", &[128]);
    add("mtp.pre_fc_norm_hidden.weight", &[128]);
    for attention in ["model.layers.1", "mtp.layers.0"] {
        add(&format!("{attention}.self_attn.q_proj.weight"), &[16, 128]);
        add(&format!("{attention}.self_attn.k_proj.weight"), &[4, 128]);
        add(&format!("{attention}.self_attn.v_proj.weight"), &[4, 128]);
        add(&format!("{attention}.self_attn.o_proj.weight"), &[128, 8]);
        add(&format!("{attention}.self_attn.q_norm.weight"), &[4]);
        add(&format!("{attention}.self_attn.k_norm.weight"), &[4]);
    }
    for layer in ["model.layers.0", "model.layers.1", "mtp.layers.0"] {
        add(&format!("{layer}.input_layernorm.weight"), &[128]);
        add(&format!("{layer}.post_attention_layernorm.weight"), &[128]);
        add(&format!("{layer}.mlp.gate_proj.weight"), &[256, 128]);
        add(&format!("{layer}.mlp.up_proj.weight"), &[256, 128]);
        add(&format!("{layer}.mlp.down_proj.weight"), &[128, 256]);
    }
    tensors
}

/// The flat `config.json` of [`micro_tensors`].
pub(crate) fn micro_config() -> Value {
    json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "hidden_size": 128, "intermediate_size": 256, "vocab_size": 32, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4,
        "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "max_position_embeddings": 512, "mtp_num_hidden_layers": 1, "tie_word_embeddings": false,
        "hidden_act": "silu", "attention_bias": false, "eos_token_id": 3
    })
}

/// A directory with an index and two shards: a valid checkpoint to begin from.
pub(crate) struct Directory {
    pub(crate) temp: tempfile::TempDir,
}

impl Directory {
    /// One file without an index.
    pub(crate) fn single(config: &Value, tensors: &Tensors) -> Self {
        let directory = Self { temp: tempfile::tempdir().unwrap() };
        directory.write("config.json", config.to_string().as_bytes());
        directory.write("model.safetensors", &safetensors_file(tensors));
        directory
    }

    /// Two shards and an index.
    pub(crate) fn sharded(config: &Value, tensors: &Tensors) -> Self {
        let directory = Self { temp: tempfile::tempdir().unwrap() };
        directory.write("config.json", config.to_string().as_bytes());
        let mut shards = [Tensors::new(), Tensors::new()];
        let mut weight_map = serde_json::Map::new();
        for (n, (name, tensor)) in tensors.iter().enumerate() {
            shards[n % 2].insert(name.clone(), tensor.clone());
            weight_map.insert(name.clone(), json!(format!("model-{}.safetensors", n % 2)));
        }
        for (n, shard) in shards.iter().enumerate() {
            directory.write(&format!("model-{n}.safetensors"), &safetensors_file(shard));
        }
        let index = json!({"metadata": {}, "weight_map": weight_map});
        directory.write("model.safetensors.index.json", index.to_string().as_bytes());
        directory
    }

    pub(crate) fn path(&self) -> &Path {
        self.temp.path()
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path().join(name), bytes).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path().join(name)).unwrap()
    }

    pub(crate) fn remove(&self, name: &str) {
        fs::remove_file(self.path().join(name)).unwrap();
    }
}
