//! Packed matrices broken in one place.

use qwill_device::GROUP;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::broken::{TensorCase, assert_message, cut, put, read_all};
use crate::builder::{Directory, Owned, Tensors, micro_config, micro_tensors};

/// GPTQ tensors of [`UP`] in place of the dense one, 4 bits.
fn gptq(tensors: &mut Tensors) {
    cut(tensors, "UP.weight");
    put(tensors, "UP.qweight", Owned::words(&[16, 256], 0x7654_3210));
    put(tensors, "UP.qzeros", Owned::words(&[1, 32], 0x7777_7777));
    put(tensors, "UP.scales", Owned::f16(&[1, 256], -0.01));
}

/// The same as compressed-tensors.
fn compressed(tensors: &mut Tensors) {
    cut(tensors, "UP.weight");
    put(tensors, "UP.weight_packed", Owned::words(&[256, 16], 0x7654_3210));
    put(tensors, "UP.weight_scale", Owned::f16(&[256, 1], -0.01));
}

fn with_method(quantization: Value) -> Value {
    let mut config = micro_config();
    config["quantization_config"] = quantization;
    config
}

fn gptq_config() -> Value {
    with_method(json!({"quant_method": "gptq", "bits": 4, "group_size": 128}))
}

fn compressed_config() -> Value {
    with_method(json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}))
}

#[test]
fn the_packings_are_sound_before_they_are_broken() {
    let mut tensors = micro_tensors();
    gptq(&mut tensors);
    read_all(&Directory::single(&gptq_config(), &tensors)).unwrap();
    let mut tensors = micro_tensors();
    compressed(&mut tensors);
    put(&mut tensors, "UP.weight_zero_point", Owned::words(&[32, 1], 0x8888_8888));
    let mut groups = Owned::words(&[128], 0);
    groups.bytes.fill(0);
    put(&mut tensors, "UP.weight_g_idx", groups);
    put(&mut tensors, "UP.bias", Owned::f16(&[256], 0.0));
    read_all(&Directory::single(&compressed_config(), &tensors)).unwrap();
}

#[test]
fn wrong_gptq_tensors_are_named() {
    let cases: &[TensorCase] = &[
        ("no zero points", |t| cut(t, "UP.qzeros"), &["`layers.1.mlp.up_proj.qzeros`", "model.safetensors"]),
        ("no scales", |t| cut(t, "UP.scales"), &["`layers.1.mlp.up_proj.scales`"]),
        (
            "3 bits",
            |t| put(t, "UP.qweight", Owned::words(&[12, 256], 0)),
            &["qweight` in model.safetensors", "bits per code", "found 3", "4 or 8"],
        ),
        (
            "misshapen codes",
            |t| put(t, "UP.qweight", Owned::words(&[16, 255], 0)),
            &["qweight` in model.safetensors", "[16, 255]", "[16, 256] (4 bits)"],
        ),
        (
            "codes of another type",
            |t| put(t, "UP.qweight", Owned::f16(&[16, 256], 0.0)),
            &["dtype", "F16", "I32"],
        ),
        (
            "group size 64",
            |t| put(t, "UP.scales", Owned::f16(&[2, 256], 0.1)),
            &["scales` in model.safetensors", "group size", "found 64", "expected 128"],
        ),
        ("misshapen scales", |t| put(t, "UP.scales", Owned::f16(&[1, 128], 0.1)), &["[1, 128]", "[1, 256]"]),
        (
            "scales of another type",
            |t| put(t, "UP.scales", Owned::words(&[1, 256], 0)),
            &["dtype", "I32", "F16 or BF16"],
        ),
        (
            "infinite scale",
            |t| put(t, "UP.scales", Owned::f16(&[1, 256], f32::INFINITY)),
            &["scales` in model.safetensors", "inf at output 0, group 0", "finite"],
        ),
        (
            "misshapen zero points",
            |t| put(t, "UP.qzeros", Owned::words(&[1, 31], 0x7777_7777)),
            &["qzeros` in model.safetensors", "[1, 31]", "[1, 32]"],
        ),
        (
            "asymmetric",
            |t| put(t, "UP.qzeros", Owned::words(&[1, 32], 0x7777_7757)),
            &["qzeros` in model.safetensors", "found 6 at output 1, group 0", "8 everywhere"],
        ),
        (
            "activation order",
            |t| put(t, "UP.g_idx", Owned::words(&[128], 1)),
            &["g_idx` in model.safetensors", "group 1 at input 0 (activation order)", "group 0"],
        ),
        (
            "misshapen group index",
            |t| put(t, "UP.g_idx", Owned::words(&[64], 0)),
            &["g_idx` in model.safetensors", "[64]", "[128]"],
        ),
    ];
    for (case, change, parts) in cases {
        let mut tensors = micro_tensors();
        gptq(&mut tensors);
        change(&mut tensors);
        assert_message(case, &Directory::single(&gptq_config(), &tensors), parts);
    }
}

