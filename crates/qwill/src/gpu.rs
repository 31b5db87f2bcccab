//! Finding a GPU and opening it.

use qwill_cuda::{CubinCache, CudaDevice, CudaOptions, DriverFacts, GpuFacts, LEAST_SM, ProbeError};
use qwill_device::{Activations, DeviceError, Geometry, KvType, StateType};
use thiserror::Error;

use crate::args::DeviceArgs;

/// Why a GPU does not serve.
#[derive(Debug, Error)]
pub(crate) enum GpuError {
    /// The driver shows nothing.
    #[error("no GPU can be used: {0}")]
    Driver(ProbeError),
    /// The driver does not show this one.
    #[error("there is no GPU {ordinal}: the driver shows {}", listed(.names))]
    NoSuchGpu { ordinal: usize, names: Vec<String> },
    /// The kernels are not for it.
    #[error("GPU {ordinal} ({name}) has compute capability {}, the kernels need {}", dotted(*.sm), dotted(LEAST_SM))]
    TooOld { ordinal: usize, name: String, sm: u32 },
    /// The kernels are not for this model.
    #[error("the GPU's kernels cannot run this model: {0}")]
    Shapes(String),
    /// Other numerics than the kernels'.
    #[error("the GPU computes with bf16 activations, not {0}")]
    Activations(&'static str),
    /// It is there and does not work.
    #[error("GPU {ordinal} ({name}) cannot be used")]
    Open { ordinal: usize, name: String, source: DeviceError },
}

impl GpuError {
    /// What would help.
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            Self::Driver(ProbeError::NoDriver) => {
                "install NVIDIA's driver, or give this container access to it; --device cpu needs none"
            }
            Self::Driver(ProbeError::Refused(_)) => {
                "`nvidia-smi` shows whether driver and GPU work; --device cpu needs neither"
            }
            Self::NoSuchGpu { .. } => "name one that is there with --device cuda:N, or use --device cpu",
            Self::TooOld { .. } => "GPUs since Ampere (2020) can be used; --device cpu needs none",
            Self::Shapes(_) => "use --device cpu",
            Self::Activations(_) => "leave --activations out, or use --device cpu",
            Self::Open { .. } => {
                "`nvidia-smi` shows whether the GPU works and who uses it; --device cpu needs none"
            }
        }
    }
}

fn listed(names: &[String]) -> String {
    let numbered: Vec<String> =
        names.iter().enumerate().map(|(ordinal, name)| format!("{ordinal} ({name})")).collect();
    if numbered.is_empty() { "none".to_owned() } else { numbered.join(", ") }
}

/// Compute capability for people.
fn dotted(sm: u32) -> String {
    format!("{}.{}", sm / 10, sm % 10)
}

/// What a GPU is asked to do.
pub(crate) struct Wanted<'a> {
    /// Shapes of the model.
    pub(crate) geometry: &'a Geometry,
    /// Storage of keys and values.
    pub(crate) kv_type: KvType,
    /// Storage of recurrent states.
    pub(crate) state_type: StateType,
    /// Activations that a flag asks for.
    pub(crate) activations: Option<Activations>,
}

/// Opens a GPU by ordinal.
pub(crate) fn open(
    driver: Result<&DriverFacts, &ProbeError>,
    ordinal: usize,
    arguments: &DeviceArgs,
    wanted: &Wanted<'_>,
) -> Result<CudaDevice, GpuError> {
    let gpu = check(driver, ordinal, wanted)?;
    let options = CudaOptions {
        ordinal,
        memory_budget_bytes: arguments.gpu_memory.map(|bytes| bytes.0),
        kernel_cache_directory: arguments.kernel_cache.clone().or_else(CubinCache::default_directory),
        ..CudaOptions::default()
    };
    CudaDevice::new(&options).map_err(|source| GpuError::Open { ordinal, name: gpu.name.clone(), source })
}

/// Everything that can be said without opening it.
fn check<'a>(
    driver: Result<&'a DriverFacts, &ProbeError>,
    ordinal: usize,
    wanted: &Wanted<'_>,
) -> Result<&'a GpuFacts, GpuError> {
    let driver = driver.map_err(|error| GpuError::Driver(error.clone()))?;
    let Some(gpu) = driver.gpus.get(ordinal) else {
        let names = driver.gpus.iter().map(|gpu| gpu.name.clone()).collect();
        return Err(GpuError::NoSuchGpu { ordinal, names });
    };
    if gpu.sm < LEAST_SM {
        return Err(GpuError::TooOld { ordinal, name: gpu.name.clone(), sm: gpu.sm });
    }
    if let Some(activations) = wanted.activations.filter(|activations| *activations != Activations::Bf16) {
        return Err(GpuError::Activations(activations.name()));
    }
    qwill_cuda::units_of(wanted.geometry, &[wanted.kv_type], &[wanted.state_type])
        .map_err(GpuError::Shapes)?;
    Ok(gpu)
}

