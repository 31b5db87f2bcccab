use std::path::PathBuf;

use thiserror::Error;

/// Why a kernel could not be had.
#[derive(Debug, Clone, Error)]
pub enum KernelError {
    /// No NVRTC library, and neither pack nor cache has the kernel.
    #[error(
        "no compiled kernels for {unit} on sm_{sm} and no NVRTC to compile them ({reason}); install it, for example \
         with `pip install nvidia-cuda-nvrtc`, and name the library in QWILL_NVRTC"
    )]
    NoCompiler {
        /// The unit that was wanted.
        unit: String,
        /// Compute capability, times ten.
        sm: u32,
        /// What was tried.
        reason: String,
    },
    /// NVRTC refused the source or the architecture.
    #[error("NVRTC {version} could not compile {unit} for sm_{sm}: {log}")]
    Compile {
        /// The unit.
        unit: String,
        /// Compute capability, times ten.
        sm: u32,
        /// Version of the compiler.
        version: String,
        /// The compiler's own words.
        log: String,
    },
    /// A function of the NVRTC library is missing or failed.
    #[error("NVRTC at {library}: {reason}")]
    Library {
        /// Path or name of the library.
        library: String,
        /// What happened.
        reason: String,
    },
    /// The cache directory cannot be written.
    #[error("kernel cache {path}: {reason}")]
    Cache {
        /// File or directory.
        path: PathBuf,
        /// The operating system's words.
        reason: String,
    },
}