#[test]
fn wrong_compressed_tensors_are_named() {
    let cases: &[TensorCase] = &[
        ("no scales", |t| cut(t, "UP.weight_scale"), &["`layers.1.mlp.up_proj.weight_scale`"]),
        (
            "other shape recorded",
            |t| {
                put(
                    t,
                    "UP.weight_shape",
                    Owned {
                        dtype: Dtype::I64,
                        shape: vec![2],
                        bytes: [256i64, 100].iter().flat_map(|n| n.to_le_bytes()).collect(),
                    },
                );
            },
            &["weight_shape` in model.safetensors", "[256, 100]", "[256, 128]"],
        ),
        (
            "asymmetric",
            |t| put(t, "UP.weight_zero_point", Owned::words(&[32, 1], 0x8888_8898)),
            &["weight_zero_point` in model.safetensors", "found 9 at output 1", "(asymmetric)"],
        ),
        (
            "nvfp4",
            |t| {
                put(
                    t,
                    "UP.weight_packed",
                    Owned { dtype: Dtype::U8, shape: vec![256, 64], bytes: vec![0; 256 * 64] },
                );
            },
            &["weight_packed` in model.safetensors", "dtype", "U8", "I32"],
        ),
        (
            "activation order",
            |t| put(t, "UP.weight_g_idx", Owned::words(&[GROUP], 3)),
            &["weight_g_idx` in model.safetensors", "(activation order)"],
        ),
        (
            "group size 32",
            |t| put(t, "UP.weight_scale", Owned::f16(&[256, 4], 0.1)),
            &["weight_scale` in model.safetensors", "group size", "found 32"],
        ),
        (
            "bf16 scale beyond f16",
            |t| {
                let mut scales = Owned::bf16(&[256, 1]);
                scales.bytes[..2].copy_from_slice(&half::bf16::from_f32(1e6).to_le_bytes());
                put(t, "UP.weight_scale", scales);
            },
            &["weight_scale` in model.safetensors", "65504"],
        ),
    ];
    for (case, change, parts) in cases {
        let mut tensors = micro_tensors();
        compressed(&mut tensors);
        change(&mut tensors);
        assert_message(case, &Directory::single(&compressed_config(), &tensors), parts);
    }
    // Per-channel scales of a matrix with more than one group.
    let down = "model.layers.1.mlp.down_proj";
    let mut tensors = micro_tensors();
    tensors.remove(&format!("{down}.weight")).unwrap();
    tensors.insert(format!("{down}.weight_packed"), Owned::words(&[128, 32], 0));
    tensors.insert(format!("{down}.weight_scale"), Owned::f16(&[128, 1], 0.1));
    let parts = ["down_proj.weight_scale` in model.safetensors", "group size: found 256", "[128, 2]"];
    assert_message("per channel", &Directory::single(&compressed_config(), &tensors), &parts);
}

#[test]
fn packed_codes_need_their_explanation() {
    for (case, change, config, found) in [
        ("gptq", gptq as fn(&mut Tensors), micro_config(), "no quantization_config"),
        ("gptq read as compressed", gptq, compressed_config(), "a quantization_config of compressed-tensors"),
        ("compressed read as gptq", compressed, gptq_config(), "a quantization_config of gptq"),
    ] {
        let mut tensors = micro_tensors();
        change(&mut tensors);
        assert_message(case, &Directory::single(&config, &tensors), &["up_proj", "model.safetensors", found]);
    }
}
