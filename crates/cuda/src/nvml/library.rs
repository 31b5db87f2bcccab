//! The C functions of NVML, each looked up when it is called: an older library lacks some, which is no reason to do
//! without the others.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;

use libloading::Library;

use super::NvmlError;

/// The library's name for a GPU.
pub(super) type Handle = *mut c_void;

/// `NVML_ERROR_INSUFFICIENT_SIZE`.
const INSUFFICIENT_SIZE: c_int = 7;

/// Longest name, version or identifier that the library writes, its zero included (`NVML_DEVICE_NAME_V2_BUFFER_SIZE`
/// is the largest, 96).
const TEXT_BYTES: usize = 96;

/// Attempts to read a list that grows meanwhile.
const LIST_ATTEMPTS: usize = 5;

/// The address of a function.
#[derive(Clone, Copy)]
pub(super) struct Symbol(pub(super) *const c_void);

/// Finds functions by name: in the library, or in a table of a test.
pub(super) type Lookup = Box<dyn Fn(&CStr) -> Option<Symbol> + Send + Sync>;

/// A struct or number that any bytes are a value of.
///
/// # Safety
/// Every bit pattern is a value, and a struct is `repr(C)` and equals its C twin.
pub(super) unsafe trait Plain: Copy + Default {}
// SAFETY: a number.
unsafe impl Plain for u32 {}
// SAFETY: a number.
unsafe impl Plain for u64 {}
// SAFETY: repr(C), numbers only; the size is checked below.
unsafe impl Plain for Memory {}
// SAFETY: repr(C), numbers only; the size is checked below.
unsafe impl Plain for Process {}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Memory {
    pub(super) version: u32,
    pub(super) total: u64,
    pub(super) reserved: u64,
    pub(super) free: u64,
    pub(super) used: u64,
}

/// `nvmlProcessInfo_t` of the functions that end in `_v3`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) used: u64,
    pub(super) gpu_instance: u32,
    pub(super) compute_instance: u32,
}

const _: () = assert!(size_of::<Memory>() == 40 && size_of::<Process>() == 24);

/// `nvmlMemory_v2`: the struct's size and its version in the top byte.
const MEMORY_VERSION: u32 = size_of::<Memory>() as u32 | 2 << 24;

