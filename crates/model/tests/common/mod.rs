//! What the golden tests share: reading reference files, and driving one sequence through a model.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::HashMap;
use std::path::PathBuf;

use qwill_cpu::{CpuDevice, ReferenceDevice};
use qwill_cuda::{CudaDevice, CudaOptions};
use qwill_device::batch::PAGE_TOKENS;
use qwill_device::{Activations, Batch, Chunk, Device, KvType, Phase, RING_TOKENS, Span, StateType};
use qwill_model::{Model, ModelOptions, MtpHidden};
use qwill_weights::{Checkpoint, Quantize};

pub(crate) const MAX_ROWS: usize = 1024;
pub(crate) const HOST_GRANULES: usize = 256;

/// A file of the repository; `QWILL_REPOSITORY` says where that is on a machine other than the one that built this.
pub(crate) fn repository(path: &str) -> PathBuf {
    let built_in = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("QWILL_REPOSITORY").map_or_else(built_in, PathBuf::from).join(path)
}

pub(crate) fn json(path: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(repository(path)).unwrap()).unwrap()
}

pub(crate) fn reference(activations: Activations) -> ReferenceDevice {
    ReferenceDevice::new(activations)
}

pub(crate) fn fast(activations: Activations) -> CpuDevice {
    CpuDevice::new(qwill_cpu::fast::CpuOptions { threads: 2, activations, isa: None }).unwrap()
}

