//! The tiny model from disk, from memory and in the text-only nesting: the same tensors.

use std::fs;

use qwill_device::{Geometry, LayerKind, WeightFormat};
use qwill_weights::{Checkpoint, Matrix, Quantize};
use safetensors::SafeTensors;

use crate::builder::{Directory, Owned, Tensors, repository};

/// Every matrix of a geometry, written out apart from the crate's own list.
pub(crate) fn matrices(g: &Geometry) -> Vec<(String, usize, usize)> {
    let mut all = vec![("embed_tokens".to_owned(), g.vocab, g.hidden)];
    let mut layers: Vec<_> =
        g.layers.iter().enumerate().map(|(n, kind)| (format!("layers.{n}"), *kind)).collect();
    if g.mtp_layers == 1 {
        all.push(("mtp.fc".to_owned(), g.hidden, 2 * g.hidden));
        layers.push(("mtp.layers.0".to_owned(), LayerKind::Attention));
    }
    if !g.tied_head {
        all.push(("lm_head".to_owned(), g.vocab, g.hidden));
    }
    for (layer, kind) in layers {
        let (q, kv) =
            (g.attention.query_heads * g.attention.head_dim, g.attention.kv_heads * g.attention.head_dim);
        let (key, value) = (g.gdn.key_heads * g.gdn.key_dim, g.gdn.value_heads * g.gdn.value_dim);
        let mixer = match kind {
            LayerKind::Attention => vec![
                ("self_attn.q_proj", 2 * q, g.hidden),
                ("self_attn.k_proj", kv, g.hidden),
                ("self_attn.v_proj", kv, g.hidden),
                ("self_attn.o_proj", g.hidden, q),
            ],
            LayerKind::Gdn => vec![
                ("linear_attn.in_proj_qkv", 2 * key + value, g.hidden),
                ("linear_attn.in_proj_z", value, g.hidden),
                ("linear_attn.in_proj_a", g.gdn.value_heads, g.hidden),
                ("linear_attn.in_proj_b", g.gdn.value_heads, g.hidden),
                ("linear_attn.out_proj", g.hidden, value),
            ],
        };
        let mlp = [
            ("mlp.gate_proj", g.intermediate, g.hidden),
            ("mlp.up_proj", g.intermediate, g.hidden),
            ("mlp.down_proj", g.hidden, g.intermediate),
        ];
        all.extend(
            mixer.into_iter().chain(mlp).map(|(name, rows, cols)| (format!("{layer}.{name}"), rows, cols)),
        );
    }
    all
}

/// Every vector of a geometry with its elements.
pub(crate) fn vectors(g: &Geometry) -> Vec<(String, usize)> {
    let mut all = vec![("norm.weight".to_owned(), g.hidden)];
    let mut attention = |layer: &str| {
        all.push((format!("{layer}.self_attn.q_norm.weight"), g.attention.head_dim));
        all.push((format!("{layer}.self_attn.k_norm.weight"), g.attention.head_dim));
    };
    for (n, kind) in g.layers.iter().enumerate() {
        if *kind == LayerKind::Attention {
            attention(&format!("layers.{n}"));
        }
    }
    if g.mtp_layers == 1 {
        attention("mtp.layers.0");
        for name in [
            "norm",
            "pre_fc_norm_embedding",
            "pre_fc_norm_hidden",
            "layers.0.input_layernorm",
            "layers.0.post_attention_layernorm",
        ] {
            all.push((format!("mtp.{name}.weight"), g.hidden));
        }
    }
    for (n, kind) in g.layers.iter().enumerate() {
        all.push((format!("layers.{n}.input_layernorm.weight"), g.hidden));
        all.push((format!("layers.{n}.post_attention_layernorm.weight"), g.hidden));
        if *kind == LayerKind::Gdn {
            let gdn = format!("layers.{n}.linear_attn");
            all.push((format!("{gdn}.A_log"), g.gdn.value_heads));
            all.push((format!("{gdn}.dt_bias"), g.gdn.value_heads));
            all.push((format!("{gdn}.norm.weight"), g.gdn.value_dim));
            all.push((format!("{gdn}.conv1d.weight"), g.gdn.conv_channels() * g.gdn.conv_width));
        }
    }
    all
}

const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "tokenizer_config.json",
];

fn from_disk() -> Checkpoint {
    Checkpoint::open(&repository("models/tiny")).unwrap()
}

/// The files in memory, `shift` bytes off any alignment.
fn from_memory(shift: usize) -> Checkpoint {
    let leak = |name: &str| {
        let mut bytes = vec![0; shift];
        bytes.extend(fs::read(repository("models/tiny").join(name)).unwrap());
        &*bytes.leak()
    };
    Checkpoint::embedded(FILES.iter().map(|name| (*name, &leak(name)[shift..])).collect()).unwrap()
}

