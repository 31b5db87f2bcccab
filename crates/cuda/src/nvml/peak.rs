//! The most memory that a GPU's processes held over a stretch of time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{Nvml, NvmlError};

/// Time between two looks. Allocations that a plan forgets live longer than this.
const INTERVAL: Duration = Duration::from_millis(5);

/// Watches a GPU's memory on a thread of its own until it is stopped.
///
/// Everything on the GPU counts, so that a test subtracts [`PeakMemory::start_bytes`] and has the GPU to itself.
#[derive(Debug)]
pub struct PeakMemory {
    start_bytes: u64,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<u64, NvmlError>>,
}

impl PeakMemory {
    /// Starts to watch a GPU by its identifier.
    pub fn watch(nvml: &Nvml, uuid: &str) -> Result<Self, NvmlError> {
        let start_bytes = nvml.used_bytes(uuid)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (nvml, uuid, stopped) = (nvml.clone(), uuid.to_owned(), Arc::clone(&stop));
        let thread = thread::Builder::new().name("gpu-memory".to_owned()).spawn(move || {
            let mut peak_bytes = start_bytes;
            loop {
                // Read before the last look, so that the look comes after everything that the caller did.
                let last = stopped.load(Ordering::Acquire);
                peak_bytes = peak_bytes.max(nvml.used_bytes(&uuid)?);
                if last {
                    return Ok(peak_bytes);
                }
                thread::sleep(INTERVAL);
            }
        });
        let failed = |error: std::io::Error| NvmlError::Failed {
            function: "starting a thread".to_owned(),
            reason: error.to_string(),
        };
        Ok(Self { start_bytes, stop, thread: thread.map_err(failed)? })
    }

    /// What was held when it began.
    pub fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// Stops and returns the most that was held, also by others.
    pub fn stop(self) -> Result<u64, NvmlError> {
        self.stop.store(true, Ordering::Release);
        let ended = self.thread.join();
        let reason = "the thread that watched ended early".to_owned();
        ended.unwrap_or(Err(NvmlError::Failed { function: "watching the memory".to_owned(), reason }))
    }
}
