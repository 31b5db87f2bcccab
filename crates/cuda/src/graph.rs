//! Recorded work: a stream's launches captured once, replayed with one call.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::sync::Arc;

use cudarc::driver::{DriverError, result, sys};
use qwill_device::DeviceError;

use crate::driver::Driver;

/// Launches that are replayed together. Addresses and extents are those of the recording; what changes from step to
/// step lies in memory that the kernels read.
#[derive(Debug)]
pub(crate) struct Graph {
    driver: Arc<Driver>,
    handle: sys::CUgraphExec,
}
// SAFETY: a handle of the driver, usable from any thread.
unsafe impl Send for Graph {}

impl Driver {
    /// Launches from now on are recorded instead of run.
    pub(crate) fn begin_capture(&self) -> Result<(), DeviceError> {
        let begin = || -> Result<(), DriverError> {
            self.bind()?;
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            // SAFETY: the stream is alive and not capturing: recordings do not nest.
            unsafe { result::stream::begin_capture(self.stream(), mode) }
        };
        begin().map_err(|error| self.failed("begin_recording", error))
    }

    /// Ends the recording and makes it ready to run.
    pub(crate) fn end_capture(self: &Arc<Self>) -> Result<Graph, DeviceError> {
        let end = || -> Result<sys::CUgraphExec, DriverError> {
            self.bind()?;
            // SAFETY: the stream is capturing; the graph is destroyed once, after it was instantiated.
            unsafe {
                let graph = result::stream::end_capture(self.stream())?;
                let mut handle = std::ptr::null_mut();
                let made = sys::cuGraphInstantiateWithFlags(&raw mut handle, graph, 0).result();
                let _ = result::graph::destroy(graph);
                made?;
                result::graph::upload(handle, self.stream())?;
                Ok(handle)
            }
        };
        let handle = end().map_err(|error| self.failed("end_recording", error))?;
        Ok(Graph { driver: Arc::clone(self), handle })
    }
}

impl Graph {
    /// Enqueues the recorded launches.
    pub(crate) fn launch(&self) -> Result<(), DeviceError> {
        let launch = || -> Result<(), DriverError> {
            self.driver.bind()?;
            // SAFETY: the graph is alive, and so is the memory that its kernels use: the device owns both.
            unsafe { result::graph::launch(self.handle, self.driver.stream()) }
        };
        launch().map_err(|error| self.driver.failed("replay", error))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: destroyed once; the driver keeps a graph that still runs until its end.
        unsafe {
            let _ = self.driver.bind();
            let _ = result::graph::exec_destroy(self.handle);
        }
    }
}
