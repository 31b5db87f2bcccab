//! The driver: one context, one stream, plain allocations. Every op is enqueued on that stream; only reading back
//! waits for it. Copies of pages and states to and from the host have streams of their own, see `copies`.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::{DriverError, result, sys};
use qwill_device::DeviceError;

use crate::KernelError;
use crate::launch::Params;
use crate::store::Refusal;

/// Shared memory that a block may use without asking.
const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

/// A GPU with its context and stream.
#[derive(Debug)]
pub(crate) struct Driver {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    name: String,
    sm: u32,
    sm_count: usize,
    /// Whether memory comes from the driver's pool, which packs allocations closely: one by one each takes whole pages
    /// of 2 MiB, 4 % more for the weights of the 27B. Some virtual GPUs have no pool.
    pooled: bool,
    /// What may be allocated.
    limit_bytes: AtomicU64,
    used_bytes: AtomicU64,
    counters: Counters,
    /// What each op took, while that is measured.
    timings: Mutex<Option<BTreeMap<&'static str, OpTiming>>>,
}

/// See [`crate::Activity`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Memory taken, on the device or page-locked.
    pub(crate) allocations: Counter,
    /// Modules loaded.
    pub(crate) loads: Counter,
    /// Reads into ordinary memory, each with a wait for everything before it.
    pub(crate) blocking_reads: Counter,
    /// Kernels launched one by one.
    pub(crate) launches: Counter,
    /// Recordings replayed.
    pub(crate) replays: Counter,
}

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Time of an op's kernels on the device.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct OpTiming {
    /// Kernels launched.
    pub launches: u64,
    /// Their time together, microseconds.
    pub microseconds: f64,
}

// SAFETY: the driver's handles may be used from any thread; every call makes the context current on its thread first.
unsafe impl Send for Driver {}
// SAFETY: as above; the driver locks its own structures.
unsafe impl Sync for Driver {}

/// Why a call failed.
pub(crate) struct Reason(String);
impl From<DriverError> for Reason {
    fn from(error: DriverError) -> Self {
        Self(error.to_string())
    }
}
impl From<KernelError> for Reason {
    fn from(error: KernelError) -> Self {
        Self(error.to_string())
    }
}
impl From<String> for Reason {
    fn from(text: String) -> Self {
        Self(text)
    }
}

/// An element type whose every bit pattern is a value.
pub(crate) trait Element: Copy + Default {}
impl Element for u8 {}
impl Element for i8 {}
impl Element for u16 {}
impl Element for u32 {}
impl Element for f32 {}

/// A launch's extent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) grid: (u32, u32, u32),
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
}

impl Extent {
    pub(crate) fn new(grid: (usize, usize, usize), threads: usize) -> Self {
        Self { grid: (grid.0 as u32, grid.1 as u32, grid.2 as u32), threads: threads as u32, shared_bytes: 0 }
    }
    pub(crate) fn with_shared(self, shared_bytes: usize) -> Self {
        Self { shared_bytes: shared_bytes as u32, ..self }
    }
}

/// An entry point of a [`Module`]; used only while the module is loaded, see [`Module::function`].
#[derive(Debug, Clone)]
pub(crate) struct Function {
    handle: sys::CUfunction,
    /// It waits for its predecessor by itself, so that it may be launched early.
    early: bool,
    _module: Arc<Module>,
}
// SAFETY: a handle of the driver, usable from any thread.
unsafe impl Send for Function {}

/// Loaded code.
#[derive(Debug)]
pub(crate) struct Module {
    handle: sys::CUmodule,
    driver: Arc<Driver>,
}
// SAFETY: a handle of the driver, usable from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; nothing changes after loading.
unsafe impl Sync for Module {}

