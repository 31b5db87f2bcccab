//! Much page-locked memory at once.
//!
//! The driver's own allocator takes 5 s for 8 GiB: it zeroes and locks page after page of 4 KiB on one thread. Here the
//! system is asked for large pages, several threads touch them, and the driver then locks what is there.
#![expect(unsafe_code, reason = "memory mapped from the system, locked by the CUDA driver")]

use std::sync::Arc;

use cudarc::driver::{DriverError, sys};
use qwill_device::DeviceError;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::copies::Lanes;
use crate::driver::Driver;

/// Every page has a byte at a multiple of it.
const SMALL_PAGE_BYTES: usize = 4096;
/// Large pages, and the least that a thread touches.
const LARGE_PAGE_BYTES: usize = 2 << 20;
/// More threads than this find no more memory bandwidth.
const MOST_THREADS: usize = 8;

/// Zeroed memory of the system's, given back when dropped.
#[derive(Debug)]
struct Mapping {
    start: *mut u8,
    bytes: usize,
}
// SAFETY: the memory is this value's own.
unsafe impl Send for Mapping {}
// SAFETY: what it lends follows the rules of references.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// At least so many bytes, in large pages where the system has them.
    fn new(bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(LARGE_PAGE_BYTES);
        // SAFETY: a new mapping at a place of the system's choice touches nothing else.
        let start = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE)?
        };
        // SAFETY: the mapping just made; advice changes no contents. A system without large pages refuses it.
        let _ = unsafe { madvise(start, bytes, Advice::LinuxHugepage) };
        Ok(Self { start: start.cast(), bytes })
    }

    fn all(&self) -> &[u8] {
        // SAFETY: mapped with this length, zeroed by the system.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    fn all_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// Makes the system find all pages now, on several threads.
    fn touch(&mut self) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let part_bytes = self.bytes.div_ceil(threads).next_multiple_of(LARGE_PAGE_BYTES);
        std::thread::scope(|scope| {
            for part in self.all_mut().chunks_mut(part_bytes) {
                scope.spawn(|| part.iter_mut().step_by(SMALL_PAGE_BYTES).for_each(|byte| *byte = 0));
            }
        });
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, unmapped once.
        let _ = unsafe { munmap(self.start.cast(), self.bytes) };
    }
}

/// Page-locked memory, given back when dropped.
#[derive(Debug)]
pub(crate) struct HostMemory {
    lanes: Arc<Lanes>,
    driver: Arc<Driver>,
    mapping: Mapping,
}

impl HostMemory {
    /// Zeroed.
    pub(crate) fn new(driver: &Arc<Driver>, lanes: &Arc<Lanes>, bytes: usize) -> Result<Self, DeviceError> {
        let fail = |reason: String| {
            driver.failed("host_store", format!("page-locking {bytes} bytes of memory: {reason}"))
        };
        let mut mapping = Mapping::new(bytes).map_err(|error| fail(error.to_string()))?;
        mapping.touch();
        let lock = || -> Result<(), DriverError> {
            driver.bind()?;
            // SAFETY: the context is current; the mapping lives until it is unlocked.
            unsafe { sys::cuMemHostRegister_v2(mapping.start.cast(), mapping.bytes, 0) }.result()
        };
        lock().map_err(|error| fail(error.to_string()))?;
        driver.counters().allocations.add();
        Ok(Self { lanes: Arc::clone(lanes), driver: Arc::clone(driver), mapping })
    }

    /// Some of the bytes, which must lie within and must not be written by a copy.
    pub(crate) fn get(&self, offset: usize, bytes: usize) -> Option<&[u8]> {
        self.mapping.all().get(offset..offset.checked_add(bytes)?)
    }

    /// Some of the bytes, which must lie within and must not be part of a copy.
    pub(crate) fn get_mut(&mut self, offset: usize, bytes: usize) -> Option<&mut [u8]> {
        self.mapping.all_mut().get_mut(offset..offset.checked_add(bytes)?)
    }

    /// Where some bytes are, for a copy; fails unless they lie within.
    pub(crate) fn address(&self, op: &'static str, offset: u64, bytes: u64) -> Result<u64, DeviceError> {
        if offset.saturating_add(bytes) > self.mapping.bytes as u64 {
            let reason = format!("bytes {offset}+{bytes} of {} page-locked ones", self.mapping.bytes);
            return Err(DeviceError::shape(op, reason));
        }
        Ok(self.mapping.start as u64 + offset)
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        self.lanes.settle();
        // SAFETY: locked in `new`, unlocked once, after the last copy and before it is unmapped.
        unsafe {
            let _ = self.driver.bind();
            let _ = sys::cuMemHostUnregister(self.mapping.start.cast());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_zeroed_and_writable_to_its_end() {
        for bytes in [0, 1, LARGE_PAGE_BYTES, 40 << 20] {
            let mut mapping = Mapping::new(bytes).unwrap();
            mapping.touch();
            assert!(mapping.bytes >= bytes.max(1) && mapping.bytes.is_multiple_of(LARGE_PAGE_BYTES));
            assert!(mapping.all().iter().all(|byte| *byte == 0));
            mapping.all_mut().fill(7);
            assert_eq!(mapping.all().last(), Some(&7));
        }
    }
}