fn assert_same(left: &Checkpoint, right: &Checkpoint) {
    assert_eq!(left.total_bytes(), right.total_bytes());
    assert!(left.names().eq(right.names()));
    for quantize in [Quantize::None, Quantize::Int4] {
        for (name, rows, cols) in matrices(&left.config().geometry) {
            let [left, right]: [Matrix; 2] =
                [left, right].map(|checkpoint| checkpoint.matrix(&name, rows, cols, quantize).unwrap());
            assert!(left == right, "{name}");
            assert_eq!(left.data().check(), Ok(()));
        }
    }
    for (name, len) in vectors(&left.config().geometry) {
        assert_eq!(left.vector(&name, len).unwrap(), right.vector(&name, len).unwrap(), "{name}");
    }
}

#[test]
fn disk_and_memory_give_the_same_tensors() {
    let disk = from_disk();
    assert_eq!(disk.config().geometry, Geometry::named("tiny").unwrap());
    assert_eq!(disk.config().eos_token_ids, [8168, 8166]);
    assert_eq!(disk.config().generation.do_sample, Some(false));
    assert_eq!(disk.config().generation.temperature, None);
    for shift in [0, 1] {
        assert_same(&disk, &from_memory(shift));
    }
}

#[test]
fn the_list_of_tensors_is_exactly_the_stored_one() {
    let disk = from_disk();
    let geometry = disk.config().geometry.clone();
    let mut expected: Vec<String> =
        matrices(&geometry).into_iter().map(|(name, ..)| name + ".weight").collect();
    expected.extend(vectors(&geometry).into_iter().map(|(name, _)| name));
    expected.sort_unstable();
    assert_eq!(disk.names().collect::<Vec<_>>(), expected);
    assert_eq!(disk.total_bytes(), 27_641_048);
    for name in &expected {
        assert!(disk.has(name) && disk.has(name.strip_suffix(".weight").unwrap_or(name)), "{name}");
    }
    assert!(!disk.has("layers.0.self_attn.q_proj") && !disk.has("lm_head.bias"));
}

/// Against the format's own library, tensor by tensor.
#[test]
fn values_are_those_of_the_files() {
    let disk = from_disk();
    for shard in &FILES[3..5] {
        let bytes = fs::read(repository("models/tiny").join(shard)).unwrap();
        for (stored, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            let name = stored.strip_prefix("model.language_model.").unwrap_or(stored);
            let expected: Vec<f32> = match view.dtype() {
                safetensors::Dtype::F32 => {
                    view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
                }
                _ => view
                    .data()
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .map(|b| half::bf16::from_le_bytes(*b).to_f32())
                    .collect(),
            };
            if let [rows, cols] = *view.shape() {
                let module = name.strip_suffix(".weight").unwrap();
                assert_eq!(disk.format_of(module), Some(WeightFormat::Bf16));
                let matrix = disk.matrix(module, rows, cols, Quantize::None).unwrap();
                let data = matrix.data();
                let equal =
                    expected.iter().enumerate().all(|(at, value)| data.value(at / cols, at % cols) == *value);
                assert!(equal, "{name}");
            } else {
                assert_eq!(disk.vector(name, expected.len()).unwrap(), expected, "{name}");
            }
        }
    }
}

#[test]
fn the_text_only_layout_gives_the_same_tensors() {
    let disk = from_disk();
    let mut tensors = Tensors::new();
    for shard in &FILES[3..5] {
        let bytes = fs::read(repository("models/tiny").join(shard)).unwrap();
        for (stored, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            let mut shape = view.shape().to_vec();
            if stored.ends_with("conv1d.weight") {
                shape.remove(1); // some exporters squeeze the middle dimension
            }
            let name = stored.replace("model.language_model.", "model.");
            tensors.insert(name, Owned { dtype: view.dtype(), shape, bytes: view.data().to_vec() });
        }
    }
    tensors.insert("model.visual.pos_embed.weight".to_owned(), Owned::bf16(&[4, 4]));
    let nested: serde_json::Value =
        serde_json::from_slice(&fs::read(repository("models/tiny/config.json")).unwrap()).unwrap();
    let mut config = nested["text_config"].clone();
    config["architectures"] = serde_json::json!(["Qwen3_5ForCausalLM"]);
    let directory = Directory::single(&config, &tensors);
    let flat = Checkpoint::open(directory.path()).unwrap();
    assert_eq!(flat.config().geometry, disk.config().geometry);
    assert_eq!(flat.config().eos_token_ids, [8166], "of config.json, without generation_config.json");
    assert_same(&disk, &flat);
}

#[test]
fn side_files_are_found_by_plain_name_only() {
    for checkpoint in [from_disk(), from_memory(0)] {
        let found = checkpoint.file("tokenizer_config.json").unwrap().unwrap();
        assert_eq!(&*found, fs::read(repository("models/tiny/tokenizer_config.json")).unwrap());
        for absent in ["chat_template.jinja", "../tiny/config.json", "", "/etc/hostname"] {
            assert!(checkpoint.file(absent).unwrap().is_none(), "{absent}");
        }
    }
}
