//! Threads that wait for the next op: handing one over costs about a microsecond.
//!
//! A decode step is hundreds of short parallel regions, so the workers spin for a while before they sleep, and the
//! caller never waits for a worker that has not begun: it takes the remaining pieces itself.

#![expect(unsafe_code, reason = "workers that outlive a call run closures that borrow from it")]

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

/// Pauses before a worker sleeps: some hundred microseconds, longer than the gaps within a step.
const SPINS_BEFORE_SLEEP: u32 = 6_000;

/// Set in [`Shared::state`] while a job may be joined. The bits below count the workers that are in it, those
/// from bit 32 on count the jobs.
const OPEN: u64 = 1 << 31;
const COUNT: u64 = OPEN - 1;

/// What a job does: `(worker, piece)`.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The caller and its workers.
#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    state: AtomicU64,
    /// The job; written only while it is closed and no worker is in it.
    job: UnsafeCell<Option<&'static Task<'static>>>,
    pieces: AtomicUsize,
    next: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    asleep: Vec<AtomicBool>,
}

// SAFETY: `job` is written by the one caller that holds `&mut Pool`, only while the job is closed and no worker
// is counted in it, and read only by workers that are counted; `state` orders the two.
unsafe impl Sync for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("Shared").field("workers", &self.asleep.len()).finish_non_exhaustive()
    }
}

impl Pool {
    /// `threads` in all, the caller's included.
    pub(super) fn new(threads: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            pieces: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: (1..threads).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut pool = Self { shared, workers: Vec::new() };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = thread::Builder::new().name(format!("qwill-cpu-{worker}"));
            pool.workers.push(builder.spawn(move || shared.serve(worker))?);
        }
        Ok(pool)
    }

    /// Threads, the caller's included.
    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(worker, piece)` once for every piece in `0..pieces`, on all threads, and returns when the last
    /// call has. `worker` is below [`Pool::threads`] and no two calls with one worker run at once.
    pub(super) fn run(&mut self, pieces: usize, task: &Task<'_>) {
        if pieces <= 1 || self.workers.is_empty() {
            return (0..pieces).for_each(|piece| task(0, piece));
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; `Close` waits for the workers before `task` can go.
        let job: &'static Task<'static> =
            unsafe { std::mem::transmute::<&Task<'_>, &'static Task<'static>>(task) };
        // SAFETY: `&mut self` makes this the only caller, and the last call left the job closed and empty.
        unsafe { *shared.job.get() = Some(job) };
        shared.pieces.store(pieces, Ordering::Relaxed);
        shared.next.store(0, Ordering::Relaxed);
        let jobs = (shared.state.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        shared.state.store(jobs << 32 | OPEN, Ordering::SeqCst);
        for (asleep, worker) in shared.asleep.iter().zip(&self.workers) {
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let close = Close(shared);
        shared.take_pieces(0, task);
        drop(close);
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a kernel panicked on a worker thread");
    }
}

/// Closes the job and waits for its workers, also when the caller's own piece panics.
struct Close<'a>(&'a Shared);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while self.0.state.load(Ordering::Acquire) & COUNT != 0 {
            spins += 1;
            // A worker without a processor to run on needs this one.
            if spins.is_multiple_of(1024) { thread::yield_now() } else { spin_loop() }
        }
    }
}

impl Shared {
    fn take_pieces(&self, worker: usize, task: &Task<'_>) {
        let pieces = self.pieces.load(Ordering::Relaxed);
        loop {
            let piece = self.next.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces {
                return;
            }
            task(worker, piece);
        }
    }

    fn serve(&self, worker: usize) {
        let (mut last_job, mut spins) = (0, 0);
        while !self.stop.load(Ordering::Relaxed) {
            let state = self.state.load(Ordering::SeqCst);
            if state & OPEN != 0 && state >> 32 != last_job {
                let joined =
                    self.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed);
                if joined.is_ok() {
                    last_job = state >> 32;
                    self.help(worker);
                    spins = 0;
                }
            } else if spins < SPINS_BEFORE_SLEEP {
                spins += 1;
                spin_loop();
            } else {
                self.sleep(worker, last_job);
                spins = 0;
            }
        }
    }

    /// Takes pieces of the job that this worker is counted in, then leaves it.
    fn help(&self, worker: usize) {
        // SAFETY: while this worker is counted the caller neither returns nor writes the job.
        let task = unsafe { *self.job.get() };
        let taken = catch_unwind(AssertUnwindSafe(|| task.map(|task| self.take_pieces(worker, task))));
        if taken.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
        self.state.fetch_sub(1, Ordering::Release);
    }

    fn sleep(&self, worker: usize, last_job: u64) {
        let asleep = &self.asleep[worker - 1];
        asleep.store(true, Ordering::SeqCst);
        // Either this load sees the new job or the caller sees the flag: both are sequentially consistent.
        let state = self.state.load(Ordering::SeqCst);
        if (state & OPEN == 0 || state >> 32 == last_job) && !self.stop.load(Ordering::SeqCst) {
            thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker's panics are caught in `help`; there is nothing to report here.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_runs_once_on_any_number_of_threads() {
        for threads in 1..=4 {
            let mut pool = Pool::new(threads).unwrap();
            for round in 0..2000 {
                let pieces = round % 37;
                let counts: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                pool.run(pieces, &|worker, piece| {
                    assert!(worker < threads);
                    counts[piece].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn sleeping_workers_wake_and_a_moved_pool_works() {
        let mut pool = Pool::new(3).unwrap();
        for _ in 0..3 {
            thread::sleep(std::time::Duration::from_millis(20));
            let sum = AtomicUsize::new(0);
            pool.run(100, &|_, piece| {
                sum.fetch_add(piece, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 4950);
            pool = thread::spawn(move || pool).join().unwrap();
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::new(2).unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| pool.run(64, &|_, piece| assert!(piece != 40))));
        assert!(outcome.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(10, &|_, piece| {
            sum.fetch_add(piece, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }
}
