//! Offsets beyond 2^31: matrices, logits, pages and states larger than a 32-bit index reaches. The far end must have
//! what the near end has. Needs a GPU with tens of GB free, and a host with 16 GB;
//! says so and passes where there is no such GPU.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::device;
use qwill_cpu::ReferenceDevice;
use qwill_cuda::{CudaDevice, CudaOptions};
use qwill_device::batch::{PAGE_TOKENS, Phase, Span};
use qwill_device::matrix::{GROUP, MatrixElements};
use qwill_device::numeric::{bf16_to_f32, f32_to_bf16};
use qwill_device::{
    Activations, Batch, CacheSpec, Chunk, Device, GdnState, GdnWeights, Geometry, KvPage, KvType, MatrixData,
    Precision, SampleRow, StateType,
};

/// What a signed 32-bit index reaches.
const REACH: u64 = 1 << 31;

/// A device with so many bytes free; `None`, with the reason printed, where there is none.
fn large_device(needed_bytes: u64) -> Option<CudaDevice> {
    let device = device(&CudaOptions::from_environment())?;
    let free_bytes = device.facts().memory_bytes;
    if free_bytes < needed_bytes {
        println!("skipped: {needed_bytes} bytes are needed, {free_bytes} are free");
        return None;
    }
    Some(device)
}

/// Numbers that look random and depend on the index alone.
fn mix(index: u64) -> u64 {
    let mut x = index.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x ^= x >> 32;
    x = x.wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 32)
}

/// In −1..1, a bfloat16 value.
fn value(index: u64) -> f32 {
    bf16_to_f32(f32_to_bf16((mix(index) >> 40) as f32 / (1 << 23) as f32 - 1.0))
}

fn values(len: usize, seed: u64) -> Vec<f32> {
    (0..len as u64).map(|index| value(index + (seed << 40))).collect()
}

/// Rows of the batch, one after another, of one sequence.
fn rows_batch(tokens: Vec<u32>, position: usize, slot: usize, page_table: Vec<u32>) -> Batch {
    let span = Span { first_row: 0, rows: tokens.len(), position, slot, ring_len: 0, first_page: 0 };
    Batch { phase: Phase::Rows, tokens, spans: vec![span], page_table, chunks: Vec::new() }
}

const OUTPUTS: usize = 1 << 21;
const INPUTS: usize = 17 * GROUP;
const LOGIT_ROWS: usize = 1025;

/// An int4 matrix of more than 2^31 bytes and 2^32 elements.
struct LargeMatrix {
    packed: Vec<u8>,
    scales: Vec<u16>,
}

impl LargeMatrix {
    fn new() -> Self {
        let words = OUTPUTS as u64 * INPUTS as u64 / 16;
        let packed: Vec<u8> = (0..words).flat_map(|word| mix(word).to_le_bytes()).collect();
        // 1/64 and 1/32 as f16.
        let scales = (0..OUTPUTS * INPUTS / GROUP).map(|group| 0x2400 + 0x400 * (group as u16 % 2)).collect();
        Self { packed, scales }
    }

    fn data(&self) -> MatrixData<'_> {
        let elements = MatrixElements::Int4 { packed: &self.packed, scales: &self.scales };
        MatrixData { rows: OUTPUTS, cols: INPUTS, elements }
    }
}

/// Rows of a matrix at its ends and where an offset passes 2^31, by elements, bytes and half bytes.
fn telling_outputs() -> Vec<usize> {
    let passes = [REACH / 4, REACH / 2, REACH, 2 * REACH].map(|at| (at / INPUTS as u64) as usize);
    let near = passes.iter().flat_map(|row| row - 2..row + 2);
    (0..4).chain(near).chain(OUTPUTS - 20..OUTPUTS).collect()
}

