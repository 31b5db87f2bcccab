//! Devices that fail in the middle of a step, with some layers done and others not.
#![allow(clippy::unwrap_used, reason = "a test may fail this way")]

#[allow(dead_code, reason = "every test binary uses a part of it")]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use common::client::{Client, Outcome, assert_idle};
use common::{Setup, fast, subjects};
use qwill_contract::{EngineHandle, EngineState, FinishReason, Request};
use qwill_cpu::CpuDevice;
use qwill_device::sample::ScoreRow;
use qwill_device::{
    Activations, AttentionShape, Batch, CacheSpec, Device, DeviceError, DeviceFacts, GdnShape, GdnState,
    GdnWeights, Geometry, KvPage, MatrixData, Precision, SampleRow, Sampled, WeightFormat,
};
use qwill_engine::EngineError;

/// Ops until the failure; nothing fails while it is negative.
#[derive(Clone)]
struct Fuse {
    left: Arc<AtomicI64>,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    /// One op fails.
    Once,
    /// That op and all later ones fail.
    Forever,
    /// That op panics.
    Panic,
}

impl Fuse {
    fn new(kind: Kind) -> Self {
        Self { left: Arc::new(AtomicI64::new(-1)), kind }
    }

    fn light(&self, ops: i64) {
        self.left.store(ops, Ordering::SeqCst);
    }

    fn burn(&self, op: &'static str) -> Result<(), DeviceError> {
        let left = self.left.load(Ordering::SeqCst);
        if left < 0 {
            return Ok(());
        }
        if left > 0 {
            self.left.store(left - 1, Ordering::SeqCst);
            return Ok(());
        }
        match self.kind {
            Kind::Forever => {}
            Kind::Once => self.light(-1),
            Kind::Panic => panic!("{op} panics"),
        }
        Err(DeviceError::Failed { op, device: "faulty".into(), reason: "the fuse has blown".into() })
    }
}

/// The fast device behind a fuse.
struct Faulty {
    device: CpuDevice,
    fuse: Fuse,
}

type Buffer = <CpuDevice as Device>::Buffer;
type Matrix = <CpuDevice as Device>::Matrix;
type Vector = <CpuDevice as Device>::Vector;
type Cache = <CpuDevice as Device>::Cache;
type HostStore = <CpuDevice as Device>::HostStore;

macro_rules! behind_the_fuse {
    ($(fn $op:ident($($name:ident: $kind:ty),*) -> $result:ty;)*) => {
        $(fn $op(&mut self, $($name: $kind),*) -> Result<$result, DeviceError> {
            self.fuse.burn(stringify!($op))?;
            self.device.$op($($name),*)
        })*
    };
}

impl Device for Faulty {
    type Buffer = Buffer;
    type Matrix = Matrix;
    type Vector = Vector;
    type Cache = Cache;
    type HostStore = HostStore;

