//! Copies between the device and page-locked memory, on two streams beside that of the ops: one for each direction, which
//! a card does at the same time.
#![expect(unsafe_code, reason = "calls of the CUDA driver and memory that it owns")]

use std::sync::Arc;

use cudarc::driver::{DriverError, result, sys};
use qwill_device::DeviceError;

use crate::driver::{Driver, Memory};
use crate::host_memory::HostMemory;

/// A point in a stream's work.
#[derive(Debug)]
pub(crate) struct Event {
    driver: Arc<Driver>,
    handle: sys::CUevent,
}
// SAFETY: a handle of the driver, usable from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks its own structures.
unsafe impl Sync for Event {}

impl Event {
    /// One that is past until it is recorded.
    pub(crate) fn new(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        let create = || -> Result<sys::CUevent, DriverError> {
            driver.bind()?;
            result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
        };
        let handle = create().map_err(|error| driver.failed("event", error))?;
        Ok(Self { driver: Arc::clone(driver), handle })
    }

    /// It stands after everything that is in the stream now.
    pub(crate) fn record(&self, op: &'static str, stream: sys::CUstream) -> Result<(), DeviceError> {
        // SAFETY: event and stream are alive.
        self.call(op, || unsafe { result::event::record(self.handle, stream) })
    }

    /// What is enqueued in the stream from now on begins after it.
    pub(crate) fn hold(&self, op: &'static str, stream: sys::CUstream) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are alive.
        self.call(op, || unsafe { result::stream::wait_event(stream, self.handle, flags) })
    }

    /// Whether it is past.
    fn is_past(&self, op: &'static str) -> Result<bool, DeviceError> {
        let query = || -> Result<bool, DriverError> {
            self.driver.bind()?;
            // SAFETY: the event is alive.
            match unsafe { result::event::query(self.handle) } {
                Ok(()) => Ok(true),
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
                Err(error) => Err(error),
            }
        };
        query().map_err(|error| self.driver.failed(op, error))
    }

    /// Waits on the host until it is past.
    fn wait(&self, op: &'static str) -> Result<(), DeviceError> {
        // SAFETY: the event is alive.
        self.call(op, || unsafe { result::event::synchronize(self.handle) })
    }

    fn call(
        &self,
        op: &'static str,
        call: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<(), DeviceError> {
        self.driver.bind().and_then(|()| call()).map_err(|error| self.driver.failed(op, error))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once; the driver keeps one that a stream still waits for.
        unsafe {
            let _ = self.driver.bind();
            let _ = result::event::destroy(self.handle);
        }
    }
}

/// A stream of copies in one direction.
#[derive(Debug)]
pub(crate) struct Lane {
    driver: Arc<Driver>,
    stream: sys::CUstream,
    /// Where the stream of the ops stood when a copy was enqueued.
    begun: Event,
    /// The end of the last copy.
    done: Event,
}
// SAFETY: handles of the driver, usable from any thread.
unsafe impl Send for Lane {}
// SAFETY: as above; the driver locks its own structures.
unsafe impl Sync for Lane {}

impl Lane {
    fn new(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        let (begun, done) = (Event::new(driver)?, Event::new(driver)?);
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| driver.failed("open", error))?;
        Ok(Self { driver: Arc::clone(driver), stream, begun, done })
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }
    /// Copies from now on begin after the ops that are enqueued.
    pub(crate) fn follow_ops(&self, op: &'static str) -> Result<(), DeviceError> {
        self.begun.record(op, self.driver.stream())?;
        self.begun.hold(op, self.stream)
    }
    /// Copies from now on begin after those of the other lane.
    pub(crate) fn follow(&self, op: &'static str, other: &Self) -> Result<(), DeviceError> {
        other.done.hold(op, self.stream)
    }
    /// Ops from now on begin after the copies here.
    pub(crate) fn hold_ops(&self, op: &'static str) -> Result<(), DeviceError> {
        self.done.hold(op, self.driver.stream())
    }
    /// To be called after the last copy.
    pub(crate) fn end(&self, op: &'static str) -> Result<(), DeviceError> {
        self.done.record(op, self.stream)
    }
    /// Whether all copies are done.
    pub(crate) fn is_done(&self, op: &'static str) -> Result<bool, DeviceError> {
        self.done.is_past(op)
    }
    /// Waits on the host until all copies are done.
    pub(crate) fn wait(&self, op: &'static str) -> Result<(), DeviceError> {
        self.done.wait(op)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once; the driver lets what is enqueued end.
        unsafe {
            let _ = self.driver.bind();
            let _ = result::stream::destroy(self.stream);
        }
    }
}

