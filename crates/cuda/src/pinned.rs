//! Host memory that the GPU copies from and to without a detour.
#![expect(unsafe_code, reason = "calls of the CUDA driver and memory that it owns")]

use std::sync::Arc;

use cudarc::driver::{DriverError, result, sys};
use qwill_device::DeviceError;

use crate::driver::{Driver, Element, Memory};

/// Page-locked words, and an event that says when the last copy of them is done.
#[derive(Debug)]
pub(crate) struct Pinned {
    driver: Arc<Driver>,
    words: *mut u32,
    len: usize,
    copied: sys::CUevent,
}
// SAFETY: the memory is this value's own, and handles of the driver may be used from any thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Room for `len` words, zeroed.
    pub(crate) fn new(driver: &Arc<Driver>, len: usize) -> Result<Self, DeviceError> {
        let make = || -> Result<(*mut u32, sys::CUevent), DriverError> {
            driver.bind()?;
            let copied = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
            // SAFETY: the context is current; page-locked memory is aligned for words.
            let words = unsafe { result::malloc_host(len.max(1) * 4, 0) }?.cast::<u32>();
            // SAFETY: just allocated with this length.
            unsafe { words.write_bytes(0, len.max(1)) };
            Ok((words, copied))
        };
        let (words, copied) = make().map_err(|error| driver.failed("pinned memory", error))?;
        driver.counters().allocations.add();
        Ok(Self { driver: Arc::clone(driver), words, len, copied })
    }

    /// Copies `words` here, once the copy before has left, and enqueues their way to the start of `memory`.
    pub(crate) fn send(
        &mut self,
        op: &'static str,
        words: &[u32],
        memory: &Memory,
    ) -> Result<(), DeviceError> {
        self.put(op, 0, words)?;
        self.send_bytes(op, size_of_val(words), memory)
    }

    /// Copies values here, `offset` bytes from the start, once the last copy to the device has left.
    pub(crate) fn put<T: Element>(
        &mut self,
        op: &'static str,
        offset: usize,
        values: &[T],
    ) -> Result<(), DeviceError> {
        let bytes = size_of_val(values);
        if offset.saturating_add(bytes) > self.len * 4 {
            let reason = format!("bytes {offset}+{bytes} of {} page-locked ones", self.len * 4);
            return Err(DeviceError::shape(op, reason));
        }
        let put = || -> Result<(), DriverError> {
            self.driver.bind()?;
            // SAFETY: the event is alive; after it the copy before has read this memory. The range was checked, any
            // bytes are words, and `values` lie elsewhere.
            unsafe {
                result::event::synchronize(self.copied)?;
                let to = self.words.cast::<u8>().add(offset);
                std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), to, bytes);
            }
            Ok(())
        };
        put().map_err(|error| self.driver.failed(op, error))
    }

    /// Enqueues the way of the first `bytes` to the start of `memory`.
    pub(crate) fn send_bytes(
        &mut self,
        op: &'static str,
        bytes: usize,
        memory: &Memory,
    ) -> Result<(), DeviceError> {
        if bytes > self.len * 4 {
            return Err(DeviceError::shape(op, format!("{bytes} bytes, at most {}", self.len * 4)));
        }
        let address = memory.range(op, 0, bytes)?;
        let send = || -> Result<(), DriverError> {
            // SAFETY: both ranges were checked; this memory is written again only after the event.
            unsafe {
                let here = std::slice::from_raw_parts(self.words.cast::<u8>(), bytes);
                result::memcpy_htod_async(address, here, self.driver.stream())?;
                result::event::record(self.copied, self.driver.stream())
            }
        };
        send().map_err(|error| self.driver.failed(op, error))
    }

    /// Enqueues the way of the first `len` words of `memory` to here, waits for it and returns them.
    pub(crate) fn receive(
        &mut self,
        op: &'static str,
        memory: &Memory,
        len: usize,
    ) -> Result<&[u32], DeviceError> {
        if len > self.len {
            return Err(DeviceError::shape(op, format!("{len} words, at most {}", self.len)));
        }
        let address = memory.range(op, 0, len * 4)?;
        let receive = || -> Result<(), DriverError> {
            // SAFETY: the memory holds `len` words and nothing else uses it until the event after the copy.
            unsafe {
                let here = std::slice::from_raw_parts_mut(self.words, len);
                result::memcpy_dtoh_async(here, address, self.driver.stream())?;
                result::event::record(self.copied, self.driver.stream())?;
                result::event::synchronize(self.copied)
            }
        };
        receive().map_err(|error| self.driver.failed(op, error))?;
        // SAFETY: as above; the copy is done, and `self` is borrowed as long as the words are.
        Ok(unsafe { std::slice::from_raw_parts(self.words, len) })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated and created in `new`, released once, after the last copy.
        unsafe {
            let _ = self.driver.bind();
            let _ = result::event::synchronize(self.copied);
            let _ = result::event::destroy(self.copied);
            let _ = result::free_host(self.words.cast());
        }
    }
}