/// The first GPU; `None`, with the reason printed, where there is none and `QWILL_REQUIRE_GPU` is not set.
pub(crate) fn gpu() -> Option<CudaDevice> {
    let options = CudaOptions::from_environment();
    match CudaDevice::new(&options) {
        Ok(device) => Some(device),
        Err(error) if std::env::var_os("QWILL_REQUIRE_GPU").is_some() => panic!("{error}"),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

pub(crate) fn tiny<D: Device>(device: D, quantize: Quantize, kv_type: KvType) -> Model<D> {
    tiny_with_states(device, quantize, kv_type, StateType::F32)
}

pub(crate) fn tiny_with_states<D: Device>(
    device: D,
    quantize: Quantize,
    kv_type: KvType,
    state_type: StateType,
) -> Model<D> {
    let checkpoint = Checkpoint::open(&repository("models/tiny")).unwrap();
    let options = ModelOptions {
        quantize,
        kv_type,
        state_type,
        pages: 40,
        slots: 2,
        host_granules: HOST_GRANULES,
        max_rows: MAX_ROWS,
        max_logit_rows: MAX_ROWS,
    };
    Model::load(device, &checkpoint, &options, &mut |_| {}).unwrap()
}

/// A safetensors file of reference data.
pub(crate) struct Golden {
    floats: HashMap<String, Vec<f32>>,
    ints: HashMap<String, Vec<u32>>,
}

impl Golden {
    pub(crate) fn open(path: &str) -> Self {
        let bytes = std::fs::read(repository(path)).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let (mut floats, mut ints) = (HashMap::new(), HashMap::new());
        for (name, view) in file.tensors() {
            let words = view.data().chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
            match view.dtype() {
                safetensors::Dtype::F32 => {
                    floats.insert(name, words.map(f32::from_bits).collect());
                }
                safetensors::Dtype::I32 => {
                    ints.insert(name, words.collect());
                }
                other => panic!("{name} is {other:?}"),
            }
        }
        Self { floats, ints }
    }
    pub(crate) fn floats(&self, name: &str) -> &[f32] {
        self.floats.get(name).unwrap_or_else(|| panic!("no {name}"))
    }
    pub(crate) fn ints(&self, name: &str) -> &[u32] {
        self.ints.get(name).unwrap_or_else(|| panic!("no {name}"))
    }
    pub(crate) fn has(&self, name: &str) -> bool {
        self.floats.contains_key(name)
    }
}

/// One sequence in slot 1, on pages in a scrambled order.
pub(crate) struct Sequence {
    pub(crate) position: usize,
    pub(crate) ring_len: usize,
    pub(crate) pages: Vec<u32>,
}

impl Default for Sequence {
    fn default() -> Self {
        // 7 is coprime to 40: every page once, none in its natural place.
        Self { position: 0, ring_len: 0, pages: (0..40).map(|n| (n * 7 + 3) % 40).collect() }
    }
}

impl Sequence {
    pub(crate) fn page(&self, logical: usize) -> usize {
        self.pages[logical] as usize
    }

    fn batch(&self, phase: Phase, tokens: &[u32], position: usize) -> Batch {
        let rows = tokens.len();
        let span = Span { first_row: 0, rows, position, slot: 1, ring_len: self.ring_len, first_page: 0 };
        let chunks = match phase {
            Phase::Rows => Vec::new(),
            Phase::Prefill => (0..rows)
                .step_by(64)
                .map(|first_row| Chunk { span: 0, first_row, rows: 64.min(rows - first_row) })
                .collect(),
        };
        let page_table = self.pages[..(position + rows).div_ceil(PAGE_TOKENS)].to_vec();
        Batch { phase, tokens: tokens.to_vec(), spans: vec![span], page_table, chunks }
    }

    /// A prefill batch of the next tokens (starting at a multiple of 64).
    pub(crate) fn prefill_batch(&mut self, tokens: &[u32]) -> Batch {
        assert_eq!(self.position % 64, 0);
        let batch = self.batch(Phase::Prefill, tokens, self.position);
        self.position += tokens.len();
        batch
    }

    /// A round of the next tokens.
    pub(crate) fn round_batch(&self, tokens: &[u32]) -> Batch {
        self.batch(Phase::Rows, tokens, self.position)
    }

    /// Runs decode or verify rows without committing them; returns one row of logits per token.
    pub(crate) fn verify<D: Device>(&self, model: &mut Model<D>, tokens: &[u32]) -> Vec<Vec<f32>> {
        let batch = self.round_batch(tokens);
        let rows: Vec<usize> = (0..tokens.len()).collect();
        model.forward(&batch, &rows).unwrap();
        rows_of(&model.read_logits(tokens.len()).unwrap(), tokens.len())
    }

    /// Rows that fit before the ring must be folded.
    pub(crate) fn ring_room(&self) -> usize {
        if self.ring_len == RING_TOKENS { RING_TOKENS } else { RING_TOKENS - self.ring_len }
    }

    /// Keeps the first `rows` rows of the last verify.
    pub(crate) fn commit(&mut self, rows: usize) {
        self.position += rows;
        self.ring_len = if self.ring_len == RING_TOKENS { rows } else { self.ring_len + rows };
    }

    /// One plain decode step.
    pub(crate) fn decode<D: Device>(&mut self, model: &mut Model<D>, token: u32) -> Vec<f32> {
        let logits = self.verify(model, &[token]).remove(0);
        self.commit(1);
        logits
    }

    /// MTP rows at `position`: `tokens[i]` is the token after position + i.
    pub(crate) fn mtp<D: Device>(
        &self,
        model: &mut Model<D>,
        position: usize,
        tokens: &[u32],
        hidden: MtpHidden<'_>,
    ) -> Vec<Vec<f32>> {
        let batch = self.batch(Phase::Prefill, tokens, position);
        let rows: Vec<usize> = (0..tokens.len()).collect();
        model.mtp(&batch, hidden, &rows).unwrap();
        rows_of(&model.read_logits(tokens.len()).unwrap(), tokens.len())
    }
}

pub(crate) fn rows_of(values: &[f32], rows: usize) -> Vec<Vec<f32>> {
    values.chunks_exact(values.len() / rows).map(<[f32]>::to_vec).collect()
}

pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, value) in logits.iter().enumerate() {
        if *value > logits[best] {
            best = id;
        }
    }
    best as u32
}

/// log Σ exp, in f64.
pub(crate) fn logsumexp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    largest + logits.iter().map(|value| (f64::from(*value) - largest).exp()).sum::<f64>().ln()
}

pub(crate) fn worst_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    // NaN must not pass: max() would drop it.
    found
        .iter()
        .zip(expected)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { d.max(worst) })
}

#[track_caller]
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    let worst = worst_difference(found, expected);
    assert!(worst <= tolerance, "{what}: worst difference {worst:e}, tolerance {tolerance:e}");
}

/// Tolerance relative to the expected tensor's largest magnitude.
#[track_caller]
pub(crate) fn assert_close_relative(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    let largest = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    assert_close(what, found, expected, tolerance * largest);
}
