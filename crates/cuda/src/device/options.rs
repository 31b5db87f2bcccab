//! How a GPU is opened.

use std::path::PathBuf;

use qwill_device::Activations;

use crate::CubinCache;

/// How to open a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaOptions {
    /// Which GPU, as the driver numbers them.
    pub ordinal: usize,
    /// Bytes that may be taken, the driver's own included; `None`: what is free at start.
    pub memory_budget_bytes: Option<u64>,
    /// Activation numerics; only [`Activations::Bf16`] so far.
    pub activations: Activations,
    /// Where compiled kernels are kept; `None` keeps none.
    pub kernel_cache_directory: Option<PathBuf>,
}

impl CudaOptions {
    /// The defaults, with kernels kept in `QWILL_KERNEL_CACHE` where that is set: for tests and examples, which have no
    /// flag for it.
    pub fn from_environment() -> Self {
        let directory = std::env::var_os("QWILL_KERNEL_CACHE").map(PathBuf::from);
        let defaults = Self::default();
        Self { kernel_cache_directory: directory.or(defaults.kernel_cache_directory), ..defaults }
    }
}

impl Default for CudaOptions {
    /// The first GPU, all its free memory, the user's cache.
    fn default() -> Self {
        Self {
            ordinal: 0,
            memory_budget_bytes: None,
            activations: Activations::Bf16,
            kernel_cache_directory: CubinCache::default_directory(),
        }
    }
}
