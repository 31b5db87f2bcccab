//! Quantisation and every packing against the golden matrices, element by element.

use std::collections::BTreeMap;
use std::fs;
use std::sync::LazyLock;

use qwill_device::matrix::MatrixElements;
use qwill_device::{GROUP, WeightFormat};
use qwill_weights::{Checkpoint, Quantize, WeightsError, quantize_int4, quantize_int8};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::builder::{Owned, Tensors, repository, safetensors_file};

/// Golden name, canonical module, rows, cols.
const MATRICES: [(&str, &str, usize, usize); 2] =
    [("down", "layers.0.mlp.down_proj", 256, 512), ("gate", "layers.4.mlp.gate_proj", 512, 256)];

static GOLDEN: LazyLock<BTreeMap<String, Owned>> =
    LazyLock::new(|| load(&fs::read(repository("golden/quant.safetensors")).unwrap()));

/// The tiny model without the two matrices, as a file in memory.
static REST: LazyLock<&'static [u8]> = LazyLock::new(|| {
    let mut tensors = Tensors::new();
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        tensors.extend(load(&fs::read(repository("models/tiny").join(shard)).unwrap()));
    }
    for (_, module, _, _) in MATRICES {
        tensors.remove(&format!("model.language_model.{module}.weight")).unwrap();
    }
    safetensors_file(&tensors).leak()
});

fn load(bytes: &[u8]) -> Tensors {
    let own = |view: safetensors::tensor::TensorView| Owned {
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        bytes: view.data().to_vec(),
    };
    SafeTensors::deserialize(bytes).unwrap().iter().map(|(name, view)| (name.to_owned(), own(view))).collect()
}