/// The first GPU that works, and why those before it do not. A machine without a driver has nothing to explain.
pub(crate) fn first_usable(
    driver: Result<&DriverFacts, &ProbeError>,
    arguments: &DeviceArgs,
    wanted: &Wanted<'_>,
) -> (Option<CudaDevice>, Vec<GpuError>) {
    let count = match driver {
        Ok(driver) => driver.gpus.len(),
        Err(ProbeError::NoDriver) => return (None, Vec::new()),
        Err(error) => return (None, vec![GpuError::Driver(error.clone())]),
    };
    let mut reasons = Vec::new();
    for ordinal in 0..count {
        match open(driver, ordinal, arguments, wanted) {
            Ok(device) => return (Some(device), reasons),
            Err(error) => reasons.push(error),
        }
    }
    (None, reasons)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str, sm: u32) -> GpuFacts {
        let uuid = format!("GPU-{name}");
        GpuFacts {
            name: name.to_owned(),
            uuid,
            sm,
            memory_bytes: 24 << 30,
            multiprocessors: 82,
            memory_bytes_per_s: Some(936e9),
        }
    }

    fn wanted(geometry: &Geometry) -> Wanted<'_> {
        Wanted { geometry, kv_type: KvType::Bf16, state_type: StateType::F32, activations: None }
    }

    fn message(driver: &Result<DriverFacts, ProbeError>, ordinal: usize, wanted: &Wanted<'_>) -> String {
        let error = check(driver.as_ref(), ordinal, wanted).unwrap_err();
        crate::failure::render(&error.into())
    }

    #[test]
    fn every_reason_is_named_with_what_would_help() {
        let geometry = Geometry::named("tiny").unwrap();
        let wanted = wanted(&geometry);
        let facts = |gpus| Ok(DriverFacts { cuda_version: (12, 8), gpus });
        let two = facts(vec![gpu("NVIDIA H200", 90), gpu("Tesla T4", 75)]);
        assert!(check(two.as_ref(), 0, &wanted).is_ok());
        let mut wide = geometry.clone();
        wide.attention.head_dim = 512;
        let messages = [
            message(&Err(ProbeError::NoDriver), 0, &wanted),
            message(&Err(ProbeError::Refused("CUDA_ERROR_NO_DEVICE".into())), 0, &wanted),
            message(&facts(Vec::new()), 0, &wanted),
            message(&two, 2, &wanted),
            message(&two, 1, &wanted),
            message(&two, 0, &Wanted { activations: Some(Activations::F32), ..wanted }),
            message(&two, 0, &Wanted { geometry: &wide, ..wanted }),
        ];
        insta::assert_snapshot!(messages.join("\n"));
    }

    #[test]
    fn a_machine_without_a_driver_has_nothing_to_explain_and_a_broken_one_has() {
        let geometry = Geometry::named("tiny").unwrap();
        let wanted = wanted(&geometry);
        let arguments =
            DeviceArgs { device: crate::args::DeviceChoice::Auto, gpu_memory: None, kernel_cache: None };
        let reasons = |driver: Result<&DriverFacts, &ProbeError>| {
            let (device, reasons) = first_usable(driver, &arguments, &wanted);
            assert!(device.is_none());
            reasons.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert!(reasons(Err(&ProbeError::NoDriver)).is_empty());
        assert_eq!(reasons(Err(&ProbeError::Refused("no".into()))).len(), 1);
        let old = DriverFacts { cuda_version: (12, 8), gpus: vec![gpu("Tesla T4", 75), gpu("Tesla P4", 61)] };
        let reasons = reasons(Ok(&old));
        assert!(reasons[0].contains("GPU 0 (Tesla T4)") && reasons[0].contains("7.5"), "{reasons:?}");
        assert!(reasons[1].contains("GPU 1 (Tesla P4)") && reasons[1].contains("6.1"), "{reasons:?}");
    }
}