    fn facts(&self) -> DeviceFacts {
        self.device.facts()
    }
    fn matrix_bytes(&self, format: WeightFormat, rows: usize, cols: usize) -> u64 {
        self.device.matrix_bytes(format, rows, cols)
    }
    fn buffer_bytes(&self, rows: usize, cols: usize, precision: Precision) -> u64 {
        self.device.buffer_bytes(rows, cols, precision)
    }
    fn scratch_bytes(&self, geometry: &Geometry, max_rows: usize, max_logit_rows: usize) -> u64 {
        self.device.scratch_bytes(geometry, max_rows, max_logit_rows)
    }
    fn host_staging_bytes(&self, spec: &CacheSpec) -> u64 {
        self.device.host_staging_bytes(spec)
    }
    fn read_granule<'a>(&mut self, store: &'a HostStore, granule: u32) -> Result<&'a [u8], DeviceError> {
        self.fuse.burn("read_granule")?;
        self.device.read_granule(store, granule)
    }
    fn gdn_prepare(
        &mut self,
        batch: &Batch,
        gdn_layer: usize,
        shape: &GdnShape,
        weights: &GdnWeights<Self>,
        projected: &Buffer,
        cache: &mut Cache,
        mixed: &mut Buffer,
    ) -> Result<(), DeviceError> {
        self.fuse.burn("gdn_prepare")?;
        let weights = GdnWeights {
            conv: weights.conv.clone(),
            decay_rate: weights.decay_rate.clone(),
            dt_bias: weights.dt_bias.clone(),
            norm: weights.norm.clone(),
        };
        self.device.gdn_prepare(batch, gdn_layer, shape, &weights, projected, cache, mixed)
    }
    behind_the_fuse! {
        fn empty_matrix(format: WeightFormat, rows: usize, cols: usize) -> Matrix;
        fn fill_rows(matrix: &mut Matrix, first_row: usize, block: &MatrixData<'_>) -> ();
        fn vector(values: &[f32]) -> Vector;
        fn conv_taps(values: &[f32], taps: usize) -> Vector;
        fn reserve(geometry: &Geometry, max_rows: usize, max_logit_rows: usize) -> ();
        fn buffer(rows: usize, cols: usize, precision: Precision) -> Buffer;
        fn cache(spec: &CacheSpec) -> Cache;
        fn begin_step(batch: &Batch) -> ();
        fn embed(table: &Matrix, batch: &Batch, out: &mut Buffer) -> ();
        fn rms_norm(rows: usize, x: &Buffer, weight: &Vector, eps: f32, out: &mut Buffer) -> ();
        fn norm_linears(
            rows: usize, x: &Buffer, norm: &Vector, eps: f32, parts: &[&Matrix], out: &mut Buffer
        ) -> ();
        fn linear(rows: usize, input: &Buffer, matrix: &Matrix, out: &mut Buffer) -> ();
        fn linear_add(rows: usize, input: &Buffer, matrix: &Matrix, x: &mut Buffer) -> ();
        fn swiglu(rows: usize, width: usize, gate_up: &Buffer, out: &mut Buffer) -> ();
        fn attention_prepare(
            batch: &Batch, kv_layer: usize, shape: &AttentionShape, projected: &Buffer, q_norm: &Vector,
            k_norm: &Vector, cache: &mut Cache, query: &mut Buffer
        ) -> ();
        fn attention(
            batch: &Batch, kv_layer: usize, shape: &AttentionShape, query: &Buffer, projected: &Buffer,
            cache: &Cache, out: &mut Buffer
        ) -> ();
        fn gdn_scan(
            batch: &Batch, gdn_layer: usize, shape: &GdnShape, mixed: &Buffer, cache: &mut Cache, out: &mut Buffer
        ) -> ();
        fn gated_norm(
            rows: usize, shape: &GdnShape, scanned: &Buffer, projected: &Buffer, norm: &Vector, out: &mut Buffer
        ) -> ();
        fn mtp_combine(
            batch: &Batch, table: &Matrix, hidden: &Buffer, embed_norm: &Vector, hidden_norm: &Vector, eps: f32,
            out: &mut Buffer
        ) -> ();
        fn head(rows: &[usize], hidden: &Buffer, matrix: &Matrix, logits: &mut Buffer) -> ();
        fn sample(logits: &Buffer, rows: &[SampleRow<'_>]) -> Vec<Sampled>;
        fn score(logits: &Buffer, rows: &[ScoreRow]) -> Vec<Sampled>;
        fn clear_slot(cache: &mut Cache, slot: usize) -> ();
        fn copy_slot(cache: &mut Cache, from: usize, to: usize) -> ();
        fn copy_page(cache: &mut Cache, from: usize, to: usize) -> ();
        fn read_state(cache: &Cache, gdn_layer: usize, slot: usize) -> GdnState;
        fn write_state(cache: &mut Cache, gdn_layer: usize, slot: usize, state: &GdnState) -> ();
        fn read_page(cache: &Cache, kv_layer: usize, page: usize) -> KvPage;
        fn write_page(cache: &mut Cache, kv_layer: usize, page: usize, content: &KvPage) -> ();
        fn host_store(spec: &CacheSpec, granules: usize) -> HostStore;
        fn store_page(cache: &Cache, page: usize, store: &mut HostStore, granule: u32) -> ();
        fn load_page(cache: &mut Cache, page: usize, store: &HostStore, granule: u32) -> ();
        fn store_state(
            cache: &Cache, slot: usize, position: usize, store: &mut HostStore, granules: &[u32]
        ) -> ();
        fn load_state(
            cache: &mut Cache, slot: usize, position: usize, store: &HostStore, granules: &[u32]
        ) -> ();
        fn stored(store: &HostStore) -> bool;
        fn write_granule(store: &mut HostStore, granule: u32, bytes: &[u8]) -> ();
        fn read(buffer: &Buffer, rows: usize) -> Vec<f32>;
        fn write(buffer: &mut Buffer, values: &[f32]) -> ();
        fn gather(rows: &[usize], from: &Buffer, to: &mut Buffer) -> ();
    }
}

fn start(fuse: &Fuse) -> (EngineHandle, qwill_engine::EngineThread) {
    let fuse = fuse.clone();
    Setup { slice: 128, ..Setup::int4() }.start(move || Ok(Faulty { device: fast(Activations::Int8)?, fuse }))
}

fn submit_all(handle: &EngineHandle, requests: &[Request]) -> Vec<Client> {
    requests.iter().map(|request| Client::submit(handle, request.clone()).unwrap()).collect()
}

#[test]
fn a_failed_op_ends_the_requests_of_its_step_and_no_other() {
    let fuse = Fuse::new(Kind::Once);
    let (handle, thread) = start(&fuse);
    let requests = subjects(3);
    let wait_all = |clients: Vec<Client>| -> Vec<Outcome> { clients.into_iter().map(Client::wait).collect() };
    let whole = wait_all(submit_all(&handle, &requests));
    let (mut hit, mut spared) = (0, 0);
    // About a hundred ops a step: the failures fall into first and later slices, rounds and draws.
    for ops in [0, 1, 40, 101, 217, 333, 512, 777, 1500, 2900] {
        fuse.light(ops);
        for (outcome, whole) in wait_all(submit_all(&handle, &requests)).iter().zip(&whole) {
            if outcome.failed() {
                hit += 1;
            } else {
                spared += 1;
                assert!(outcome.same_answer(whole), "after {ops} ops:\n{outcome:?}\nwhole:\n{whole:?}");
            }
        }
        assert_eq!(handle.load().state(), EngineState::Ready);
        assert_idle(handle.load());
    }
    assert!(hit >= 10 && spared >= 10, "{hit} hit, {spared} spared");
    fuse.light(-1);
    let again = wait_all(submit_all(&handle, &requests));
    assert!(again.iter().zip(&whole).all(|(again, whole)| again.same_answer(whole)));
    thread.stop().unwrap();
}

fn ends_in_failure(kind: Kind, words: &str) {
    let fuse = Fuse::new(kind);
    let (handle, thread) = start(&fuse);
    let clients = submit_all(&handle, &subjects(3));
    fuse.light(300);
    for client in clients {
        for choice in client.wait().choices {
            let Some(FinishReason::Error { message }) = choice.end else { continue };
            assert!(message.contains(words), "{message}");
        }
    }
    assert!(matches!(thread.join(), Err(EngineError::Failed(message)) if message.contains(words)));
    assert!(matches!(handle.load().state(), EngineState::Failed(_)));
    assert_idle(handle.load());
}

#[test]
fn a_device_that_is_lost_fails_the_engine() {
    ends_in_failure(Kind::Forever, "the fuse has blown");
}

#[test]
fn a_panic_in_a_device_fails_the_engine() {
    ends_in_failure(Kind::Panic, "panics");
}
