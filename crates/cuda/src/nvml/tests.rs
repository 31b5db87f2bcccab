//! Against a made-up library: two GPUs, of which the second knows nothing beyond its name.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::library::{Functions, Handle, Memory, Process, Symbol};
use super::*;

const NOT_SUPPORTED: c_int = 3;
const UNINITIALIZED: c_int = 1;
const FIRST: usize = 16;
const SECOND: usize = 32;

/// What the made-up GPU's processes hold.
static USED_BYTES: AtomicU64 = AtomicU64::new(7 << 30);
static SHUTDOWNS: AtomicU32 = AtomicU32::new(0);

extern "C" fn init() -> c_int {
    0
}
extern "C" fn refuse() -> c_int {
    UNINITIALIZED
}
extern "C" fn shutdown() -> c_int {
    SHUTDOWNS.fetch_add(1, Ordering::SeqCst);
    0
}
extern "C" fn error_string(_status: c_int) -> *const c_char {
    c"Not as it should be".as_ptr()
}
unsafe extern "C" fn count(to: *mut u32) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { *to = 2 };
    0
}
unsafe extern "C" fn handle(index: u32, to: *mut Handle) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { *to = [FIRST, SECOND][index as usize] as Handle };
    0
}
unsafe fn write_text(text: &CStr, to: *mut c_char, room: u32) -> c_int {
    let bytes = text.to_bytes_with_nul();
    assert!(bytes.len() <= room as usize);
    // SAFETY: the caller has room for so many bytes.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()) };
    0
}
unsafe extern "C" fn version(to: *mut c_char, room: u32) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { write_text(c"570.86.15", to, room) }
}
unsafe extern "C" fn name(gpu: Handle, to: *mut c_char, room: u32) -> c_int {
    let text = if gpu as usize == FIRST { c"Made-up 9000" } else { c"Made-up 1" };
    // SAFETY: as the caller promises.
    unsafe { write_text(text, to, room) }
}
unsafe extern "C" fn uuid(gpu: Handle, to: *mut c_char, room: u32) -> c_int {
    let text = if gpu as usize == FIRST { c"GPU-1" } else { c"GPU-2" };
    // SAFETY: as the caller promises.
    unsafe { write_text(text, to, room) }
}
unsafe extern "C" fn memory(gpu: Handle, to: *mut Memory) -> c_int {
    if gpu as usize != FIRST {
        return NOT_SUPPORTED;
    }
    // SAFETY: as the caller promises.
    let memory = unsafe { &mut *to };
    assert_eq!(memory.version, 0x0200_0028);
    let used = USED_BYTES.load(Ordering::SeqCst);
    *memory = Memory { total: 24 << 30, reserved: 1 << 29, free: (24 << 30) - used, used, ..*memory };
    0
}
/// Says that three fit only when there is room for three, as the library does.
unsafe extern "C" fn compute(gpu: Handle, count: *mut u32, to: *mut Process) -> c_int {
    if gpu as usize != FIRST {
        return NOT_SUPPORTED;
    }
    let list = [(10, 1 << 30), (11, 5 << 30), (12, u64::MAX)];
    // SAFETY: as the caller promises; entries are written only where there is room.
    unsafe {
        let room = *count;
        *count = 3;
        if room < 3 {
            return 7;
        }
        for (at, (pid, used)) in list.into_iter().enumerate() {
            *to.add(at) = Process { pid, used, ..Process::default() };
        }
    }
    0
}
unsafe extern "C" fn no_processes(_gpu: Handle, count: *mut u32, _to: *mut Process) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { *count = 0 };
    0
}
unsafe extern "C" fn milliwatts(gpu: Handle, to: *mut u32) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { *to = 250_000 };
    if gpu as usize == FIRST { 0 } else { NOT_SUPPORTED }
}
unsafe extern "C" fn throttles(gpu: Handle, to: *mut u64) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { *to = 0x4 | 0x40 };
    if gpu as usize == FIRST { 0 } else { NOT_SUPPORTED }
}
unsafe extern "C" fn ecc_mode(_gpu: Handle, current: *mut u32, pending: *mut u32) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { (*current, *pending) = (1, 0) };
    0
}
unsafe extern "C" fn ecc_errors(_gpu: Handle, kind: c_int, since: c_int, to: *mut u64) -> c_int {
    assert_eq!(since, 0);
    // SAFETY: as the caller promises.
    unsafe { *to = if kind == 0 { 4 } else { 0 } };
    0
}

