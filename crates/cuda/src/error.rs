use std::path::PathBuf;

use thiserror::Error;

/// Why a kernel could not be had.
#[derive(Debug, Clone, Error)]
pub enum KernelError {
    /// No NVRTC library, and neither pack nor cache has the kernel.
    #[error(
        "no compiled kernels for {unit} on sm_{sm} and no NVRTC to compile them ({reason}); `pip install \
         nvidia-cuda-nvrtc-cu12` brings one that every driver from CUDA 12 on understands, and QWILL_NVRTC can name it"
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
    /// There is no NVRTC, or none whose code can be used.
    #[error("{}", describe_search(.looked_at, .refused))]
    NoneFits {
        /// Where was looked.
        looked_at: String,
        /// What was found and why it does not fit, a sentence each.
        refused: Vec<String>,
    },
    /// The driver does not take code that was compiled for it, or is in trouble.
    #[error("the driver does not load {unit} for sm_{sm}: {reason}")]
    Refused {
        /// The unit.
        unit: String,
        /// Compute capability, times ten.
        sm: u32,
        /// The driver's words.
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

fn describe_search(looked_at: &str, refused: &[String]) -> String {
    if refused.is_empty() {
        return format!("no NVRTC found in {looked_at}");
    }
    format!("no NVRTC that fits: {}; looked in {looked_at}", refused.join("; "))
}