/// A function `status f(handle, T *)`.
pub(super) struct Getter<T>(&'static CStr, PhantomData<T>);
/// A function `status f(handle, int, T *)`.
pub(super) struct GetterOf<T>(&'static CStr, PhantomData<T>);

impl<T> Getter<T> {
    const fn new(name: &'static CStr) -> Self {
        Self(name, PhantomData)
    }
}
impl<T> GetterOf<T> {
    const fn new(name: &'static CStr) -> Self {
        Self(name, PhantomData)
    }
}

pub(super) const POWER_LIMIT: Getter<u32> = Getter::new(c"nvmlDeviceGetPowerManagementLimit");
pub(super) const POWER_DEFAULT: Getter<u32> = Getter::new(c"nvmlDeviceGetPowerManagementDefaultLimit");
pub(super) const POWER_DRAW: Getter<u32> = Getter::new(c"nvmlDeviceGetPowerUsage");
pub(super) const THROTTLES: Getter<u64> = Getter::new(c"nvmlDeviceGetCurrentClocksThrottleReasons");
pub(super) const PERSISTENCE: Getter<u32> = Getter::new(c"nvmlDeviceGetPersistenceMode");
pub(super) const LINK_GENERATION: Getter<u32> = Getter::new(c"nvmlDeviceGetCurrPcieLinkGeneration");
pub(super) const LINK_WIDTH: Getter<u32> = Getter::new(c"nvmlDeviceGetCurrPcieLinkWidth");
pub(super) const LINK_MOST_GENERATION: Getter<u32> = Getter::new(c"nvmlDeviceGetMaxPcieLinkGeneration");
pub(super) const LINK_MOST_WIDTH: Getter<u32> = Getter::new(c"nvmlDeviceGetMaxPcieLinkWidth");
/// Of a clock: 1 the multiprocessors', 2 the memory's; MHz.
pub(super) const CLOCK: GetterOf<u32> = GetterOf::new(c"nvmlDeviceGetClockInfo");
pub(super) const MOST_CLOCK: GetterOf<u32> = GetterOf::new(c"nvmlDeviceGetMaxClockInfo");
/// Of a sensor: 0 the chip's; degrees Celsius.
pub(super) const TEMPERATURE: GetterOf<u32> = GetterOf::new(c"nvmlDeviceGetTemperature");
/// Current and pending mode.
pub(super) const ECC_MODE: &CStr = c"nvmlDeviceGetEccMode";
pub(super) const MIG_MODE: &CStr = c"nvmlDeviceGetMigMode";
pub(super) const COMPUTE_PROCESSES: &CStr = c"nvmlDeviceGetComputeRunningProcesses_v3";
pub(super) const GRAPHICS_PROCESSES: &CStr = c"nvmlDeviceGetGraphicsRunningProcesses_v3";
pub(super) const DRIVER_VERSION: &CStr = c"nvmlSystemGetDriverVersion";
pub(super) const NAME: &CStr = c"nvmlDeviceGetName";
pub(super) const UUID: &CStr = c"nvmlDeviceGetUUID";

/// The functions, wherever they come from.
pub(super) struct Functions {
    lookup: Lookup,
}

impl Functions {
    /// The driver's library.
    pub(super) fn load() -> Result<Self, NvmlError> {
        // SAFETY: the library's initialisers have no preconditions.
        let library = unsafe { Library::new("libnvidia-ml.so.1") }
            .map_err(|error| NvmlError::NotInstalled { reason: error.to_string() })?;
        Ok(Self::with(Box::new(move |name| {
            // SAFETY: only the address is taken; it is called through the type that nvml.h gives it, below.
            let symbol = unsafe { library.get::<*const c_void>(name.to_bytes_with_nul()) };
            symbol.ok().map(|symbol| Symbol(*symbol))
        })))
    }

    pub(super) fn with(lookup: Lookup) -> Self {
        Self { lookup }
    }

    /// A function by name.
    ///
    /// # Safety
    /// `F` is the function's type in nvml.h: an `unsafe extern "C" fn`.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, NvmlError> {
        const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
        let missing = || NvmlError::Missing { function: name.to_string_lossy().into_owned() };
        let symbol = (self.lookup)(name).ok_or_else(missing)?;
        // SAFETY: a function's address, of the size that was checked; the caller answers for its type.
        Ok(unsafe { std::mem::transmute_copy(&symbol.0) })
    }

    fn check(&self, name: &CStr, status: c_int) -> Result<(), NvmlError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the type is nvml.h's; it returns a static string for every status.
        let reason = unsafe {
            self.function::<unsafe extern "C" fn(c_int) -> *const c_char>(c"nvmlErrorString")
                .map(|text| CStr::from_ptr(text(status)).to_string_lossy().into_owned())
        };
        let reason = reason.unwrap_or_else(|_| format!("status {status}"));
        Err(NvmlError::Failed { function: name.to_string_lossy().into_owned(), reason })
    }

    /// `nvmlInit_v2` or `nvmlShutdown`.
    pub(super) fn run(&self, name: &'static CStr) -> Result<(), NvmlError> {
        // SAFETY: both take nothing and return a status.
        let status = unsafe { self.function::<unsafe extern "C" fn() -> c_int>(name)?() };
        self.check(name, status)
    }

    /// Number of GPUs.
    pub(super) fn count(&self) -> Result<u32, NvmlError> {
        let (name, mut count) = (c"nvmlDeviceGetCount_v2", 0);
        // SAFETY: the type is nvml.h's; the pointer is valid for the call.
        let status =
            unsafe { self.function::<unsafe extern "C" fn(*mut u32) -> c_int>(name)?(&raw mut count) };
        self.check(name, status).map(|()| count)
    }

    /// The handle of a GPU by the library's own numbering.
    pub(super) fn handle(&self, index: u32) -> Result<Handle, NvmlError> {
        let (name, mut handle) = (c"nvmlDeviceGetHandleByIndex_v2", std::ptr::null_mut());
        // SAFETY: the type is nvml.h's; the pointer is valid for the call.
        let status = unsafe {
            self.function::<unsafe extern "C" fn(u32, *mut Handle) -> c_int>(name)?(index, &raw mut handle)
        };
        self.check(name, status).map(|()| handle)
    }

    pub(super) fn get<T: Plain>(&self, device: Handle, getter: &Getter<T>) -> Result<T, NvmlError> {
        let mut value = T::default();
        // SAFETY: the constants above pair names with the types of nvml.h; handle and pointer are valid for the call.
        let status = unsafe {
            self.function::<unsafe extern "C" fn(Handle, *mut T) -> c_int>(getter.0)?(device, &raw mut value)
        };
        self.check(getter.0, status).map(|()| value)
    }

    pub(super) fn get_of<T: Plain>(
        &self,
        device: Handle,
        getter: &GetterOf<T>,
        which: c_int,
    ) -> Result<T, NvmlError> {
        let mut value = T::default();
        // SAFETY: as in `get`.
        let status = unsafe {
            self.function::<unsafe extern "C" fn(Handle, c_int, *mut T) -> c_int>(getter.0)?(
                device,
                which,
                &raw mut value,
            )
        };
        self.check(getter.0, status).map(|()| value)
    }

    /// Current and pending value of [`ECC_MODE`] or [`MIG_MODE`].
    pub(super) fn mode(&self, device: Handle, name: &'static CStr) -> Result<(u32, u32), NvmlError> {
        let (mut current, mut pending) = (0, 0);
        // SAFETY: both functions have this type in nvml.h; handle and pointers are valid for the call.
        let status = unsafe {
            self.function::<unsafe extern "C" fn(Handle, *mut u32, *mut u32) -> c_int>(name)?(
                device,
                &raw mut current,
                &raw mut pending,
            )
        };
        self.check(name, status).map(|()| (current, pending))
    }

    /// Memory errors since the driver was loaded: corrected ones (0) or uncorrected ones (1).
    pub(super) fn ecc_errors(&self, device: Handle, kind: c_int) -> Result<u64, NvmlError> {
        const SINCE_LOADED: c_int = 0;
        let (name, mut count) = (c"nvmlDeviceGetTotalEccErrors", 0);
        // SAFETY: the type is nvml.h's; handle and pointer are valid for the call.
        let status = unsafe {
            self.function::<unsafe extern "C" fn(Handle, c_int, c_int, *mut u64) -> c_int>(name)?(
                device,
                kind,
                SINCE_LOADED,
                &raw mut count,
            )
        };
        self.check(name, status).map(|()| count)
    }

    /// Memory of a GPU; what the driver itself reserves is apart from what is used.
    pub(super) fn memory(&self, device: Handle) -> Result<Memory, NvmlError> {
        let name = c"nvmlDeviceGetMemoryInfo_v2";
        let mut memory = Memory { version: MEMORY_VERSION, ..Memory::default() };
        // SAFETY: the type is nvml.h's; the struct names its version, handle and pointer are valid for the call.
        let status = unsafe {
            self.function::<unsafe extern "C" fn(Handle, *mut Memory) -> c_int>(name)?(
                device,
                &raw mut memory,
            )
        };
        self.check(name, status).map(|()| memory)
    }

    /// The list of [`COMPUTE_PROCESSES`] or [`GRAPHICS_PROCESSES`].
    pub(super) fn processes(&self, device: Handle, name: &'static CStr) -> Result<Vec<Process>, NvmlError> {
        type List = unsafe extern "C" fn(Handle, *mut u32, *mut Process) -> c_int;
        // SAFETY: both functions have this type in nvml.h.
        let list = unsafe { self.function::<List>(name) }?;
        let mut processes: Vec<Process> = Vec::new();
        for _ in 0..LIST_ATTEMPTS {
            let mut count = processes.len() as u32;
            // SAFETY: the list has room for `count` entries; handle and pointers are valid for the call.
            let status = unsafe { list(device, &raw mut count, processes.as_mut_ptr()) };
            if status != INSUFFICIENT_SIZE {
                self.check(name, status)?;
                processes.truncate(count as usize);
                return Ok(processes);
            }
            // The count is now that of the moment; some more may come until the next call.
            processes.resize(count as usize + 8, Process::default());
        }
        self.check(name, INSUFFICIENT_SIZE)?;
        Ok(processes)
    }

    /// Text of a GPU: [`NAME`] or [`UUID`].
    pub(super) fn text(&self, device: Handle, name: &'static CStr) -> Result<String, NvmlError> {
        let mut text = [0u8; TEXT_BYTES];
        // SAFETY: both functions have this type in nvml.h; handle and buffer are valid for the call.
        let status = unsafe {
            self.function::<unsafe extern "C" fn(Handle, *mut c_char, u32) -> c_int>(name)?(
                device,
                text.as_mut_ptr().cast(),
                TEXT_BYTES as u32,
            )
        };
        self.check(name, status).map(|()| until_zero(&text))
    }

    /// Text of the system: [`DRIVER_VERSION`].
    pub(super) fn system_text(&self, name: &'static CStr) -> Result<String, NvmlError> {
        let mut text = [0u8; TEXT_BYTES];
        // SAFETY: the type is nvml.h's; the buffer is valid for the call.
        let status = unsafe {
            self.function::<unsafe extern "C" fn(*mut c_char, u32) -> c_int>(name)?(
                text.as_mut_ptr().cast(),
                TEXT_BYTES as u32,
            )
        };
        self.check(name, status).map(|()| until_zero(&text))
    }
}

impl std::fmt::Debug for Functions {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Functions")
    }
}

fn until_zero(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