impl Driver {
    /// The device of an ordinal; nothing else of the process may use its primary context differently.
    pub(crate) fn new(ordinal: usize) -> Result<Arc<Self>, DeviceError> {
        let device_name = format!("CUDA device {ordinal}");
        let fail = |reason: String| DeviceError::Failed { op: "open", device: device_name.clone(), reason };
        // SAFETY: only looks for the library; the functions behind the other calls would panic without it.
        if !unsafe { sys::is_culib_present() } {
            return Err(fail(
                "NVIDIA's driver library (libcuda.so.1) is not installed; install the driver or use the CPU"
                    .into(),
            ));
        }
        result::init().map_err(|error| fail(format!("{error}; is a GPU visible (`nvidia-smi`)?")))?;
        let count = result::device::get_count().map_err(|error| fail(error.to_string()))?;
        if ordinal >= count as usize {
            return Err(fail(format!("there are {count} devices, numbered from 0")));
        }
        let open = || -> Result<Self, DriverError> {
            let device = result::device::get(ordinal as i32)?;
            // SAFETY: the device is valid; the context is released in drop, the stream destroyed before it.
            unsafe {
                let context = result::primary_ctx::retain(device)?;
                result::ctx::set_current(context)?;
                let attribute = |which| result::device::get_attribute(device, which);
                let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
                let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
                let pools = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
                let pooled = attribute(pools)? != 0;
                let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
                Ok(Self {
                    device,
                    context,
                    stream,
                    name: result::device::get_name(device)?,
                    sm: (major * 10 + minor) as u32,
                    sm_count: attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?
                        as usize,
                    pooled,
                    limit_bytes: AtomicU64::new(u64::MAX),
                    used_bytes: AtomicU64::new(0),
                    counters: Counters::default(),
                    timings: Mutex::new(None),
                })
            }
        };
        let driver = open().map_err(|error| fail(error.to_string()))?;
        if driver.sm < 80 {
            let reason = format!("{} has compute capability {}, the kernels need 80", driver.name, driver.sm);
            return Err(fail(reason));
        }
        Ok(Arc::new(driver))
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
    /// Compute capability, times ten.
    pub(crate) fn sm(&self) -> u32 {
        self.sm
    }
    /// Streaming multiprocessors.
    pub(crate) fn sm_count(&self) -> usize {
        self.sm_count
    }
    /// Bytes allocated and not freed.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }
    /// Refuses allocations that take more than so many bytes together.
    pub(crate) fn limit(&self, bytes: u64) {
        self.limit_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Bytes that are free now, and all.
    pub(crate) fn memory(&self) -> Result<(u64, u64), DeviceError> {
        self.bind().map_err(|error| self.failed("memory", error))?;
        let (free, total) = result::mem_get_info().map_err(|error| self.failed("memory", error))?;
        Ok((free as u64, total as u64))
    }

    pub(crate) fn failed(&self, op: &'static str, reason: impl Into<Reason>) -> DeviceError {
        DeviceError::Failed { op, device: self.name.clone(), reason: reason.into().0 }
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }
    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    pub(crate) fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: the context lives as long as self.
        unsafe { result::ctx::set_current(self.context) }
    }

    /// Memory that is given back when dropped; contents are unspecified.
    pub(crate) fn allocate(self: &Arc<Self>, what: &str, bytes: u64) -> Result<Memory, DeviceError> {
        let used = self.used_bytes.load(Ordering::Relaxed);
        let out_of_memory = |free_bytes| DeviceError::OutOfMemory {
            device: self.name.clone(),
            what: what.to_owned(),
            needed_bytes: bytes,
            free_bytes,
        };
        let limit = self.limit_bytes.load(Ordering::Relaxed);
        if used.saturating_add(bytes) > limit {
            return Err(out_of_memory(limit.saturating_sub(used)));
        }
        self.bind().map_err(|error| self.failed("allocate", error))?;
        let len = bytes.max(1) as usize;
        // SAFETY: the context is current and the stream alive. Everything that uses the memory is enqueued after this.
        let allocated = unsafe {
            if self.pooled { result::malloc_async(self.stream, len) } else { result::malloc_sync(len) }
        };
        let address = match allocated {
            Ok(address) => address,
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let free = result::mem_get_info().map_or(0, |(free, _)| free as u64);
                return Err(out_of_memory(free));
            }
            Err(error) => return Err(self.failed("allocate", error)),
        };
        self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.counters.allocations.add();
        Ok(Memory { driver: Arc::clone(self), address, bytes })
    }

