//! `config.json` in every form in which the family is published, and every field that is refused.

use qwill_device::{Geometry, LayerKind};
use qwill_weights::{GenerationDefaults, ModelConfig, WeightsError};
use serde_json::{Value, json};

use crate::builder::micro_config;

/// The text fields as the released files write them.
fn text_config(g: &Geometry) -> Value {
    let kinds: Vec<&str> = g
        .layers
        .iter()
        .map(|kind| if *kind == LayerKind::Gdn { "linear_attention" } else { "full_attention" })
        .collect();
    json!({
        "model_type": "qwen3_5_text", "attention_bias": false, "attention_dropout": 0.0,
        "attn_output_gate": true, "dtype": "bfloat16", "eos_token_id": 17, "full_attention_interval": 4,
        "head_dim": g.attention.head_dim, "hidden_act": "silu", "hidden_size": g.hidden,
        "initializer_range": 0.02, "intermediate_size": g.intermediate, "layer_types": kinds,
        "linear_conv_kernel_dim": g.gdn.conv_width, "linear_key_head_dim": g.gdn.key_dim,
        "linear_num_key_heads": g.gdn.key_heads, "linear_num_value_heads": g.gdn.value_heads,
        "linear_value_head_dim": g.gdn.value_dim, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": g.max_context, "mtp_num_hidden_layers": g.mtp_layers,
        "mtp_use_dedicated_embeddings": false, "num_attention_heads": g.attention.query_heads,
        "num_hidden_layers": g.layers.len(), "num_key_value_heads": g.attention.kv_heads,
        "output_gate_type": "swish", "rms_norm_eps": 1e-6, "use_cache": true, "vocab_size": g.vocab,
        "bos_token_id": null, "tie_word_embeddings": g.tied_head,
        "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "rope_type": "default",
            "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
    })
}

fn parse(config: &Value) -> Result<ModelConfig, WeightsError> {
    ModelConfig::parse(config.to_string().as_bytes(), None)
}

#[test]
fn every_named_geometry_parses_nested_and_flat() {
    for name in Geometry::NAMES {
        let expected = Geometry::named(name).unwrap();
        let text = text_config(&expected);
        let nested = json!({"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "image_token_id": 248_056, "text_config": text, "tie_word_embeddings": expected.tied_head,
            "vision_config": {"depth": 27, "hidden_size": 1152}});
        // Older exports: the rotation's numbers beside the rest, and the interval instead of the list.
        let mut flat = text.clone();
        let fields = flat.as_object_mut().unwrap();
        fields.remove("rope_parameters");
        fields.remove("layer_types");
        fields.insert("rope_theta".to_owned(), json!(1e7));
        fields.insert("partial_rotary_factor".to_owned(), json!(0.25));
        fields.insert("rope_scaling".to_owned(), Value::Null);
        for config in [nested, flat] {
            let parsed = parse(&config).unwrap();
            let named = Geometry { name: name.to_owned(), ..parsed.geometry };
            assert_eq!(named, expected);
            assert_eq!(parsed.eos_token_ids, [17]);
        }
    }
}

#[test]
fn layer_types_win_over_the_interval() {
    let mut config = micro_config();
    config["full_attention_interval"] = json!(1);
    assert_eq!(parse(&config).unwrap().geometry.layers, [LayerKind::Gdn, LayerKind::Attention]);
}

#[test]
fn generation_config_gives_stops_and_defaults() {
    let config = micro_config().to_string();
    let parse = |generation: Value| {
        ModelConfig::parse(config.as_bytes(), Some(generation.to_string().as_bytes())).unwrap()
    };
    let parsed = parse(json!({"eos_token_id": [9, 5], "temperature": 0.6, "top_p": 0.95, "top_k": 20,
        "repetition_penalty": 1.1, "do_sample": true, "pad_token_id": 5}));
    assert_eq!(parsed.eos_token_ids, [9, 5]);
    let expected = GenerationDefaults {
        temperature: Some(0.6),
        top_p: Some(0.95),
        top_k: Some(20),
        repetition_penalty: Some(1.1),
        do_sample: Some(true),
    };
    assert_eq!(parsed.generation, expected);
    let parsed = parse(json!({"eos_token_id": 7}));
    assert_eq!((parsed.eos_token_ids, parsed.generation), (vec![7], GenerationDefaults::default()));
    assert_eq!(parse(json!({"eos_token_id": null})).eos_token_ids, [3]);
}

