//! Nothing that a file can hold makes the reader panic.

use proptest::prelude::*;
use qwill_weights::{Checkpoint, ModelConfig, Quantize};
use serde_json::{Value, json};

use crate::builder::{micro_config, micro_tensors, safetensors_file};

/// Opens and reads everything; only a panic fails.
fn exercise(config: Vec<u8>, index: Option<Vec<u8>>, weights: Vec<u8>) {
    // Leaked, because files in memory are static; a few megabytes over a test run.
    let mut files: Vec<(&'static str, &'static [u8])> =
        vec![("config.json", config.leak()), ("model.safetensors", weights.leak())];
    if let Some(index) = index {
        files.push(("model.safetensors.index.json", index.leak()));
    }
    if let Ok(checkpoint) = Checkpoint::embedded(files) {
        let hidden = checkpoint.config().geometry.hidden;
        for quantize in [Quantize::None, Quantize::Int4, Quantize::Int8] {
            let _ = checkpoint.matrix("embed_tokens", 32, hidden, quantize);
            let _ = checkpoint.matrix("layers.0.mlp.up_proj", 256, 128, quantize);
        }
        let _ = checkpoint.vector("norm.weight", hidden);
    }
}

/// JSON of any shape, some of it with the names that the parser looks for.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0u64..10).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z_]{0,12}".prop_map(Value::from),
        prop::sample::select(vec!["gptq", "default", "linear_attention", "qwen3_5"]).prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{1,10}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn random_files_never_panic(
        config in prop::collection::vec(any::<u8>(), 0..64),
        weights in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        exercise(micro_config().to_string().into_bytes(), None, weights);
        let _ = ModelConfig::parse(&config, Some(&config));
    }

    #[test]
    fn any_value_in_any_field_never_panics(field in 0usize..64, value in any_json(), quantization in any_json()) {
        let mut config = micro_config();
        let names: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        let extra = ["text_config", "quantization_config", "rope_scaling", "num_experts", "full_attention_interval"];
        let name = names.iter().map(String::as_str).chain(extra).cycle().nth(field).unwrap_or_default().to_owned();
        config[name] = value;
        let _ = ModelConfig::parse(config.to_string().as_bytes(), None);
        config["quantization_config"] = quantization;
        let _ = ModelConfig::parse(config.to_string().as_bytes(), Some(config.to_string().as_bytes()));
    }

    #[test]
    fn any_index_never_panics(map in any_json()) {
        let index = json!({"weight_map": map}).to_string().into_bytes();
        exercise(micro_config().to_string().into_bytes(), Some(index), safetensors_file(&micro_tensors()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A valid file with bytes of its header changed and its end cut off.
    #[test]
    fn mutated_checkpoints_never_panic(
        changes in prop::collection::vec((0usize..5000, any::<u8>()), 0..4),
        cut in prop_oneof![Just(0usize), 1usize..1000],
    ) {
        let mut weights = safetensors_file(&micro_tensors());
        for (at, byte) in changes {
            weights[at] = byte;
        }
        weights.truncate(weights.len() - cut);
        exercise(micro_config().to_string().into_bytes(), None, weights);
    }
}