    /// Waits until everything enqueued is done, and reports what failed on the way.
    pub(crate) fn synchronize(&self, op: &'static str) -> Result<(), DeviceError> {
        self.bind().map_err(|error| self.failed(op, error))?;
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.stream) }.map_err(|error| self.failed(op, error))
    }

    /// Enqueues a kernel.
    pub(crate) fn launch<P: Params>(
        &self,
        op: &'static str,
        function: &Function,
        extent: Extent,
        params: &P,
    ) -> Result<(), DeviceError> {
        let (x, y, z) = extent.grid;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        if y > 65_535 || z > 65_535 {
            return Err(DeviceError::shape(op, format!("a grid of {x} x {y} x {z} blocks")));
        }
        self.bind().map_err(|error| self.failed(op, error))?;
        let started = if self.is_measuring() { Some(self.record(op)?) } else { None };
        let mut pointers = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: extent.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: extent.shared_bytes,
            hStream: self.stream,
            attrs: &raw mut early,
            numAttrs: u32::from(function.early),
        };
        // SAFETY: the kernel takes exactly one parameter, the C twin of P, which the driver copies during the call, as
        // it does the configuration and its attribute.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                function.handle,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(|error| self.failed(op, error))?;
        self.counters.launches.add();
        match started {
            Some(started) => self.add_timing(op, started),
            None => Ok(()),
        }
    }

    /// Whether launches are being measured.
    pub(crate) fn is_measuring(&self) -> bool {
        self.timings.lock().is_ok_and(|timings| timings.is_some())
    }

    /// Starts to measure every launch, or stops and returns what was measured. Each launch then waits for its end.
    pub(crate) fn measure(&self, on: bool) -> BTreeMap<&'static str, OpTiming> {
        let fresh = on.then(BTreeMap::new);
        self.timings
            .lock()
            .map_or(None, |mut timings| std::mem::replace(&mut *timings, fresh))
            .unwrap_or_default()
    }

    fn record(&self, op: &'static str) -> Result<sys::CUevent, DeviceError> {
        let record = || -> Result<sys::CUevent, DriverError> {
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?;
            // SAFETY: a fresh event on a living stream.
            unsafe { result::event::record(event, self.stream) }?;
            Ok(event)
        };
        record().map_err(|error| self.failed(op, error))
    }

    fn add_timing(&self, op: &'static str, started: sys::CUevent) -> Result<(), DeviceError> {
        let ended = self.record(op)?;
        // SAFETY: both events were recorded and are destroyed once.
        let milliseconds = unsafe {
            let elapsed =
                result::event::synchronize(ended).and_then(|()| result::event::elapsed(started, ended));
            let _ = (result::event::destroy(started), result::event::destroy(ended));
            elapsed.map_err(|error| self.failed(op, error))?
        };
        if let Ok(mut timings) = self.timings.lock()
            && let Some(timings) = timings.as_mut()
        {
            let timing: &mut OpTiming = timings.entry(op).or_default();
            timing.launches += 1;
            timing.microseconds += f64::from(milliseconds) * 1e3;
        }
        Ok(())
    }

    /// Newest CUDA that the driver runs, `(major, minor)`; `None` where it does not say.
    pub(crate) fn cuda_version() -> Option<(u32, u32)> {
        let mut version = 0;
        // SAFETY: the library was found when the driver was opened; the pointer is valid for the call.
        unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().ok()?;
        Some((version as u32 / 1000, version as u32 % 1000 / 10))
    }

    /// Time on the device between before and after what `work` enqueues, microseconds.
    pub(crate) fn elapsed_us(
        &self,
        op: &'static str,
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<f64, DeviceError> {
        self.bind().map_err(|error| self.failed(op, error))?;
        let started = self.record(op)?;
        let done = work().and_then(|()| self.record(op));
        // SAFETY: the events were recorded and are destroyed once.
        unsafe {
            let elapsed = done.and_then(|ended| {
                let elapsed =
                    result::event::synchronize(ended).and_then(|()| result::event::elapsed(started, ended));
                let _ = result::event::destroy(ended);
                elapsed.map_err(|error| self.failed(op, error))
            });
            let _ = result::event::destroy(started);
            elapsed.map(|milliseconds| f64::from(milliseconds) * 1e3)
        }
    }

    /// Multiprocessors of the device.
    pub(crate) fn multiprocessors(&self) -> Result<usize, DeviceError> {
        let which = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // SAFETY: the device is valid.
        let count = unsafe { result::device::get_attribute(self.device, which) };
        count.map(|count| count as usize).map_err(|error| self.failed("open", error))
    }

    /// Loads code.
    pub(crate) fn load(self: &Arc<Self>, code: &[u8]) -> Result<Arc<Module>, Refusal> {
        if !is_image(code) {
            return Err(Refusal { reason: "this is no ELF image, or not all of it".into(), of_code: true });
        }
        let load = || {
            self.bind()?;
            // SAFETY: the driver is told no length. It finds the image's end in the headers, which lies within the slice.
            unsafe { result::module::load_data(code.as_ptr().cast()) }
        };
        let refuse =
            |error: DriverError| Refusal { reason: error.to_string(), of_code: is_about_code(error) };
        let handle = load().map_err(refuse)?;
        self.counters.loads.add();
        Ok(Arc::new(Module { handle, driver: Arc::clone(self) }))
    }
}

