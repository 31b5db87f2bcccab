//! Work memory: sized once from the model's shapes, so that a step allocates no tensor.

use std::sync::{Mutex, PoisonError};

use qwill_device::{Activations, GROUP, Geometry};

use super::quantize::QuantisedRows;
use super::sample::Candidate;
use super::{CpuOptions, attention, gdn_prepare, gdn_scan, linear};
use crate::Buffer;

/// Elements of every kind of work memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sizes {
    threads: usize,
    /// f32 of the inputs of products: normed, gathered or embedded rows, each the residual stream's width.
    inputs: usize,
    /// Groups of int8 codes, for the widest input of any product.
    groups: usize,
    /// f32 of roped keys.
    keys: usize,
    /// f32 of one thread.
    values: usize,
    /// Candidates of one thread: all tokens, where nothing but a flat distribution is drawn from.
    candidates: usize,
}

impl Sizes {
    /// For steps of at most `max_rows` rows with logits of at most `max_logit_rows`.
    pub(super) fn new(
        options: CpuOptions,
        geometry: &Geometry,
        max_rows: usize,
        max_logit_rows: usize,
    ) -> Self {
        let rows = max_rows.max(max_logit_rows);
        let (attention, gdn) = (&geometry.attention, &geometry.gdn);
        let joined = if geometry.mtp_layers > 0 { 2 * geometry.hidden } else { geometry.hidden };
        let widest = [joined, geometry.intermediate, attention.query_columns(), gdn.value_columns()];
        let groups = widest.into_iter().max().unwrap_or(0).div_ceil(GROUP);
        let values = [
            linear::memory(rows),
            attention::memory(attention),
            gdn_prepare::memory(gdn),
            gdn_scan::memory(gdn),
            geometry.vocab,
        ];
        Self {
            threads: options.threads,
            inputs: rows * geometry.hidden,
            groups: if options.activations == Activations::Int8 { rows * groups } else { 0 },
            keys: max_rows * attention.kv_columns(),
            values: values.into_iter().max().unwrap_or(0),
            candidates: geometry.vocab,
        }
    }

    /// Bytes of all together.
    pub(super) fn bytes(&self) -> u64 {
        let shared = (self.inputs + self.keys) * size_of::<f32>() + self.groups * QuantisedRows::GROUP_BYTES;
        let each = self.values * size_of::<f32>() + self.candidates * size_of::<Candidate>();
        (shared + self.threads * each) as u64
    }
}

/// Work memory of all ops. What has not been reserved grows at first use: only tests and tools do without.
#[derive(Debug)]
pub(super) struct Scratch {
    /// Inputs of products before they are quantised; taken out while an op uses it.
    pub(super) inputs: Buffer,
    /// Inputs of products as int8 codes.
    pub(super) quantised: QuantisedRows,
    /// Roped keys on their way into the pages.
    pub(super) keys: Vec<f32>,
    /// What each thread has for itself.
    pub(super) workers: Workers,
}

impl Scratch {
    /// Nothing yet, for a pool of `threads`.
    pub(super) fn new(threads: usize) -> Self {
        Self {
            inputs: Buffer::default(),
            quantised: QuantisedRows::default(),
            keys: Vec::new(),
            workers: Workers((0..threads).map(|_| Mutex::default()).collect()),
        }
    }

    /// Makes everything large enough at once.
    pub(super) fn reserve(&mut self, sizes: &Sizes) {
        grow(&mut self.inputs.data, sizes.inputs);
        self.quantised.reserve(sizes.groups);
        grow(&mut self.keys, sizes.keys);
        for worker in &mut self.workers.0 {
            let worker = worker.get_mut().unwrap_or_else(PoisonError::into_inner);
            grow(&mut worker.values, sizes.values);
            worker.candidates.clear();
            worker.candidates.reserve_exact(sizes.candidates);
        }
    }

    /// Takes [`Scratch::inputs`] as rows of a width, with unspecified contents. It is to be put back.
    pub(super) fn take_inputs(&mut self, rows: usize, cols: usize) -> Buffer {
        let mut inputs = std::mem::take(&mut self.inputs);
        grow(&mut inputs.data, rows * cols);
        inputs.cols = cols;
        inputs
    }
}

/// Work memory of each thread.
#[derive(Debug)]
pub(super) struct Workers(Vec<Mutex<Worker>>);

#[derive(Debug, Default)]
struct Worker {
    values: Vec<f32>,
    candidates: Vec<Candidate>,
}

impl Workers {
    /// Calls `use_it` with `len` elements of unspecified contents that belong to `worker`.
    pub(super) fn with<R>(&self, worker: usize, len: usize, use_it: impl FnOnce(&mut [f32]) -> R) -> R {
        self.with_candidates(worker, len, |values, _| use_it(values))
    }

    /// Calls `use_it` with `len` elements and a list, of unspecified contents, that belong to `worker`.
    pub(super) fn with_candidates<R>(
        &self,
        worker: usize,
        len: usize,
        use_it: impl FnOnce(&mut [f32], &mut Vec<Candidate>) -> R,
    ) -> R {
        // Contents never matter, so neither does a panic that left them half written.
        let mut memory = self.0[worker].lock().unwrap_or_else(PoisonError::into_inner);
        let Worker { values, candidates } = &mut *memory;
        grow(values, len);
        use_it(&mut values[..len], candidates)
    }
}

/// Makes a vector at least `len` long, exactly so where it grows; its contents are lost then.
pub(super) fn grow<T: Default + Clone>(values: &mut Vec<T>, len: usize) {
    if values.len() < len {
        // The old one goes first: the two need not fit side by side.
        *values = Vec::new();
        *values = vec![T::default(); len];
    }
}
