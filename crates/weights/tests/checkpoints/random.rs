//! Random weights: complete, of the right shape and distribution, a function of seed and name.

use qwill_device::{Geometry, WeightFormat};
use qwill_weights::{Checkpoint, Quantize};

use crate::tiny::{matrices, vectors};

fn moments(values: impl Iterator<Item = f32>) -> (f64, f64) {
    let (mut n, mut sum, mut squares) = (0.0, 0.0, 0.0);
    for value in values {
        n += 1.0;
        sum += f64::from(value);
        squares += f64::from(value) * f64::from(value);
    }
    (sum / n, (squares / n - (sum / n) * (sum / n)).sqrt())
}

fn matrix_moments(checkpoint: &Checkpoint, name: &str, rows: usize, cols: usize) -> (f64, f64) {
    let matrix = checkpoint.matrix(name, rows, cols, Quantize::None).unwrap();
    let data = matrix.data();
    moments((0..rows.min(512) * cols).map(|at| data.value(at / cols, at % cols)))
}

#[test]
fn every_tensor_is_there_in_its_format() {
    for name in ["tiny", "0.8b"] {
        let geometry = Geometry::named(name).unwrap();
        let checkpoint = Checkpoint::random(&geometry, 1, Quantize::Int4);
        assert_eq!(checkpoint.config().geometry, geometry);
        let (mut names, mut bytes) = (Vec::new(), 0);
        for (name, rows, cols) in matrices(&geometry) {
            let module = name.rsplit('.').next().unwrap();
            let format = match module {
                "in_proj_a" | "in_proj_b" => WeightFormat::Bf16,
                "embed_tokens" | "lm_head" => WeightFormat::Int8,
                _ => WeightFormat::Int4,
            };
            let matrix = checkpoint.matrix(&name, rows, cols, Quantize::Int8).unwrap();
            assert_eq!(matrix.data().check(), Ok(()), "{name}");
            let planned = checkpoint.planned_format(&name, Quantize::Int4);
            assert_eq!((checkpoint.format_of(&name), planned), (Some(format), Some(format)), "{name}");
            // Codes stay; what is dense follows the policy, which leaves these two dense.
            assert_eq!(matrix.format(), format, "{name}");
            bytes += format.matrix_bytes(rows, cols);
            names.push(name + ".weight");
        }
        for (name, len) in vectors(&geometry) {
            assert_eq!(checkpoint.vector(&name, len).unwrap().len(), len);
            bytes += len as u64 * 4;
            names.push(name);
        }
        names.sort_unstable();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), names);
        assert_eq!(checkpoint.total_bytes(), bytes);
        assert!(checkpoint.file("tokenizer.json").unwrap().is_none());
    }
}

#[test]
fn linears_are_normal_and_keep_activations_near_unit_size() {
    let geometry = Geometry::named("0.8b").unwrap();
    for format in [Quantize::None, Quantize::Int8, Quantize::Int4] {
        let checkpoint = Checkpoint::random(&geometry, 7, format);
        for (name, rows, cols, expected) in [
            ("layers.0.mlp.up_proj", 3584, 1024, 1.0 / 32.0),
            ("layers.3.self_attn.q_proj", 4096, 1024, 1.0 / 32.0),
            ("layers.0.mlp.down_proj", 1024, 3584, 1.0 / (3584f64 * 48.0).sqrt()),
            ("layers.0.linear_attn.in_proj_a", 16, 1024, 1.0 / 32.0),
        ] {
            let (mean, deviation) = matrix_moments(&checkpoint, name, rows, cols);
            assert!((deviation / expected - 1.0).abs() < 0.06, "{name} {format:?}: {deviation}");
            // Half of the scales are negative, so a skewed code distribution would not show in the mean alone.
            assert!(mean.abs() < expected * 0.03, "{name} {format:?}: {mean}");
        }
    }
}

#[test]
fn about_half_of_the_scales_are_negative() {
    use qwill_device::matrix::MatrixElements;
    let geometry = Geometry::named("tiny").unwrap();
    let checkpoint = Checkpoint::random(&geometry, 3, Quantize::Int4);
    let matrix = checkpoint.matrix("layers.0.mlp.gate_proj", 512, 256, Quantize::None).unwrap();
    let MatrixElements::Int4 { packed, scales } = matrix.data().elements else { panic!("not int4") };
    let negative = scales.iter().filter(|&&bits| bits >> 15 == 1).count();
    assert!((400..624).contains(&negative), "{negative} of {}", scales.len());
    let mut seen = [0usize; 16];
    for byte in packed {
        seen[usize::from(byte & 15)] += 1;
        seen[usize::from(byte >> 4)] += 1;
    }
    assert!(seen[8] > seen[4] && seen[4] > seen[1], "bell-shaped codes: {seen:?}");
}