/// Whether the bytes are a 64-bit little-endian ELF image with all of its header tables, which are at its end.
fn is_image(code: &[u8]) -> bool {
    let number = |at: usize, len: usize| {
        let bytes = code.get(at..at + len)?;
        Some(bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte)))
    };
    // Offset of a table, bytes of an entry, entries: Elf64_Ehdr's e_phoff, e_phentsize, e_phnum and those of sections.
    let ends_within = |offset: usize, entry_bytes: usize| {
        let table = Some((number(offset, 8)?, number(entry_bytes, 2)?, number(entry_bytes + 2, 2)?));
        table.map(|(at, bytes, entries)| at.saturating_add(bytes * entries) <= code.len() as u64)
    };
    code.starts_with(b"\x7fELF\x02\x01")
        && ends_within(0x20, 0x36) == Some(true)
        && ends_within(0x28, 0x3a) == Some(true)
}

/// Whether an error of loading is about the code: of another GPU, of a newer CUDA, or no code at all.
fn is_about_code(error: DriverError) -> bool {
    use sys::CUresult as Status;
    matches!(
        error.0,
        Status::CUDA_ERROR_INVALID_IMAGE
            | Status::CUDA_ERROR_INVALID_SOURCE
            | Status::CUDA_ERROR_INVALID_PTX
            | Status::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | Status::CUDA_ERROR_NO_BINARY_FOR_GPU
    )
}

impl Module {
    /// An entry point, with leave to use `shared_bytes` of dynamic shared memory.
    pub(crate) fn function(self: &Arc<Self>, name: &str, shared_bytes: u32) -> Result<Function, DeviceError> {
        let fail = |reason: String| self.driver.failed("load", format!("kernel {name}: {reason}"));
        self.driver.bind().map_err(|error| fail(error.to_string()))?;
        let c_name = CString::new(name).map_err(|error| fail(error.to_string()))?;
        // SAFETY: the module is alive, and the function keeps it so.
        let handle = unsafe { result::module::get_function(self.handle, c_name) };
        let handle = handle.map_err(|error| fail(error.to_string()))?;
        // Code may be loaded when a kernel is first used; asking for anything about it does that now, because a
        // recording must not.
        // SAFETY: a handle just obtained.
        unsafe {
            result::function::get_function_attribute(
                handle,
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS,
            )
        }
        .map_err(|error| fail(error.to_string()))?;
        if shared_bytes > DEFAULT_SHARED_BYTES {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a handle just obtained.
            unsafe { result::function::set_function_attribute(handle, attribute, shared_bytes as i32) }
                .map_err(|error| fail(format!("{shared_bytes} bytes of shared memory: {error}")))?;
        }
        Ok(Function { handle, early: false, _module: Arc::clone(self) })
    }