fn f32s(name: &str) -> Vec<f32> {
    GOLDEN[name].bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn u16s(name: &str) -> Vec<u16> {
    GOLDEN[name].bytes.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect()
}

fn codes(name: &str) -> Vec<i8> {
    GOLDEN[name].bytes.iter().map(|&byte| byte as i8).collect()
}

/// The tiny model with the two matrices replaced by golden packings: parts are (suffix in the checkpoint,
/// suffix in the golden file).
fn checkpoint(
    scheme: &str,
    quantization: &Value,
    parts: &[(&str, &str)],
) -> Result<Checkpoint, WeightsError> {
    Checkpoint::embedded(files(scheme, quantization, parts))
}

/// The files of [`checkpoint`].
fn files(scheme: &str, quantization: &Value, parts: &[(&str, &str)]) -> Vec<(&'static str, &'static [u8])> {
    let mut extra = Tensors::new();
    for (matrix, module, _, _) in MATRICES {
        for (to, from) in parts {
            let tensor = GOLDEN[&format!("{matrix}.{scheme}.{from}")].clone();
            extra.insert(format!("model.language_model.{module}.{to}"), tensor);
        }
    }
    let config = fs::read(repository("models/tiny/config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["quantization_config"] = quantization.clone();
    vec![
        ("config.json", config.to_string().into_bytes().leak()),
        ("model.safetensors", *REST),
        ("model_extra_tensors.safetensors", safetensors_file(&extra).leak()),
    ]
}

/// The tiny model on disk with its two matrices in each packing.
pub(crate) fn packed_directories() -> Vec<tempfile::TempDir> {
    let gptq = (
        json!({"quant_method": "gptq"}),
        vec![
            ("qweight", "gptq.qweight"),
            ("qzeros", "gptq.qzeros"),
            ("scales", "gptq.scales"),
            ("g_idx", "gptq.g_idx"),
        ],
    );
    let compressed = (
        json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        vec![("weight_packed", "ct.weight_packed"), ("weight_scale", "ct.weight_scale")],
    );
    let mut directories = Vec::new();
    for (config, parts) in [gptq, compressed] {
        for scheme in ["int4_signed", "int8"] {
            let directory = tempfile::tempdir().unwrap();
            for (name, bytes) in files(scheme, &config, &parts) {
                fs::write(directory.path().join(name), bytes).unwrap();
            }
            directories.push(directory);
        }
    }
    directories
}

/// What [`Checkpoint::matrix`] gives for both matrices equals the golden codes, scales and values.
fn assert_golden(checkpoint: &Checkpoint, scheme: &str, format: WeightFormat, quantize: Quantize) {
    for (matrix, module, rows, cols) in MATRICES {
        assert_eq!(checkpoint.planned_format(module, quantize), Some(format));
        let read = checkpoint.matrix(module, rows, cols, quantize).unwrap();
        let data = read.data();
        assert_eq!((data.check(), read.format()), (Ok(()), format));
        let (expected_codes, expected_scales) =
            (codes(&format!("{matrix}.{scheme}.codes")), u16s(&format!("{matrix}.{scheme}.scales")));
        let scales = match data.elements {
            MatrixElements::Int8 { codes, scales } => {
                assert!(codes == expected_codes, "{matrix}.{scheme}: codes");
                scales
            }
            MatrixElements::Int4 { packed, scales } => {
                assert!(unpack_nibbles(packed) == expected_codes, "{matrix}.{scheme}: codes");
                scales
            }
            _ => panic!("{matrix}.{scheme} is dense"),
        };
        assert!(scales == expected_scales, "{matrix}.{scheme}: scales");
        for (at, expected) in f32s(&format!("{matrix}.{scheme}.dequant")).iter().enumerate() {
            assert_eq!(data.value(at / cols, at % cols), *expected, "{matrix}.{scheme} at {at}");
        }
    }
}

fn unpack_nibbles(packed: &[u8]) -> Vec<i8> {
    packed.iter().flat_map(|byte| [(byte & 15) as i8 - 8, (byte >> 4) as i8 - 8]).collect()
}

#[test]
fn rounding_gives_the_golden_codes_and_scales() {
    for (matrix, _, rows, cols) in MATRICES {
        let weight = f32s(&format!("{matrix}.weight"));
        let (packed, scales) = quantize_int4(&weight, rows, cols);
        assert_eq!(unpack_nibbles(&packed), codes(&format!("{matrix}.int4.codes")));
        assert_eq!(scales, u16s(&format!("{matrix}.int4.scales")));
        assert_eq!(scales.len(), rows * cols / GROUP);
        let (eight, scales) = quantize_int8(&weight, rows, cols);
        assert_eq!(eight, codes(&format!("{matrix}.int8.codes")));
        assert_eq!(scales, u16s(&format!("{matrix}.int8.scales")));
    }
}

#[test]
fn rounding_at_load_gives_the_same() {
    let tiny = Checkpoint::open(&repository("models/tiny")).unwrap();
    assert_golden(&tiny, "int4", WeightFormat::Int4, Quantize::Int4);
    assert_golden(&tiny, "int8", WeightFormat::Int8, Quantize::Int8);
}

#[test]
fn gptq_packings_are_read_exactly() {
    let v1 = [
        json!({"quant_method": "gptq", "checkpoint_format": "gptq"}),
        json!({"quant_method": "gptq"}),
        json!({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}),
    ];
    let v2 = [json!({"quant_method": "gptq", "checkpoint_format": "gptq_v2"})];
    for (scheme, format) in
        [("int4", WeightFormat::Int4), ("int4_signed", WeightFormat::Int4), ("int8", WeightFormat::Int8)]
    {
        for (zeros, configs) in [("gptq.qzeros", v1.as_slice()), ("gptq.qzeros_v2", v2.as_slice())] {
            let mut parts = vec![("qweight", "gptq.qweight"), ("qzeros", zeros), ("scales", "gptq.scales")];
            for config in configs {
                // A policy does not touch what is quantised already.
                let plain = checkpoint(scheme, config, &parts).unwrap();
                assert_golden(&plain, scheme, format, Quantize::Int4);
            }
            parts.push(("g_idx", "gptq.g_idx"));
            let indexed = checkpoint(scheme, &configs[0], &parts).unwrap();
            assert_golden(&indexed, scheme, format, Quantize::None);
        }
    }
}

#[test]
fn compressed_tensors_packings_are_read_exactly() {
    let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized"});
    let parts = [
        ("weight_packed", "ct.weight_packed"),
        ("weight_scale", "ct.weight_scale"),
        ("weight_shape", "ct.weight_shape"),
    ];
    for (scheme, format) in
        [("int4", WeightFormat::Int4), ("int4_signed", WeightFormat::Int4), ("int8", WeightFormat::Int8)]
    {
        let read = checkpoint(scheme, &config, &parts).unwrap();
        assert_golden(&read, scheme, format, Quantize::Int8);
    }
}

#[test]
fn signed_scales_are_negative_in_half_of_the_groups() {
    let negative = u16s("down.int4_signed.scales").iter().filter(|&&bits| bits >> 15 == 1).count();
    assert!((400..624).contains(&negative), "{negative} of 1024: the golden data should test signs");
}

#[test]
fn asymmetric_zero_points_are_refused_with_the_reason() {
    for (format, zeros) in [("gptq", "gptq.qzeros"), ("gptq_v2", "gptq.qzeros_v2")] {
        let config = json!({"quant_method": "gptq", "checkpoint_format": format});
        let parts = [("qweight", "gptq.qweight"), ("qzeros", zeros), ("scales", "gptq.scales")];
        let read = checkpoint("int4_asym", &config, &parts).unwrap();
        let error = read.matrix("layers.0.mlp.down_proj", 256, 512, Quantize::None).unwrap_err();
        let message = error.to_string();
        for part in [
            "layers.0.mlp.down_proj.qzeros",
            "model_extra_tensors",
            "zero point",
            "(asymmetric)",
            "8 everywhere",
        ] {
            assert!(message.contains(part), "{part} in: {message}");
        }
        assert!(error.hint().is_some());
    }
    // The wrong convention looks asymmetric too, instead of shifting every weight.
    let config = json!({"quant_method": "gptq", "checkpoint_format": "gptq_v2"});
    let parts = [("qweight", "gptq.qweight"), ("qzeros", "gptq.qzeros"), ("scales", "gptq.scales")];
    let read = checkpoint("int4", &config, &parts).unwrap();
    assert!(read.matrix("layers.0.mlp.down_proj", 256, 512, Quantize::None).is_err());
}

#[test]
fn bf16_scales_that_f16_can_hold_are_kept_exactly() {
    let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized"});
    let mut extra = Tensors::new();
    let scales: Vec<half::bf16> =
        (0..1024).map(|n| half::bf16::from_f32((n as f32 - 511.5) * 1.25e-5)).collect();
    for (matrix, module, rows, cols) in MATRICES {
        let bytes = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let scale = Owned { dtype: safetensors::Dtype::BF16, shape: vec![rows, cols / GROUP], bytes };
        let packed = GOLDEN[&format!("{matrix}.int8.ct.weight_packed")].clone();
        extra.insert(format!("model.language_model.{module}.weight_packed"), packed);
        extra.insert(format!("model.language_model.{module}.weight_scale"), scale);
    }
    let mut json: Value =
        serde_json::from_slice(&fs::read(repository("models/tiny/config.json")).unwrap()).unwrap();
    json["quantization_config"] = config;
    let read = Checkpoint::embedded(vec![
        ("config.json", json.to_string().into_bytes().leak()),
        ("model.safetensors", *REST),
        ("extra.safetensors", safetensors_file(&extra).leak()),
    ])
    .unwrap();
    let matrix = read.matrix("layers.0.mlp.down_proj", 256, 512, Quantize::None).unwrap();
    let codes = codes("down.int8.codes");
    for at in 0..256 * 512 {
        let expected = f32::from(codes[at]) * scales[at / GROUP].to_f32();
        let found = matrix.data().value(at / 512, at % 512);
        let exact = scales[at / GROUP].to_f32().abs() >= 7.63e-6;
        assert!(found == expected || !exact && (found - expected).abs() < 4e-6, "{found} {expected}");
    }
}
