//! The memory plan is exact: what loading allocates is what was planned, and steps allocate no more.
//!
//! One test in a binary of its own: the allocator counts the bytes of the whole process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(unsafe_code, reason = "an allocator that counts")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{fast, repository};
use qwill_cpu::CpuDevice;
use qwill_device::batch::PAGE_TOKENS;
use qwill_device::plan::{HostMemory, MemoryPlan, PlanInput, PlanOptions, PlanWeight, plan};
use qwill_device::sample::ScoreRow;
use qwill_device::{Activations, Batch, Chunk, Device, KvType, Phase, SampleRow, Span, StateType};
use qwill_model::{Model, ModelOptions, MtpHidden, plan_weights, workspace_bytes};
use qwill_weights::{Checkpoint, Quantize};

/// What loading keeps beside the plan: lists of layers, handles of matrices, a device's fields.
const LOAD_SLACK_BYTES: usize = 16 << 10;

/// What a step may hold for a moment: lists of pieces, positions and angles, and the tokens drawn, with their
/// alternatives. A tensor of all rows is larger.
const STEP_SLACK_BYTES: usize = 12 << 10;

/// What threads note about themselves while they start or print, at any time: the device's and the test's.
const NOISE_BYTES: usize = 512;

struct Counting;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);

fn count(bytes: usize) {
    let live = LIVE_BYTES.fetch_add(bytes, Ordering::SeqCst) + bytes;
    PEAK_BYTES.fetch_max(live, Ordering::SeqCst);
}

// SAFETY: every call is the system allocator's own; only numbers are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both may be alive while the bytes move.
        count(new_size);
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn live() -> usize {
    LIVE_BYTES.load(Ordering::SeqCst)
}

fn planned(
    checkpoint: &Checkpoint,
    quantize: Quantize,
    (kv_type, state_type): (KvType, StateType),
    device: &CpuDevice,
) -> MemoryPlan {
    let geometry = &checkpoint.config().geometry;
    let matrix_bytes = |format, rows, cols| device.matrix_bytes(format, rows, cols);
    let weights: Vec<PlanWeight> = plan_weights(checkpoint, quantize, &matrix_bytes)
        .into_iter()
        .map(|group| PlanWeight { group: group.label.to_owned(), detail: group.formats, bytes: group.bytes })
        .collect();
    let workspace = |rows: usize, logit_rows: usize| {
        let buffer_bytes = |rows, cols, precision| device.buffer_bytes(rows, cols, precision);
        let mut buffers = workspace_bytes(geometry, rows, logit_rows, &buffer_bytes).to_vec();
        buffers.push(("scratch", device.scratch_bytes(geometry, rows, logit_rows)));
        buffers
    };
    let options = PlanOptions {
        max_sequences: Some(3),
        kv_tokens: Some(2048),
        kv_type,
        state_type,
        host_cache_bytes: 40 << 20,
        ..PlanOptions::default()
    };
    let host = HostMemory { is_shared: true, staging_bytes: 0 };
    let budget_bytes = 1 << 30;
    plan(&PlanInput { geometry, weights: &weights, workspace: &workspace, budget_bytes, host, options })
        .unwrap()
}

/// A prompt slice of sequence 0, as many rows as a step may have.
fn largest_slice(plan: &MemoryPlan) -> Batch {
    let rows = plan.max_rows;
    let chunks = (0..rows)
        .step_by(64)
        .map(|first_row| Chunk { span: 0, first_row, rows: 64.min(rows - first_row) })
        .collect();
    let span = Span { first_row: 0, rows, position: 0, slot: 0, ring_len: 0, first_page: 0 };
    Batch {
        phase: Phase::Prefill,
        tokens: (0..rows as u32).map(|row| row * 31 % 8000).collect(),
        page_table: (0..rows.div_ceil(PAGE_TOKENS) as u32).collect(),
        spans: vec![span],
        chunks,
    }
}

/// A round of all sequences, the first long, at a ring length.
fn round(plan: &MemoryPlan, ring_len: usize) -> Batch {
    let (mut spans, mut page_table, mut first_row) = (Vec::new(), Vec::new(), 0);
    for slot in 0..plan.slots {
        let (rows, position) = (1 + 5 * slot, if slot == 0 { plan.max_rows } else { 0 });
        let ring_len = if slot == 0 { ring_len } else { 0 };
        let span = Span { first_row, rows, position, slot, ring_len, first_page: page_table.len() };
        let first = if slot == 0 { 0 } else { 20 + slot as u32 };
        page_table.extend((first..).take(span.pages()));
        first_row += rows;
        spans.push(span);
    }
    let tokens = (0..first_row as u32).map(|row| row * 7 + 1).collect();
    Batch { phase: Phase::Rows, tokens, spans, page_table, chunks: Vec::new() }
}