#[test]
fn vectors_have_their_distributions() {
    let geometry = Geometry::named("27b").unwrap();
    let checkpoint = Checkpoint::random(&geometry, 5, Quantize::Int4);
    let (mut rates, mut steps) = (Vec::new(), Vec::new());
    for layer in 0..64 {
        if geometry.layers[layer] == qwill_device::LayerKind::Gdn {
            rates.extend(checkpoint.vector(&format!("layers.{layer}.linear_attn.A_log"), 48).unwrap());
            steps.extend(checkpoint.vector(&format!("layers.{layer}.linear_attn.dt_bias"), 48).unwrap());
        }
    }
    assert!(rates.iter().all(|a| (0.0..=16f32.ln()).contains(a)));
    let (mean, _) = moments(rates.iter().map(|a| a.exp()));
    assert!((mean - 8.5).abs() < 0.5, "{mean}");
    let softplus: Vec<f32> = steps.iter().map(|b| b.exp().ln_1p()).collect();
    assert!(softplus.iter().all(|dt| (0.00099..0.101).contains(dt)));
    let (mean, _) = moments(softplus.iter().map(|dt| dt.log10()));
    assert!((mean + 2.0).abs() < 0.1, "{mean}");
    let conv = checkpoint.vector("layers.0.linear_attn.conv1d.weight", 10240 * 4).unwrap();
    assert!(conv.iter().all(|w| (-0.5..0.5).contains(w)));
    let (mean, deviation) = moments(conv.into_iter());
    assert!(mean.abs() < 0.01 && (deviation - 12f64.sqrt().recip()).abs() < 0.01);
    let (mean, deviation) = moments(checkpoint.vector("norm.weight", 5120).unwrap().into_iter());
    assert!(mean.abs() < 0.01 && (deviation - 0.05).abs() < 0.005);
    let (mean, _) = moments(checkpoint.vector("layers.0.linear_attn.norm.weight", 128).unwrap().into_iter());
    assert!((mean - 1.0).abs() < 0.03);
}

#[test]
fn seed_and_name_decide_everything() {
    let geometry = Geometry::named("tiny").unwrap();
    let [a, b, c] = [1, 1, 2].map(|seed| Checkpoint::random(&geometry, seed, Quantize::Int4));
    let up = |checkpoint: &Checkpoint| {
        let matrix = checkpoint.matrix("layers.0.mlp.up_proj", 512, 256, Quantize::None).unwrap();
        let data = matrix.data();
        (0..512 * 256).map(|at| data.value(at / 256, at % 256)).collect::<Vec<_>>()
    };
    assert_eq!(up(&a), up(&b));
    assert_ne!(up(&a), up(&c));
    let gate = a.matrix("layers.0.mlp.gate_proj", 512, 256, Quantize::None).unwrap();
    let up = a.matrix("layers.0.mlp.up_proj", 512, 256, Quantize::None).unwrap();
    assert_ne!(gate, up);
}

#[test]
fn rounding_applies_to_random_bf16_as_to_a_checkpoint() {
    let geometry = Geometry::named("tiny").unwrap();
    let checkpoint = Checkpoint::random(&geometry, 1, Quantize::None);
    let dense = checkpoint.matrix("layers.0.mlp.up_proj", 512, 256, Quantize::None).unwrap();
    let rounded = checkpoint.matrix("layers.0.mlp.up_proj", 512, 256, Quantize::Int8).unwrap();
    assert_eq!((dense.format(), rounded.format()), (WeightFormat::Bf16, WeightFormat::Int8));
    for at in 0..512 * 256 {
        let (row, col) = (at / 256, at % 256);
        assert!((dense.data().value(row, col) - rounded.data().value(row, col)).abs() < 0.001);
    }
}

#[test]
fn a_wrong_name_or_shape_is_an_error() {
    let checkpoint = Checkpoint::random(&Geometry::named("tiny").unwrap(), 1, Quantize::Int4);
    let error = checkpoint.matrix("layers.9.mlp.up_proj", 512, 256, Quantize::None).unwrap_err();
    assert!(error.to_string().contains("layers.9.mlp.up_proj"));
    let error = checkpoint.matrix("layers.0.mlp.up_proj", 256, 512, Quantize::None).unwrap_err();
    assert!(error.to_string().contains("found [512, 256], expected [256, 512]"), "{error}");
    assert!(checkpoint.vector("norm.weight", 1).is_err());
    assert_eq!(checkpoint.format_of("nothing"), None);
    assert!(!checkpoint.has("nothing") && checkpoint.has("norm.weight") && checkpoint.has("mtp.fc"));
}
