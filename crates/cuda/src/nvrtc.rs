//! NVRTC through its stable C functions: any version, code for a real architecture, the log also on success.
#![expect(unsafe_code, reason = "calls into a C library loaded at run time")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::KernelError;
use crate::nvrtc_search::CudaVersion;
use crate::unit::{HEADERS, UnitBuild};

type Program = *mut c_void;
type CreateProgram = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type CompileProgram = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type GetSize = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type GetBytes = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// A loaded NVRTC library.
#[derive(Debug)]
pub struct Nvrtc {
    functions: Functions,
    release: CudaVersion,
    version: String,
    name: String,
    /// The built-in headers' library, which NVRTC would look for by name only. After the functions' own library.
    _builtins: Option<Library>,
}

#[derive(Debug)]
struct Functions {
    create: CreateProgram,
    compile: CompileProgram,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    log_size: GetSize,
    log: GetBytes,
    cubin_size: GetSize,
    cubin: GetBytes,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    /// Keeps the functions above loaded.
    library: Library,
}

/// Code of a unit and what the compiler said about it.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// The ELF image.
    pub cubin: Vec<u8>,
    /// Registers, spills and shared memory of each kernel, in the words of the assembler.
    pub log: String,
}

impl Nvrtc {
    /// A library by path or by a name that the system's loader knows.
    pub fn open(path: &Path) -> Result<Self, KernelError> {
        let name = path.display().to_string();
        let fail = |reason: String| KernelError::Library { library: name.clone(), reason };
        let builtins = builtins_beside(path);
        // SAFETY: NVRTC's initialisers have no preconditions; a file of another kind is refused by the symbols below.
        let library = unsafe { Library::new(path) }.map_err(|error| fail(error.to_string()))?;
        let functions = Functions::load(library).map_err(|error| fail(error.to_string()))?;
        let (major, minor) = functions.version().map_err(fail)?;
        let release = (major as u32, minor as u32);
        Ok(Self { functions, release, version: format!("{major}.{minor}"), name, _builtins: builtins })
    }

    /// `(major, minor)`.
    pub fn release(&self) -> CudaVersion {
        self.release
    }

    /// `major.minor`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The library's name as it was asked for, or the file that the system found for it.
    pub fn file(&self) -> PathBuf {
        let asked = Path::new(&self.name);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let mapped = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
        let of_name = |file: &&Path| {
            let (file, asked) = (file.file_name().unwrap_or_default(), asked.file_name().unwrap_or_default());
            file.to_string_lossy().starts_with(&*asked.to_string_lossy())
        };
        mapped.filter(|_| !asked.is_absolute()).find(of_name).unwrap_or(asked).to_owned()
    }

    /// Compute capabilities (times ten) that it compiles for, ascending; empty where it does not say.
    pub fn architectures(&self) -> Vec<u32> {
        self.functions.architectures().unwrap_or_default().into_iter().map(|sm| sm as u32).collect()
    }

    /// Compiles a unit for a compute capability (times ten).
    pub fn compile(&self, build: &UnitBuild, sm: u32) -> Result<Compiled, KernelError> {
        // The instructions of 9.0 alone (wgmma) have to be asked for.
        let own = if sm == 90 { "a" } else { "" };
        let options = [
            format!("--gpu-architecture=sm_{sm}{own}"),
            "--std=c++17".to_owned(),
            "--ptxas-options=-v".to_owned(),
        ];
        let defines = build.defines.iter().map(|(name, value)| format!("-D{name}={value}"));
        let options: Vec<String> = options.into_iter().chain(defines).collect();
        let program = OpenProgram::create(self, build)?;
        let outcome = program.compile(&options);
        let log = program.text(self.functions.log_size, self.functions.log);
        outcome.map_err(|reason| KernelError::Compile {
            unit: build.describe(),
            sm,
            version: self.version.clone(),
            log: format!("{reason}\n{log}"),
        })?;
        let cubin = program.bytes(self.functions.cubin_size, self.functions.cubin);
        let cubin = cubin.map_err(|reason| KernelError::Library { library: self.name.clone(), reason })?;
        Ok(Compiled { cubin, log })
    }
}

/// Loads the library of built-in headers from the directory of a library given by path.
fn builtins_beside(path: &Path) -> Option<Library> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty())?;
    let is_builtins = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc-builtins.so"))
    };
    let found = std::fs::read_dir(directory)
        .ok()?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(is_builtins)?;
    // SAFETY: a library of data; it has no initialisers with preconditions.
    unsafe { Library::new(found) }.ok()
}

