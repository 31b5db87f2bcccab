//! Writes random weights of a geometry as a checkpoint, to measure how fast one is loaded:
//! `cargo run --release -p qwill-weights --example write_checkpoint -- GEOMETRY DIRECTORY [w4a16|bf16]`.
//!
//! `w4a16` is what quantised checkpoints usually are: compressed-tensors int4 with groups of 128, embedding, head and
//! the gates' small projections in bf16. There is no tokenizer.

use std::path::Path;

use qwill_device::matrix::MatrixElements;
use qwill_device::{GROUP, Geometry, LayerKind, WeightFormat};
use qwill_weights::{Checkpoint, Quantize};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;

/// A tensor to be written.
struct Owned {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, directory, rest @ ..] = arguments.as_slice() else {
        return Err("arguments: GEOMETRY DIRECTORY [w4a16|bf16]".into());
    };
    let packed = match rest.first().map_or("w4a16", String::as_str) {
        "w4a16" => true,
        "bf16" => false,
        other => return Err(format!("no format {other}").into()),
    };
    let (geometry, directory) = (Geometry::named(name).ok_or("unknown geometry")?, Path::new(directory));
    std::fs::create_dir_all(directory)?;
    std::fs::write(directory.join("config.json"), config(&geometry, packed).to_string())?;
    let checkpoints = [Quantize::None, Quantize::Int4].map(|format| Checkpoint::random(&geometry, 1, format));

    let mut shard: Vec<Owned> = Vec::new();
    let (mut shards, mut part) = (0, String::new());
    for spec in checkpoints[0].matrices() {
        let of_layer = spec.name.split('.').take(2).collect::<Vec<_>>().join(".");
        if of_layer != part {
            write(directory, &mut shards, &mut shard)?;
            part = of_layer;
        }
        let body = checkpoints[1].format_of(&spec.name) == Some(WeightFormat::Int4);
        let matrix = checkpoints[usize::from(packed && body)].matrix(
            &spec.name,
            spec.rows,
            spec.cols,
            Quantize::None,
        )?;
        add(&mut shard, &spec.name, spec.rows, spec.cols, matrix.data().elements);
    }
    write(directory, &mut shards, &mut shard)?;
    for (name, shape) in checkpoints[0].vectors() {
        let values = checkpoints[0].vector(&name, shape.iter().product())?;
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        shard.push(Owned { name: stored(&name), dtype: Dtype::F32, shape, bytes });
    }
    write(directory, &mut shards, &mut shard)?;
    let bytes = Checkpoint::open(directory)?.total_bytes();
    println!("{}: {:.2} GB in {shards} files", directory.display(), bytes as f64 / 1e9);
    Ok(())
}

/// The name in a text-only checkpoint.
fn stored(name: &str) -> String {
    let prefix = if name.starts_with("mtp.") || name.starts_with("lm_head") { "" } else { "model." };
    format!("{prefix}{name}")
}

fn add(shard: &mut Vec<Owned>, name: &str, rows: usize, cols: usize, elements: MatrixElements<'_>) {
    let halves = |bits: &[u16]| bits.iter().flat_map(|bits| bits.to_le_bytes()).collect::<Vec<u8>>();
    let mut push = |suffix: &str, dtype, shape: &[usize], bytes| {
        shard.push(Owned { name: stored(&format!("{name}.{suffix}")), dtype, shape: shape.to_vec(), bytes });
    };
    match elements {
        MatrixElements::Int4 { packed, scales } => {
            push("weight_packed", Dtype::I32, &[rows, cols / 8], packed.to_vec());
            push("weight_scale", Dtype::F16, &[rows, cols.div_ceil(GROUP)], halves(scales));
            let shape = [rows as i64, cols as i64].iter().flat_map(|side| side.to_le_bytes()).collect();
            push("weight_shape", Dtype::I64, &[2], shape);
        }
        MatrixElements::Bf16(bits) => push("weight", Dtype::BF16, &[rows, cols], halves(bits)),
        _ => unreachable!("random weights were asked for in bf16 and int4"),
    }
}

fn write(directory: &Path, shards: &mut usize, shard: &mut Vec<Owned>) -> Result<(), Failure> {
    if !shard.is_empty() {
        let view = |tensor| -> Result<_, Failure> {
            let Owned { name, dtype, shape, bytes }: &Owned = tensor;
            Ok((name.as_str(), TensorView::new(*dtype, shape.clone(), bytes)?))
        };
        let views = shard.iter().map(view).collect::<Result<Vec<_>, _>>()?;
        serialize_to_file(views, None, &directory.join(format!("model-{shards:05}.safetensors")))?;
        *shards += 1;
        shard.clear();
    }
    Ok(())
}

fn config(geometry: &Geometry, packed: bool) -> Value {
    let (attention, gdn) = (&geometry.attention, &geometry.gdn);
    let layer_types: Vec<&str> = geometry
        .layers
        .iter()
        .map(|kind| if *kind == LayerKind::Gdn { "linear_attention" } else { "full_attention" })
        .collect();
    let mut config = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "hidden_size": geometry.hidden, "intermediate_size": geometry.intermediate,
        "vocab_size": geometry.vocab, "num_hidden_layers": layer_types.len(), "layer_types": layer_types,
        "num_attention_heads": attention.query_heads, "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "linear_num_key_heads": gdn.key_heads, "linear_num_value_heads": gdn.value_heads,
        "linear_key_head_dim": gdn.key_dim, "linear_value_head_dim": gdn.value_dim,
        "linear_conv_kernel_dim": gdn.conv_width, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": attention.rope_theta,
            "partial_rotary_factor": attention.rope_dims as f64 / attention.head_dim as f64
        },
        "max_position_embeddings": geometry.max_context, "mtp_num_hidden_layers": geometry.mtp_layers,
        "tie_word_embeddings": geometry.tied_head, "hidden_act": "silu", "attention_bias": false
    });
    if packed {
        let weights = json!({
            "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": GROUP
        });
        config["quantization_config"] = json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}
        });
    }
    config
}
