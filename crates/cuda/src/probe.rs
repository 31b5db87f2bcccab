//! What the driver shows, without opening a GPU.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use cudarc::driver::{DriverError, result, sys};
use thiserror::Error;

use crate::CudaVersion;
use crate::driver::Driver;

/// Why the driver shows nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ProbeError {
    /// There is no driver.
    #[error("NVIDIA's driver library (libcuda.so.1) is not installed")]
    NoDriver,
    /// The driver refuses to start.
    #[error("the driver does not start: {0}")]
    Refused(String),
}

/// The driver and the GPUs that it shows to this process.
#[derive(Debug, Clone, PartialEq)]
pub struct DriverFacts {
    /// Newest CUDA that it runs, `(major, minor)`.
    pub cuda_version: CudaVersion,
    /// By ordinal.
    pub gpus: Vec<GpuFacts>,
}

/// A GPU that the driver shows.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuFacts {
    /// The product.
    pub name: String,
    /// Identifier, as NVML writes it.
    pub uuid: String,
    /// Compute capability, times ten.
    pub sm: u32,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// What its memory could deliver by clock and width; `None` where the driver does not say.
    pub memory_bytes_per_s: Option<f64>,
}

/// Lowest compute capability, times ten, that the kernels are written for.
pub const LEAST_SM: u32 = 80;

/// Asks the driver.
pub fn driver_facts() -> Result<DriverFacts, ProbeError> {
    // SAFETY: only looks for the library; the functions behind the other calls would panic without it.
    if !unsafe { sys::is_culib_present() } {
        return Err(ProbeError::NoDriver);
    }
    let refused = |error: DriverError| ProbeError::Refused(error.to_string());
    result::init().map_err(refused)?;
    let cuda_version = Driver::cuda_version().ok_or_else(|| ProbeError::Refused("no version".to_owned()))?;
    let count = result::device::get_count().map_err(refused)?;
    let gpus = (0..count).map(gpu_facts).collect::<Result<_, _>>().map_err(refused)?;
    Ok(DriverFacts { cuda_version, gpus })
}

fn gpu_facts(ordinal: i32) -> Result<GpuFacts, DriverError> {
    let gpu = result::device::get(ordinal)?;
    // SAFETY: the GPU is valid.
    let attribute = |which| unsafe { result::device::get_attribute(gpu, which) };
    let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let processors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let uuid = result::device::get_uuid(gpu)?;
    let clock_khz = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0);
    let width_bits =
        attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0);
    // Two transfers a cycle.
    let memory_bytes_per_s = 2.0 * f64::from(clock_khz) * 1e3 * f64::from(width_bits) / 8.0;
    Ok(GpuFacts {
        name: result::device::get_name(gpu)?,
        uuid: spell_uuid(uuid.bytes.map(|byte| byte as u8)),
        sm: (major * 10 + minor) as u32,
        // SAFETY: the GPU is valid.
        memory_bytes: unsafe { result::device::total_mem(gpu) }? as u64,
        multiprocessors: processors as u32,
        memory_bytes_per_s: (memory_bytes_per_s > 0.0).then_some(memory_bytes_per_s),
    })
}

/// `GPU-00112233-4455-6677-8899-aabbccddeeff`.
fn spell_uuid(bytes: [u8; 16]) -> String {
    let digits = crate::unit::hex(&bytes);
    let groups = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    format!("GPU-{}", groups.join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_is_spelt_as_the_management_library_does() {
        let bytes = std::array::from_fn(|at| (at * 0x11) as u8);
        assert_eq!(spell_uuid(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn a_machine_without_a_driver_is_an_error_and_one_with_a_driver_has_facts() {
        match driver_facts() {
            Ok(facts) => {
                assert!(facts.cuda_version.0 >= 11, "{facts:?}");
                assert!(facts.gpus.iter().all(|gpu| gpu.memory_bytes > 0), "{facts:?}");
            }
            Err(ProbeError::NoDriver) => assert!(std::env::var_os("QWILL_REQUIRE_GPU").is_none()),
            Err(ProbeError::Refused(reason)) => assert!(!reason.is_empty()),
        }
    }
}