    /// [`Module::function`] for a kernel that begins with `wait_for_predecessors` of common.cuh: on devices that can,
    /// it is launched while its predecessor still runs.
    pub(crate) fn early_function(
        self: &Arc<Self>,
        name: &str,
        shared_bytes: u32,
    ) -> Result<Function, DeviceError> {
        let early = self.driver.sm >= 90;
        Ok(Function { early, ..self.function(name, shared_bytes)? })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: no function of it is left, each holds the module; the driver waits for kernels that run.
        unsafe {
            let _ = self.driver.bind();
            let _ = result::module::unload(self.handle);
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // SAFETY: every memory and module holds the driver, so nothing is left that needs stream or context.
        unsafe {
            let _ = self.bind();
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// An allocation on the device.
#[derive(Debug)]
pub(crate) struct Memory {
    driver: Arc<Driver>,
    address: u64,
    bytes: u64,
}

impl Memory {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address of some bytes that must lie within this allocation.
    pub(crate) fn range(&self, op: &'static str, offset: u64, bytes: usize) -> Result<u64, DeviceError> {
        if offset.saturating_add(bytes as u64) > self.bytes {
            let reason = format!("bytes {offset}+{bytes} of an allocation of {}", self.bytes);
            return Err(DeviceError::shape(op, reason));
        }
        self.driver.bind().map_err(|error| self.driver.failed(op, error))?;
        Ok(self.address + offset)
    }

    /// Enqueues a copy from the host; the values may be changed after the call.
    pub(crate) fn write<T: Element>(
        &self,
        op: &'static str,
        offset: u64,
        values: &[T],
    ) -> Result<(), DeviceError> {
        let address = self.range(op, offset, size_of_val(values))?;
        // SAFETY: the range was checked; a copy from pageable memory has read its source when the call returns.
        unsafe { result::memcpy_htod_async(address, values, self.driver.stream) }
            .map_err(|error| self.driver.failed(op, error))
    }

    /// Waits for everything enqueued and copies to the host.
    pub(crate) fn read<T: Element>(
        &self,
        op: &'static str,
        offset: u64,
        len: usize,
    ) -> Result<Vec<T>, DeviceError> {
        let mut values = vec![T::default(); len];
        let address = self.range(op, offset, size_of_val(&values[..]))?;
        // SAFETY: the range was checked, any bits are values of T, and the vector outlives the synchronisation.
        unsafe { result::memcpy_dtoh_async(&mut values, address, self.driver.stream) }
            .map_err(|error| self.driver.failed(op, error))?;
        self.driver.counters.blocking_reads.add();
        self.driver.synchronize(op)?;
        Ok(values)
    }

    /// Enqueues a copy within this allocation; the ranges must not overlap.
    pub(crate) fn copy_within(
        &self,
        op: &'static str,
        from: u64,
        to: u64,
        bytes: u64,
    ) -> Result<(), DeviceError> {
        let (from, to) = (self.range(op, from, bytes as usize)?, self.range(op, to, bytes as usize)?);
        // SAFETY: both ranges were checked.
        unsafe { result::memcpy_dtod_async(to, from, bytes as usize, self.driver.stream) }
            .map_err(|error| self.driver.failed(op, error))
    }

    /// Enqueues zeroing.
    pub(crate) fn clear(&self, op: &'static str, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        let address = self.range(op, offset, bytes as usize)?;
        // SAFETY: the range was checked.
        unsafe { result::memset_d8_async(address, 0, bytes as usize, self.driver.stream) }
            .map_err(|error| self.driver.failed(op, error))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `allocate` and not freed before. Kernels that still read it end first: the pool frees in
        // the stream's order, and without one the stream is waited for.
        unsafe {
            let _ = self.driver.bind();
            if self.driver.pooled {
                let _ = result::free_async(self.address, self.driver.stream);
            } else {
                let _ = result::stream::synchronize(self.driver.stream);
                let _ = result::free_sync(self.address);
            }
        }
        self.driver.used_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header whose tables end at byte 200.
    fn image() -> Vec<u8> {
        let mut image = vec![0; 200];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (image[0x20], image[0x36], image[0x38]) = (144, 56, 1);
        (image[0x28], image[0x3a], image[0x3c]) = (72, 64, 2);
        image
    }

    #[test]
    fn only_whole_images_reach_the_driver() {
        assert!(is_image(&image()));
        for len in 0..200 {
            assert!(!is_image(&image()[..len]), "{len} bytes");
        }
        assert!(!is_image(b".version 8.0"));
        let mut endless = image();
        endless[0x28..0x30].fill(0xff);
        assert!(!is_image(&endless));
    }
}
