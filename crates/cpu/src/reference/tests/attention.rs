//! Attention against f64.

use qwill_device::suite::Random;
use qwill_device::{
    Activations, AttentionShape, Batch, CacheSpec, Chunk, Device, GdnShape, KvType, Phase, Precision, Span,
    StateType,
};

use super::distance;
use crate::ReferenceDevice;

const SHAPE: AttentionShape = AttentionShape {
    query_heads: 6,
    kv_heads: 2,
    head_dim: 32,
    rope_dims: 8,
    rope_theta: 1e7,
    norm_eps: 1e-6,
};

const NO_GDN: GdnShape =
    GdnShape { key_heads: 1, value_heads: 1, key_dim: 8, value_dim: 8, conv_width: 4, norm_eps: 1e-6 };

fn batch(position: usize, rows: usize, page_table: Vec<u32>) -> Batch {
    let chunks = (0..rows).step_by(64).map(|at| Chunk { span: 0, first_row: at, rows: 64.min(rows - at) });
    Batch {
        phase: Phase::Prefill,
        tokens: vec![0; rows],
        spans: vec![Span { first_row: 0, rows, position, slot: 0, ring_len: 0, first_page: 0 }],
        page_table,
        chunks: chunks.collect(),
    }
}

/// One row of the merged projection, in f64 and by name.
struct Row {
    queries: Vec<Vec<f64>>,
    gates: Vec<Vec<f64>>,
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

fn normed_and_turned(x: &[f64], weight: &[f32], position: usize) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let mut y: Vec<f64> =
        x.iter().zip(weight).map(|(v, w)| v / (mean + 1e-6).sqrt() * f64::from(*w)).collect();
    let half = SHAPE.rope_dims / 2;
    for i in 0..half {
        let angle = position as f64 * 1e7f64.powf(-2.0 * i as f64 / SHAPE.rope_dims as f64);
        let (a, b) = (y[i], y[i + half]);
        (y[i], y[i + half]) = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin());
    }
    y
}

fn parse(projected: &[f32], norms: (&[f32], &[f32]), position: usize) -> Row {
    let wide: Vec<f64> = projected.iter().copied().map(f64::from).collect();
    let dim = SHAPE.head_dim;
    let head = |at: usize| wide[at * dim..(at + 1) * dim].to_vec();
    let (q, kv) = (SHAPE.query_heads, SHAPE.kv_heads);
    Row {
        queries: (0..q).map(|j| normed_and_turned(&head(2 * j), norms.0, position)).collect(),
        gates: (0..q).map(|j| head(2 * j + 1)).collect(),
        keys: (0..kv).map(|j| normed_and_turned(&head(2 * q + j), norms.1, position)).collect(),
        values: (0..kv).map(|j| head(2 * q + kv + j)).collect(),
    }
}

fn expected_outputs(rows: &[Row]) -> Vec<f64> {
    let mut out = Vec::new();
    for (last, row) in rows.iter().enumerate() {
        for (head, (query, gate)) in row.queries.iter().zip(&row.gates).enumerate() {
            let kv = head / (SHAPE.query_heads / SHAPE.kv_heads);
            let score = |other: &Row| {
                let product: f64 = query.iter().zip(&other.keys[kv]).map(|(a, b)| a * b).sum();
                (product / (SHAPE.head_dim as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = rows[..=last].iter().map(score).collect();
            let total: f64 = weights.iter().sum();
            for (dim, gate) in gate.iter().enumerate() {
                let sum: f64 = weights.iter().zip(rows).map(|(w, other)| w * other.values[kv][dim]).sum();
                out.push(sum / total / (1.0 + (-gate).exp()));
            }
        }
    }
    out
}

#[test]
fn attention_over_several_steps_and_pages_agrees_with_f64() {
    let mut random = Random::new(1, "attention f64");
    let tokens = 200;
    let projected = random.normals(tokens * SHAPE.projected(), 1.5);
    let (q_norm, k_norm) = (random.normals(SHAPE.head_dim, 1.0), random.normals(SHAPE.head_dim, 1.0));
    let mut device = ReferenceDevice::new(Activations::F32);
    let spec = CacheSpec {
        kv_layers: 1,
        attention: SHAPE,
        kv_type: KvType::F32,
        pages: 5,
        gdn_layers: 0,
        gdn: NO_GDN,
        state_type: StateType::F32,
        slots: 1,
    };
    let mut cache = device.cache(&spec).unwrap();
    let mut found = Vec::new();
    let mut position = 0;
    for rows in [1, 62, 1, 1, 64, 71] {
        let batch = batch(position, rows, vec![3, 0, 4, 1]);
        batch.check().unwrap();
        let mut input = device.buffer(rows, SHAPE.projected(), Precision::Activation).unwrap();
        let (mut query, mut out) = (input.clone(), input.clone());
        device
            .write(&mut input, &projected[position * SHAPE.projected()..][..rows * SHAPE.projected()])
            .unwrap();
        device
            .attention_prepare(&batch, 0, &SHAPE, &input, &q_norm, &k_norm, &mut cache, &mut query)
            .unwrap();
        device.attention(&batch, 0, &SHAPE, &query, &input, &cache, &mut out).unwrap();
        for row in 0..rows {
            found.extend_from_slice(&out.row(row)[..SHAPE.query_columns()]);
        }
        position += rows;
    }
    assert_eq!(position, tokens);
    let parsed: Vec<Row> = projected
        .chunks(SHAPE.projected())
        .enumerate()
        .map(|(position, row)| parse(row, (&q_norm, &k_norm), position))
        .collect();
    let error = distance(&found, &expected_outputs(&parsed));
    assert!(error < 2e-6, "{error:e}");
}

/// At the last position of the native window the angles are exactly those of f32 products, as the contract says,
/// and a turn keeps lengths.
#[test]
fn rope_at_the_end_of_the_window() {
    let shape = AttentionShape { rope_dims: 64, head_dim: 256, ..SHAPE };
    let angles = crate::reference::attention::rope_angles(&shape, 262_143);
    assert_eq!(angles.len(), 32);
    for (i, (cosine, sine)) in angles.iter().enumerate() {
        let inverse = 1e7f64.powf(-2.0 * i as f64 / 64.0) as f32;
        let angle = f64::from(262_143f32 * inverse);
        assert!((f64::from(*cosine) - angle.cos()).abs() < 1e-7, "{i}");
        assert!((f64::from(*sine) - angle.sin()).abs() < 1e-7, "{i}");
        // f32 rounding of the product is all that separates it from the exact angle.
        let exact = 262_143.0 * 1e7f64.powf(-2.0 * i as f64 / 64.0);
        assert!((angle - exact).abs() <= exact * 1.2e-7, "{i}: {angle} {exact}");
    }
    let mut random = Random::new(2, "rope");
    let mut head = random.normals(256, 1.0);
    let before = head.clone();
    crate::reference::attention::rotate(&mut head, &angles);
    assert_eq!(head[64..], before[64..]);
    for i in 0..32 {
        let length = |x: &[f32]| x[i].hypot(x[i + 32]);
        assert!((length(&head) - length(&before)).abs() < 1e-5);
    }
}