/// Both directions.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// From the device.
    pub(crate) leaving: Lane,
    /// To the device.
    pub(crate) arriving: Lane,
}

impl Lanes {
    pub(crate) fn new(driver: &Arc<Driver>) -> Result<Arc<Self>, DeviceError> {
        Ok(Arc::new(Self { leaving: Lane::new(driver)?, arriving: Lane::new(driver)? }))
    }

    /// Waits for all copies, before memory that they use is given back. A failure shows in the next op.
    pub(crate) fn settle(&self) {
        let _ = self.leaving.wait("settle");
        let _ = self.arriving.wait("settle");
    }
}

/// Where a copy's rows are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Side<'a> {
    Device(&'a Memory),
    Host(&'a HostMemory),
}

/// Rows of bytes, each `pitch` bytes after the one before: a multiple of their width.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(crate) side: Side<'a>,
    pub(crate) offset: u64,
    pub(crate) pitch: u64,
}

impl Side<'_> {
    fn kind(self) -> sys::CUmemorytype {
        match self {
            Self::Device(_) => sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            Self::Host(_) => sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        }
    }
}

impl Rows<'_> {
    /// The first row's address; fails unless all rows lie within.
    fn address(&self, op: &'static str, width: u64, rows: u64) -> Result<u64, DeviceError> {
        let bytes = (rows - 1).saturating_mul(self.pitch).saturating_add(width);
        match self.side {
            Side::Device(memory) => memory.range(op, self.offset, bytes as usize),
            Side::Host(memory) => memory.address(op, self.offset, bytes),
        }
    }
}

impl Driver {
    /// Enqueues a copy of `rows` rows of `width` bytes. What it reads and writes must be left alone until it is done.
    pub(crate) fn copy_rows(
        &self,
        op: &'static str,
        stream: sys::CUstream,
        (from, to): (Rows<'_>, Rows<'_>),
        width: u64,
        rows: u64,
    ) -> Result<(), DeviceError> {
        if width == 0 || rows == 0 {
            return Ok(());
        }
        let (source, target) = (from.address(op, width, rows)?, to.address(op, width, rows)?);
        // Rows as slices of a single row each: how far slices are apart has no limit, where the pitch of rows has one.
        let height = |all: Rows<'_>| (all.pitch / width) as usize;
        if !from.pitch.is_multiple_of(width) || !to.pitch.is_multiple_of(width) {
            let reason = format!("rows of {width} bytes, {} and {} apart", from.pitch, to.pitch);
            return Err(DeviceError::shape(op, reason));
        }
        let copy = sys::CUDA_MEMCPY3D {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: from.side.kind(),
            srcHost: source as *const _,
            srcDevice: source,
            srcArray: std::ptr::null_mut(),
            reserved0: std::ptr::null_mut(),
            srcPitch: width as usize,
            srcHeight: height(from),
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: to.side.kind(),
            dstHost: target as *mut _,
            dstDevice: target,
            dstArray: std::ptr::null_mut(),
            reserved1: std::ptr::null_mut(),
            dstPitch: width as usize,
            dstHeight: height(to),
            WidthInBytes: width as usize,
            Height: 1,
            Depth: rows as usize,
        };
        let enqueue = || -> Result<(), DriverError> {
            self.bind()?;
            // SAFETY: both ranges were checked. Their owners wait for the lanes before they give memory back, and the
            // device orders everything else that uses the ranges.
            unsafe { sys::cuMemcpy3DAsync_v2(&raw const copy, stream) }.result()
        };
        enqueue().map_err(|error| self.failed(op, error))
    }
}