impl Functions {
    fn load(library: Library) -> Result<Self, libloading::Error> {
        // SAFETY: names and types are those of nvrtc.h, unchanged since CUDA 11.2.
        unsafe {
            Ok(Self {
                create: *library.get(b"nvrtcCreateProgram\0")?,
                compile: *library.get(b"nvrtcCompileProgram\0")?,
                destroy: *library.get(b"nvrtcDestroyProgram\0")?,
                log_size: *library.get(b"nvrtcGetProgramLogSize\0")?,
                log: *library.get(b"nvrtcGetProgramLog\0")?,
                cubin_size: *library.get(b"nvrtcGetCUBINSize\0")?,
                cubin: *library.get(b"nvrtcGetCUBIN\0")?,
                error: *library.get(b"nvrtcGetErrorString\0")?,
                library,
            })
        }
    }

    fn version(&self) -> Result<(c_int, c_int), String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the type is that of nvrtc.h; both pointers are valid for the call.
        let status = unsafe {
            let version: libloading::Symbol<'_, unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int> =
                self.library.get(b"nvrtcVersion\0").map_err(|error| error.to_string())?;
            version(&raw mut major, &raw mut minor)
        };
        self.check(status)?;
        Ok((major, minor))
    }

    fn architectures(&self) -> Option<Vec<c_int>> {
        type Get = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: the types are those of nvrtc.h; the list has the length that the library named.
        unsafe {
            let count = self.library.get::<Get>(b"nvrtcGetNumSupportedArchs\0").ok()?;
            let list = self.library.get::<Get>(b"nvrtcGetSupportedArchs\0").ok()?;
            let mut len = 0;
            self.check(count(&raw mut len)).ok()?;
            let mut architectures = vec![0; usize::try_from(len).ok()?];
            self.check(list(architectures.as_mut_ptr())).ok()?;
            Some(architectures)
        }
    }

    fn check(&self, status: c_int) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string for every status.
        let text = unsafe { CStr::from_ptr((self.error)(status)) };
        Err(text.to_string_lossy().into_owned())
    }
}

/// A program that is destroyed when dropped.
struct OpenProgram<'a> {
    functions: &'a Functions,
    program: Program,
}

impl<'a> OpenProgram<'a> {
    fn create(nvrtc: &'a Nvrtc, build: &UnitBuild) -> Result<Self, KernelError> {
        let fail = |reason: String| KernelError::Library { library: nvrtc.name.clone(), reason };
        let text = |text: &str| CString::new(text).map_err(|error| fail(error.to_string()));
        let (source, name) = (text(build.unit.source)?, text(&format!("{}.cu", build.unit.name))?);
        let texts = |texts: Vec<&str>| texts.into_iter().map(text).collect::<Result<Vec<_>, _>>();
        let contents = texts(HEADERS.iter().map(|header| header.1).collect())?;
        let names = texts(HEADERS.iter().map(|header| header.0).collect())?;
        let pointers =
            |texts: &[CString]| -> Vec<*const c_char> { texts.iter().map(|text| text.as_ptr()).collect() };
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: all strings outlive the call, which copies them; both arrays have as many as there are headers.
        let status = unsafe {
            (nvrtc.functions.create)(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as c_int,
                pointers(&contents).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        nvrtc.functions.check(status).map_err(fail)?;
        Ok(Self { functions: &nvrtc.functions, program })
    }

    fn compile(&self, options: &[String]) -> Result<(), String> {
        let options: Vec<CString> =
            options.iter().filter_map(|option| CString::new(option.as_str()).ok()).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive and the strings outlive the call.
        let status =
            unsafe { (self.functions.compile)(self.program, pointers.len() as c_int, pointers.as_ptr()) };
        self.functions.check(status)
    }

    fn bytes(&self, size: GetSize, get: GetBytes) -> Result<Vec<u8>, String> {
        let mut len = 0;
        // SAFETY: the program is alive; the buffer has the length that the library asked for.
        unsafe {
            self.functions.check(size(self.program, &raw mut len))?;
            let mut bytes = vec![0u8; len];
            self.functions.check(get(self.program, bytes.as_mut_ptr().cast()))?;
            Ok(bytes)
        }
    }

    fn text(&self, size: GetSize, get: GetBytes) -> String {
        let bytes = self.bytes(size, get).unwrap_or_default();
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
    }
}

impl Drop for OpenProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: created by the same library and not destroyed before. A failure leaks memory, no more.
        let _ = unsafe { (self.functions.destroy)(&raw mut self.program) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_it() {
        let message = Nvrtc::open(Path::new("/nowhere/libnvrtc.so.13")).unwrap_err().to_string();
        assert!(message.contains("/nowhere/libnvrtc.so.13"), "{message}");
    }

    #[test]
    fn another_library_is_an_error() {
        let message = Nvrtc::open(Path::new("libc.so.6")).unwrap_err().to_string();
        assert!(message.contains("libc.so.6"), "{message}");
    }
}
