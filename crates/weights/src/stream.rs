//! All matrices of a model, block by block: several threads read, round or make the next blocks while the caller places
//! those that are ready, in memory that is bounded by construction.
//!
//! There is a fixed number of blocks of memory. A thread that has one takes the next job, fills it and hands it over;
//! the caller gives it back. So the threads are never further ahead than there are blocks, and nothing is allocated
//! once every block has had its largest contents.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use qwill_device::matrix::BLOCK_ROWS;
use qwill_device::{MatrixData, WeightFormat};

use crate::cache::Cache;
use crate::checkpoint::Checkpoint;
use crate::error::WeightsError;
use crate::matrix::{Matrix, MatrixSpec, row_bytes};
use crate::memory::Memory;
use crate::quantize::Quantize;

/// Blocks of memory beyond one for each thread, so that threads go on while the caller is busy.
const SPARE_BLOCKS: usize = 4;

/// How matrices are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamOptions {
    /// Threads that read, round or make weights, at least 1.
    pub workers: usize,
    /// Most bytes of a block, as stored and as delivered, without scales; [`BLOCK_ROWS`] rows are the least.
    pub block_bytes: usize,
}

impl Default for StreamOptions {
    /// A thread per core up to 16, which saturate any disk, and blocks of 4 MiB, which stay in the processor's cache
    /// from the thread that fills them to the one that places them.
    fn default() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self { workers: cores.min(16), block_bytes: 4 << 20 }
    }
}

impl StreamOptions {
    /// Most memory that a stream takes, bytes: a block of stored bytes for each thread and blocks on their way, with a
    /// scale of two bytes for each group of 64 bytes of codes at most.
    pub fn most_bytes(&self) -> usize {
        let block = self.block_bytes + self.block_bytes / 32;
        (2 * self.workers + SPARE_BLOCKS) * block
    }
}

/// Rows of a matrix, ready to be placed.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    /// Which of the matrices that were asked for.
    pub matrix: usize,
    /// Where the block begins, a multiple of [`BLOCK_ROWS`].
    pub first_row: usize,
    /// The rows.
    pub data: MatrixData<'a>,
    /// Whether these are the matrix's last rows to arrive.
    pub completes: bool,
}

/// One block to be read.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    matrix: usize,
    spec: &'a MatrixSpec,
    pub(crate) rows: Range<usize>,
    /// The format in which it is delivered.
    pub(crate) format: WeightFormat,
    /// Whether that is not the stored one.
    pub(crate) rounded: bool,
}

impl Job<'_> {
    pub(crate) fn name(&self) -> &str {
        &self.spec.name
    }
    pub(crate) fn cols(&self) -> usize {
        self.spec.cols
    }
}

/// Reads matrices and hands them to `place`, in blocks of rows that arrive in nearly the order of `matrices`. The first
/// error, of reading or of `place`, ends it.
pub fn stream<E: From<WeightsError>>(
    checkpoint: &Checkpoint,
    matrices: &[MatrixSpec],
    quantize: Quantize,
    options: StreamOptions,
    place: &mut dyn FnMut(Block<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let jobs = jobs(checkpoint, matrices, quantize, options.block_bytes);
    let cache = checkpoint.open_cache(quantize, &jobs);
    let workers = options.workers.min(jobs.len()).max(1);
    let (give_back, free) = channel();
    for _ in 0..workers + SPARE_BLOCKS {
        let _ = give_back.send(Matrix::default());
    }
    let (free, next) = (Mutex::new(free), AtomicUsize::new(0));
    let work = |ready: &Sender<Filled>| {
        let mut stored = Memory::default();
        while let Some(mut block) = take(&free) {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(at) else { break };
            let read = read(checkpoint, cache.as_ref(), (at, job), quantize, &mut stored, &mut block);
            let failed = read.is_err();
            if ready.send((at, read.map(|()| block))).is_err() || failed {
                break;
            }
        }
    };
    thread::scope(|scope| {
        let (ready, filled) = channel();
        // Dropped here whatever happens: the threads that wait for a free block then end.
        let give_back = give_back;
        for index in 0..workers {
            let (ready, work) = (ready.clone(), &work);
            let builder = thread::Builder::new().name(format!("weights-{index}"));
            let started = builder.spawn_scoped(scope, move || work(&ready));
            started.map_err(|source| WeightsError::Threads { source })?;
        }
        drop(ready);
        place_all(matrices, &jobs, &filled, &give_back, place)
    })?;
    if let Some(cache) = cache {
        cache.finish();
    }
    Ok(())
}

type Filled = (usize, Result<Matrix, WeightsError>);

/// The next free block; `None` when the caller has gone.
fn take(free: &Mutex<Receiver<Matrix>>) -> Option<Matrix> {
    free.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

/// Fills a block: from the cache where it has it, else from the checkpoint.
fn read(
    checkpoint: &Checkpoint,
    cache: Option<&Cache>,
    (at, job): (usize, &Job<'_>),
    quantize: Quantize,
    stored: &mut Memory,
    block: &mut Matrix,
) -> Result<(), WeightsError> {
    if let Some(cache) = cache.filter(|_| job.rounded) {
        block.reshape(job.format, job.rows.len(), job.cols());
        if cache.read(at, block) {
            return Ok(());
        }
    }
    checkpoint.read_rows(job.spec, job.rows.clone(), quantize, stored, block)?;
    if let Some(cache) = cache {
        cache.write(at, block);
    }
    Ok(())
}

/// The caller's side.
fn place_all<E: From<WeightsError>>(
    matrices: &[MatrixSpec],
    jobs: &[Job<'_>],
    filled: &Receiver<Filled>,
    give_back: &Sender<Matrix>,
    place: &mut dyn FnMut(Block<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let mut missing_rows: Vec<usize> = matrices.iter().map(|spec| spec.rows).collect();
    for (at, block) in filled {
        let (block, Job { matrix, rows, .. }) = (block?, &jobs[at]);
        missing_rows[*matrix] -= rows.len();
        let completes = missing_rows[*matrix] == 0;
        place(Block { matrix: *matrix, first_row: rows.start, data: block.data(), completes })?;
        // Refused when no thread is left to fill it.
        let _ = give_back.send(block);
    }
    Ok(())
}

/// Cuts matrices into blocks.
fn jobs<'a>(
    checkpoint: &Checkpoint,
    matrices: &'a [MatrixSpec],
    quantize: Quantize,
    block_bytes: usize,
) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    for (matrix, spec) in matrices.iter().enumerate() {
        // Reading reports a matrix that is not there.
        let stored = checkpoint.format_of(&spec.name).unwrap_or(WeightFormat::F32);
        let format = checkpoint.planned_format(&spec.name, quantize).unwrap_or(stored);
        let widest = row_bytes(format, spec.cols).max(row_bytes(stored, spec.cols)).max(1);
        let rows = (block_bytes / widest / BLOCK_ROWS * BLOCK_ROWS).max(BLOCK_ROWS);
        let blocks = (0..spec.rows).step_by(rows).map(|first| first..spec.rows.min(first + rows));
        jobs.extend(blocks.map(|rows| Job { matrix, spec, rows, format, rounded: format != stored }));
    }
    jobs
}
