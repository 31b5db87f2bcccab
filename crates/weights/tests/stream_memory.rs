//! A stream's memory is bounded by its options, not by the largest matrix.
//!
//! One test in a binary of its own: the allocator counts the bytes of the whole process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use qwill_device::{Geometry, WeightFormat};
use qwill_weights::{Block, Checkpoint, MatrixSpec, Quantize, StreamOptions, WeightsError, stream};

/// Lists of blocks, threads' names, channels.
const SLACK_BYTES: usize = 256 << 10;

struct Counting;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is the system allocator's own; only numbers are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE_BYTES.fetch_add(layout.size(), Ordering::SeqCst) + layout.size();
        PEAK_BYTES.fetch_max(live, Ordering::SeqCst);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Streams all matrices, slowly placed, and returns the most bytes that were held beyond those before.
fn peak_bytes(checkpoint: &Checkpoint, quantize: Quantize, options: StreamOptions) -> usize {
    let specs: Vec<MatrixSpec> = checkpoint.matrices();
    let before = LIVE_BYTES.load(Ordering::SeqCst);
    PEAK_BYTES.store(before, Ordering::SeqCst);
    let mut place = |block: Block<'_>| -> Result<(), WeightsError> {
        // Those who read are as far ahead as they may be.
        if block.first_row == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    };
    stream(checkpoint, &specs, quantize, options, &mut place).unwrap();
    PEAK_BYTES.load(Ordering::SeqCst) - before
}

#[test]
fn memory_is_bounded_by_the_options() {
    for workers in [1, 2, 16] {
        assert!(StreamOptions { workers, ..StreamOptions::default() }.most_bytes() < 200 << 20);
    }
    let mut geometry = Geometry::named("tiny").unwrap();
    // An embedding of 32 MB in bf16, many times the bound.
    geometry.vocab = 65_536;
    let embedding = WeightFormat::Bf16.matrix_bytes(geometry.vocab, geometry.hidden) as usize;
    for (workers, stored, quantize) in [
        (1, Quantize::None, Quantize::Int4),
        (4, Quantize::None, Quantize::Int8),
        (4, Quantize::Int4, Quantize::None),
    ] {
        let checkpoint = Checkpoint::random(&geometry, 1, stored);
        let options = StreamOptions { workers, block_bytes: 100_000 };
        let bound = options.most_bytes() + SLACK_BYTES;
        assert!(bound < embedding / 10, "the test would prove nothing");
        let peak = peak_bytes(&checkpoint, quantize, options);
        println!("{workers} threads: {peak} of {bound} bytes");
        assert!(peak <= bound, "{workers} threads, {stored:?} to {quantize:?}: {peak} bytes, bound {bound}");
        assert!(peak > options.block_bytes, "nothing was counted");
    }
}