#[test]
fn a_matrix_and_its_logits_reach_beyond_32_bits() {
    let logit_bytes = OUTPUTS as u64 * LOGIT_ROWS as u64 * 4;
    let Some(mut device) = large_device(logit_bytes + (4 << 30)) else { return };
    assert!(OUTPUTS as u64 * (LOGIT_ROWS as u64 - 1) >= REACH);
    let large = LargeMatrix::new();
    assert!(large.packed.len() as u64 > REACH);
    let matrix = device.matrix(&large.data()).unwrap();

    // The far rows of a table.
    let tokens: Vec<u32> = telling_outputs().iter().map(|row| *row as u32).collect();
    let chunk = Chunk { span: 0, first_row: 0, rows: tokens.len() };
    let batch =
        Batch { phase: Phase::Prefill, chunks: vec![chunk], ..rows_batch(tokens.clone(), 0, 0, vec![0]) };
    let mut embedded = device.buffer(tokens.len(), INPUTS, Precision::Activation).unwrap();
    device.begin_step(&batch).unwrap();
    device.embed(&matrix, &batch, &mut embedded).unwrap();
    let found = device.read(&embedded, tokens.len()).unwrap();
    for (row, output) in telling_outputs().into_iter().enumerate() {
        for col in 0..INPUTS {
            let expected = bf16_to_f32(f32_to_bf16(large.data().value(output, col)));
            assert_eq!(found[row * INPUTS + col], expected, "embedding of {output}, column {col}");
        }
    }

    // The far outputs of a product, in the far rows of its result.
    let inputs = values(LOGIT_ROWS * INPUTS, 1);
    let mut hidden = device.buffer(LOGIT_ROWS, INPUTS, Precision::Activation).unwrap();
    device.write(&mut hidden, &inputs).unwrap();
    let mut logits = device.buffer(LOGIT_ROWS, OUTPUTS, Precision::Full).unwrap();
    let rows: Vec<usize> = (0..LOGIT_ROWS).collect();
    device.head(&rows, &hidden, &matrix, &mut logits).unwrap();
    let all = device.read(&logits, LOGIT_ROWS).unwrap();
    let mut one = device.buffer(1, OUTPUTS, Precision::Full).unwrap();
    for row in [0, LOGIT_ROWS / 2, LOGIT_ROWS - 1] {
        let found = &all[row * OUTPUTS..][..OUTPUTS];
        for output in telling_outputs() {
            let input = &inputs[row * INPUTS..][..INPUTS];
            let products =
                (0..INPUTS).map(|col| f64::from(large.data().value(output, col)) * f64::from(input[col]));
            let (sum, size) =
                products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()));
            let difference = (f64::from(found[output]) - sum).abs();
            assert!(difference <= 1e-4 * size, "logit [{row}, {output}]: {}, expected {sum}", found[output]);
        }
        // Few rows at once take other kernels.
        device.head(&[row], &hidden, &matrix, &mut one).unwrap();
        let alone = device.read(&one, 1).unwrap();
        let worst = alone.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-3, "row {row} alone differs by {worst}");
        let best = (0..OUTPUTS).max_by(|a, b| found[*a].total_cmp(&found[*b]).then(b.cmp(a))).unwrap();
        let drawn = device.sample(&logits, &[SampleRow::greedy(row, OUTPUTS)]).unwrap();
        assert_eq!(drawn[0].token as usize, best, "row {row}");
    }
}

/// Runs one attention layer for some rows; returns its output and the pages that it wrote.
fn attend<D: Device>(
    device: &mut D,
    spec: &CacheSpec,
    kv_layer: usize,
    pages: &[u32],
) -> (Vec<f32>, Vec<f32>) {
    const ROWS: usize = 8;
    let shape = &spec.attention;
    let mut cache = device.cache(spec).unwrap();
    let columns = PAGE_TOKENS * shape.kv_columns();
    for (at, page) in pages.iter().enumerate() {
        let content =
            KvPage { keys: values(columns, 10 + at as u64), values: values(columns, 20 + at as u64) };
        device.write_page(&mut cache, kv_layer, *page as usize, &content).unwrap();
    }
    // The rows begin on the second page and end on the third.
    let batch = rows_batch(vec![0; ROWS], 2 * PAGE_TOKENS - 3, 0, pages.to_vec());
    let (q_norm, k_norm) = (values(shape.head_dim, 2), values(shape.head_dim, 3));
    let (q_norm, k_norm) = (device.vector(&q_norm).unwrap(), device.vector(&k_norm).unwrap());
    let mut projected = device.buffer(ROWS, shape.projected(), Precision::Activation).unwrap();
    device.write(&mut projected, &values(ROWS * shape.projected(), 4)).unwrap();
    let mut query = device.buffer(ROWS, shape.query_columns(), Precision::Activation).unwrap();
    let mut out = device.buffer(ROWS, shape.query_columns(), Precision::Activation).unwrap();
    device.begin_step(&batch).unwrap();
    device
        .attention_prepare(&batch, kv_layer, shape, &projected, &q_norm, &k_norm, &mut cache, &mut query)
        .unwrap();
    device.attention(&batch, kv_layer, shape, &query, &projected, &cache, &mut out).unwrap();
    let stored = pages.iter().flat_map(|page| {
        let page = device.read_page(&cache, kv_layer, *page as usize).unwrap();
        [page.keys, page.values].concat()
    });
    let stored = stored.collect();
    (device.read(&out, ROWS).unwrap(), stored)
}

