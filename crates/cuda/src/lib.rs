//! The CUDA device: hand-written kernels behind [`qwill_device::Device`].
//!
//! Builds without any CUDA software. At run time it needs NVIDIA's driver; the kernels come from a pack built into the
//! binary, from a cache on disk, or from NVRTC, in this order ([`KernelStore`]). Whatever is missing is a
//! [`qwill_device::DeviceError`] with a hint.
//!
//! Numerics: activations are bfloat16; sums, norms, softmax and recurrent states are f32; every
//! sum has one order that depends on the shapes alone.

mod ceilings;
mod copies;
mod cubin_cache;
mod device;
mod driver;
mod error;
mod graph;
mod host_memory;
mod launch;
mod nvml;
mod nvrtc;
mod nvrtc_search;
mod pack;
mod pinned;
mod probe;
mod staging;
mod store;
mod unit;
mod usage;

pub use ceilings::{Ceilings, ReadRate};
pub use cubin_cache::{CacheContent, CubinCache};
pub use device::{
    Activity, CudaBuffer, CudaCache, CudaDevice, CudaGauge, CudaHostStore, CudaMatrix, CudaMemory,
    CudaOptions, CudaVector, TYPICAL_DRIVER_BYTES, buffer_bytes, host_staging_bytes, matrix_bytes,
    scratch_bytes,
};
pub use driver::OpTiming;
pub use error::KernelError;
pub use nvml::{
    EccStatus, GpuStatus, MemoryHolder, MemoryUse, Nvml, NvmlError, PcieLink, PeakMemory, PowerStatus,
    Throttle,
};
pub use nvrtc::{Compiled, Nvrtc};
pub use nvrtc_search::{CompileTarget, CudaVersion};
pub use pack::{DamagedPack, Pack};
pub use probe::{DriverFacts, GpuFacts, LEAST_SM, ProbeError, driver_facts};
pub use store::{KernelOrigin, KernelStore, Refusal};
pub use unit::{Unit, UnitBuild, fixed_units, gdn_units, units_of};
pub use usage::{Budget, Usage, parse_usage};