fn made_up(name_of: &CStr) -> Option<Symbol> {
    let address = match name_of.to_str().unwrap() {
        "nvmlInit_v2" => init as *const c_void,
        "nvmlShutdown" => shutdown as *const c_void,
        "nvmlErrorString" => error_string as *const c_void,
        "nvmlDeviceGetCount_v2" => count as *const c_void,
        "nvmlDeviceGetHandleByIndex_v2" => handle as *const c_void,
        "nvmlSystemGetDriverVersion" => version as *const c_void,
        "nvmlDeviceGetName" => name as *const c_void,
        "nvmlDeviceGetUUID" => uuid as *const c_void,
        "nvmlDeviceGetMemoryInfo_v2" => memory as *const c_void,
        "nvmlDeviceGetComputeRunningProcesses_v3" => compute as *const c_void,
        "nvmlDeviceGetGraphicsRunningProcesses_v3" => no_processes as *const c_void,
        "nvmlDeviceGetPowerManagementLimit" => milliwatts as *const c_void,
        "nvmlDeviceGetCurrentClocksThrottleReasons" => throttles as *const c_void,
        "nvmlDeviceGetEccMode" => ecc_mode as *const c_void,
        "nvmlDeviceGetTotalEccErrors" => ecc_errors as *const c_void,
        _ => return None,
    };
    Some(Symbol(address))
}

fn nvml() -> Nvml {
    Nvml::with(Functions::with(Box::new(made_up))).unwrap()
}

#[test]
fn everything_that_the_library_knows_is_read() {
    let nvml = nvml();
    assert_eq!(nvml.driver_version().unwrap(), "570.86.15");
    let gpus = nvml.gpus().unwrap();
    let gpu = &gpus[0];
    assert_eq!((gpu.name.as_str(), gpu.uuid.as_str()), ("Made-up 9000", "GPU-1"));
    let memory = gpu.memory.unwrap();
    assert_eq!((memory.total_bytes, memory.reserved_bytes), (24 << 30, 1 << 29));
    let holder = |pid, bytes| MemoryHolder { pid, bytes };
    let holders = vec![holder(11, Some(5 << 30)), holder(10, Some(1 << 30)), holder(12, None)];
    assert_eq!(gpu.holders.clone().unwrap(), holders);
    let power = PowerStatus { limit_w: 250.0, default_limit_w: None, draw_w: None };
    assert_eq!(gpu.power.unwrap(), power);
    assert_eq!(gpu.throttles.clone().unwrap(), [Throttle::PowerLimit, Throttle::HardwareHeat]);
    let ecc = gpu.ecc.unwrap();
    assert_eq!((ecc.enabled, ecc.pending, ecc.corrected_errors), (true, false, Some(4)));
}

#[test]
fn what_a_gpu_or_a_library_does_not_have_is_none() {
    let gpus = nvml().gpus().unwrap();
    assert_eq!(gpus.len(), 2);
    let gpu = &gpus[1];
    assert_eq!(gpu.name, "Made-up 1");
    assert_eq!((gpu.memory, gpu.holders.clone(), gpu.power, gpu.link), (None, None, None, None));
    assert_eq!((gpu.clock_mhz, gpu.persistence, gpu.divided), (None, None, None));
}

#[test]
fn a_library_that_refuses_is_an_error_in_its_own_words() {
    let functions = Functions::with(Box::new(|name| {
        if name == c"nvmlInit_v2" { Some(Symbol(refuse as *const c_void)) } else { made_up(name) }
    }));
    let message = Nvml::with(functions).unwrap_err().to_string();
    assert_eq!(message, "nvmlInit_v2: Not as it should be");
    let message = Nvml::with(Functions::with(Box::new(|_| None))).unwrap_err().to_string();
    assert_eq!(message, "the management library has no nvmlInit_v2");
    let message = nvml().used_bytes("GPU-3").unwrap_err().to_string();
    assert_eq!(message, "no GPU GPU-3");
}

/// Alone with the counter of shutdowns and the memory in use.
#[test]
fn the_peak_is_seen_and_the_library_shut_down_after_its_last_user() {
    let nvml = nvml();
    let watch = PeakMemory::watch(&nvml, "GPU-1").unwrap();
    let start = watch.start_bytes();
    USED_BYTES.store(start + (3 << 20), Ordering::SeqCst);
    // The last look comes after the call.
    assert_eq!(watch.stop().unwrap(), start + (3 << 20));
    let clone = nvml.clone();
    drop(nvml);
    assert_eq!(clone.used_bytes("GPU-1").unwrap(), start + (3 << 20));
    let before = SHUTDOWNS.load(Ordering::SeqCst);
    drop(clone);
    assert!(SHUTDOWNS.load(Ordering::SeqCst) > before);
    assert!(PeakMemory::watch(&self::nvml(), "GPU-3").is_err());
}