#[test]
fn pages_reach_beyond_32_bits() {
    let geometry = Geometry::named("27b").unwrap();
    let near = CacheSpec {
        kv_layers: 1,
        attention: geometry.attention,
        kv_type: KvType::Bf16,
        pages: 3,
        gdn_layers: 0,
        gdn: geometry.gdn,
        state_type: StateType::F32,
        slots: 0,
    };
    let page_elements = (PAGE_TOKENS * geometry.attention.kv_columns()) as u64;
    let pages = (REACH / 2 / page_elements) as usize + 100;
    let far = CacheSpec { kv_layers: 2, pages, ..near };
    assert!(page_elements * 2 * pages as u64 > REACH);
    let Some(mut device) = large_device(far.bytes() + (1 << 30)) else { return };
    let last = pages as u32 - 1;
    let (out, stored) = attend(&mut device, &near, 0, &[2, 0, 1]);
    let (far_out, far_stored) = attend(&mut device, &far, 1, &[last, 0, last - 1]);
    assert!(out == far_out, "attention over far pages differs");
    assert!(stored == far_stored, "far pages differ");
    let (expected, _) = attend(&mut ReferenceDevice::new(Activations::Bf16), &near, 0, &[2, 0, 1]);
    for (at, (found, expected)) in out.iter().zip(&expected).enumerate() {
        assert!((found - expected).abs() <= 0.02, "[{at}]: {found}, expected {expected}");
    }
}

/// Runs one GDN layer for some rows; returns its output and the state that it left.
fn scan<D: Device>(device: &mut D, spec: &CacheSpec, gdn_layer: usize, slot: usize) -> (Vec<f32>, GdnState) {
    const ROWS: usize = 8;
    let shape = &spec.gdn;
    let mut cache = device.cache(spec).unwrap();
    let mut state = device.read_state(&cache, gdn_layer, slot).unwrap();
    state.base = values(state.base.len(), 5);
    device.write_state(&mut cache, gdn_layer, slot, &state).unwrap();
    let taps: Vec<f32> = values(shape.conv_channels() * shape.conv_width, 6);
    let weights = GdnWeights {
        conv: device.conv_taps(&taps, shape.conv_width).unwrap(),
        decay_rate: device.vector(&vec![-0.5; shape.value_heads]).unwrap(),
        dt_bias: device.vector(&values(shape.value_heads, 7)).unwrap(),
        norm: device.vector(&values(shape.value_dim, 8)).unwrap(),
    };
    let batch = rows_batch(vec![0; ROWS], 0, slot, vec![0]);
    let mut projected = device.buffer(ROWS, shape.projected(), Precision::Activation).unwrap();
    device.write(&mut projected, &values(ROWS * shape.projected(), 9)).unwrap();
    let mut mixed = device.buffer(ROWS, shape.mixed(), Precision::Full).unwrap();
    let mut out = device.buffer(ROWS, shape.value_columns(), Precision::Activation).unwrap();
    device.begin_step(&batch).unwrap();
    device.gdn_prepare(&batch, gdn_layer, shape, &weights, &projected, &mut cache, &mut mixed).unwrap();
    device.gdn_scan(&batch, gdn_layer, shape, &mixed, &mut cache, &mut out).unwrap();
    let mut state = device.read_state(&cache, gdn_layer, slot).unwrap();
    // Later entries were never written.
    state.ring.truncate(ROWS * shape.ring_entry());
    state.conv.truncate(ROWS * shape.conv_channels());
    (device.read(&out, ROWS).unwrap(), state)
}

#[test]
fn states_reach_beyond_32_bits() {
    let geometry = Geometry::named("27b").unwrap();
    let near = CacheSpec {
        kv_layers: 0,
        attention: geometry.attention,
        kv_type: KvType::Bf16,
        pages: 0,
        gdn_layers: 1,
        gdn: geometry.gdn,
        state_type: StateType::F32,
        slots: 1,
    };
    let far = CacheSpec { gdn_layers: geometry.gdn_layers(), slots: 60, ..near };
    assert!((far.gdn.state_elements() * far.gdn_layers * far.slots) as u64 > REACH);
    let Some(mut device) = large_device(far.bytes() + (1 << 30)) else { return };
    let (out, state) = scan(&mut device, &near, 0, 0);
    let (far_out, far_state) = scan(&mut device, &far, far.gdn_layers - 1, far.slots - 1);
    assert!(out == far_out, "the scan over a far state differs");
    assert!(state == far_state, "the far state differs");
    let (expected, _) = scan(&mut ReferenceDevice::new(Activations::Bf16), &near, 0, 0);
    let largest = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    for (at, (found, expected)) in out.iter().zip(&expected).enumerate() {
        assert!((found - expected).abs() <= 0.02 * largest, "[{at}]: {found}, expected {expected}");
    }
}