/// Everything that a server does with a model between two requests.
fn steps(model: &mut Model<CpuDevice>, plan: &MemoryPlan) {
    let vocab = model.geometry().vocab;
    let slice = largest_slice(plan);
    let logit_rows: Vec<usize> = (0..plan.max_logit_rows).collect();
    let all_rows: Vec<usize> = (0..plan.max_rows).collect();
    model.clear_slot(0).unwrap();
    model.forward(&slice, &logit_rows).unwrap();
    model.mtp(&slice, MtpHidden::Trunk(&all_rows), &logit_rows).unwrap();
    let draw = |logits_row| SampleRow { temperature: 0.9, seed: 3, ..SampleRow::greedy(logits_row, vocab) };
    let seen = [(1, 2), (5, 1)];
    for ring_len in [0, 1, 31, 32] {
        let batch = round(plan, ring_len);
        let rows: Vec<usize> = (0..batch.rows()).collect();
        model.forward(&batch, &rows).unwrap();
        model.mtp(&batch, MtpHidden::Trunk(&rows), &rows).unwrap();
        model.mtp(&batch, MtpHidden::Draft(&rows), &rows).unwrap();
        for row in [
            SampleRow::greedy(0, vocab),
            draw(0),
            SampleRow { top_k: 20, top_p: 0.9, ..draw(0) },
            // Nearly everything is kept and sorted.
            SampleRow { top_p: 0.999_999, temperature: 50.0, ..draw(0) },
            SampleRow { min_p: 1e-6, temperature: 50.0, ..draw(0) },
            SampleRow { repetition_penalty: 1.2, seen: &seen, top_k: 5, ..draw(0) },
            SampleRow { top_logprobs: Some(20), ..draw(0) },
        ] {
            model.sample(std::slice::from_ref(&row)).unwrap();
            let together: Vec<_> = (0..4).map(|logits_row| SampleRow { logits_row, ..row.clone() }).collect();
            model.sample(&together).unwrap();
        }
        let score = |logits_row| ScoreRow { logits_row, token: 7, vocab_limit: vocab, top_logprobs: 5 };
        model.score(&[score(0), score(1)]).unwrap();
    }
    model.copy_slot(0, 1).unwrap();
    model.copy_page(0, 9).unwrap();
    let granules: Vec<u32> = (0..model.state_granules() as u32).collect();
    model.store_state(0, 64, &granules).unwrap();
    model.load_state(1, 64, &granules).unwrap();
    model.store_page(0, 0).unwrap();
    model.load_page(9, 0).unwrap();
}

fn check(quantize: Quantize, kv_type: KvType, state_type: StateType, activations: Activations) {
    let name = format!("{quantize:?}, {kv_type:?} KV, {state_type:?} states, {activations:?}");
    let checkpoint = Checkpoint::open(&repository("models/tiny")).unwrap();
    let device = fast(activations);
    let plan = planned(&checkpoint, quantize, (kv_type, state_type), &device);
    let options = ModelOptions {
        quantize,
        kv_type,
        state_type,
        pages: plan.pages,
        slots: plan.slots,
        host_granules: plan.host.unwrap().granules,
        max_rows: plan.max_rows,
        max_logit_rows: plan.max_logit_rows,
    };
    let before = live();
    let mut model = Model::load(device, &checkpoint, &options, &mut |_| {}).unwrap();
    let (loaded, promised) = (live() - before, plan.total_bytes() as usize);
    println!("{name}: planned {promised}, allocated {loaded}");
    assert!(loaded >= promised, "{name}: planned {promised} bytes, allocated only {loaded}\n{plan}");
    assert!(
        loaded - promised <= LOAD_SLACK_BYTES,
        "{name}: planned {promised} bytes, allocated {loaded}\n{plan}"
    );

    for time in ["the first time", "again"] {
        let before = live();
        PEAK_BYTES.store(before, Ordering::SeqCst);
        steps(&mut model, &plan);
        let peak = PEAK_BYTES.load(Ordering::SeqCst) - before;
        println!("{name}: {time}, at most {peak} bytes for a moment");
        let kept = live().saturating_sub(before);
        assert!(kept <= NOISE_BYTES, "{name}: steps keep {kept} bytes {time}");
        assert!(peak <= STEP_SLACK_BYTES, "{name}: a step allocates {peak} bytes {time}");
    }
}

#[test]
fn loading_allocates_what_was_planned_and_steps_nothing() {
    check(Quantize::Int4, KvType::Bf16, StateType::F16, Activations::Int8);
    check(Quantize::Int8, KvType::F32, StateType::F32, Activations::F32);
    check(Quantize::None, KvType::Bf16, StateType::F32, Activations::Bf16);
    check(Quantize::Int4, KvType::Int8, StateType::F16, Activations::Int8);
}