/// Field, value, part of the message beside the field.
#[test]
fn fields_that_would_change_the_arithmetic_are_refused() {
    let cases = [
        ("attention_bias", json!(true), "found true, supported: false"),
        ("layer_scale", json!(true), "supported: false"),
        ("mtp_use_dedicated_embeddings", json!(true), "supported: false"),
        ("use_sliding_window", json!(true), "supported: false"),
        ("attn_output_gate", json!(false), "found false, supported: true"),
        ("hidden_act", json!("gelu"), "found \"gelu\", supported: silu, swish"),
        ("output_gate_type", json!("sigmoid"), "found \"sigmoid\", supported: silu, swish"),
        ("model_type", json!("llama"), "found \"llama\", supported: qwen3_5"),
        ("model_type", json!("qwen3_5_moe"), "mixture-of-experts"),
        ("num_experts", json!(256), "found 256, supported: dense models"),
        ("mtp_num_hidden_layers", json!(2), "found 2, supported: 0 or 1"),
        (
            "num_key_value_heads",
            json!(3),
            "found 2, supported: a multiple of num_key_value_heads, which is 3",
        ),
        ("num_key_value_heads", json!(0), "found 0"),
        ("num_attention_heads", json!(16_777_216), "columns together"),
        (
            "linear_num_key_heads",
            json!(4),
            "found 2, supported: a multiple of linear_num_key_heads, which is 4",
        ),
        ("hidden_size", json!(-1), "found -1"),
        ("hidden_size", json!(128.5), "found 128.5"),
        ("hidden_size", json!("128"), "found \"128\""),
        ("vocab_size", Value::Null, "found nothing"),
        ("vocab_size", json!(1u64 << 60), "an integer from 1 to 16777216"),
        ("num_hidden_layers", json!(3), "2 entries"),
        ("num_hidden_layers", json!(0), "an integer from 1 to 4096"),
        ("layer_types", json!("x"), "a list of"),
        ("layer_types", json!(["linear_attention", "sliding_attention"]), "layer_types[1]"),
        ("rms_norm_eps", json!(0), "a positive number"),
        ("rope_parameters", json!([]), "an object"),
        ("rope_parameters", json!({"rope_type": "yarn", "factor": 4.0}), "rope_parameters.rope_type"),
        ("rope_scaling", json!({"type": "linear"}), "rope_scaling.type"),
        ("rope_parameters", json!({"partial_rotary_factor": 0.3}), "found 0.3"),
        ("rope_parameters", json!({"partial_rotary_factor": 1.5}), "found 1.5"),
        ("rope_parameters", json!({"full_attention": {"rope_type": "llama3"}}), "full_attention.rope_type"),
        ("eos_token_id", json!(32), "below vocab_size 32"),
        ("eos_token_id", json!([1, "x"]), "a token id or a list"),
        ("tie_word_embeddings", json!("yes"), "true or false"),
        ("quantization_config", json!({"quant_method": "awq"}), "found \"awq\", supported: gptq"),
        ("quantization_config", json!({"quant_method": "fp8"}), "compressed-tensors"),
        ("quantization_config", json!({"bits": 4}), "quant_method"),
        (
            "quantization_config",
            json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
            "found \"nvfp4-pack-quantized\", supported: pack-quantized",
        ),
        (
            "quantization_config",
            json!({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}),
            "packing_format",
        ),
        ("quantization_config", json!({"quant_method": "gptq", "checkpoint_format": "marlin"}), "\"marlin\""),
    ];
    for (field, value, part) in cases {
        let mut config = micro_config();
        config[field] = value;
        let message = parse(&config).unwrap_err().to_string();
        assert!(message.contains(field) && message.contains("config.json"), "{field}: {message}");
        assert!(message.contains(part), "{part} in: {message}");
    }
}

#[test]
fn required_sizes_are_asked_for_by_name() {
    for field in [
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "model_type",
    ] {
        let mut config = micro_config();
        config.as_object_mut().unwrap().remove(field);
        let message = parse(&config).unwrap_err().to_string();
        assert!(message.contains(&format!("`{field}`: found nothing")), "{message}");
    }
}
