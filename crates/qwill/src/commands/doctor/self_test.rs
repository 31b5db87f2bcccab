//! A real op against the plain reference, and the speed of the GPU's memory: about two seconds.

use std::path::Path;

use qwill_cpu::fast::CpuOptions;
use qwill_cpu::{CpuDevice, ReferenceDevice};
use qwill_cuda::{Ceilings, CudaDevice, CudaOptions, GpuFacts, Nvml};
use qwill_device::matrix::MatrixElements;
use qwill_device::numeric::f32_to_f16;
use qwill_device::suite::{Random, Tolerance};
use qwill_device::{Activations, Device, DeviceError, GROUP, MatrixData, Precision};

use super::{Finding, gpu as gpu_findings};

/// Shape of the product: several tiles and groups each way, and more rows than one block of tokens has.
const OUTPUTS: usize = 272;
const INPUTS: usize = 1024;
const ROWS: usize = 11;

/// Part of what memory could deliver by its clock that a read should reach; cards reach 0.85 to 0.95.
const EXPECTED_SHARE: f64 = 0.75;

/// What a wrong result means.
const WRONG: &str = "answers cannot be trusted: this machine computes wrongly, or this build does. Please report it \
                     with this output";

/// The processor's fast kernels against the plain loops.
pub(super) fn processor() -> Finding {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let options = CpuOptions::new(threads, Activations::F32);
    let tolerance = Tolerance::default().f32;
    let error = CpuDevice::new(options).and_then(|mut device| largest_error(&mut device, Activations::F32));
    match error {
        Ok(error) => verdict("processor", error, tolerance),
        Err(error) => Finding::problem("processor", error.to_string(), WRONG),
    }
}

/// A GPU's kernels against the plain loops, then its rates and what its clocks were meanwhile.
pub(super) fn gpu(
    ordinal: usize,
    facts: &GpuFacts,
    kernel_cache: Option<&Path>,
    nvml: Option<&Nvml>,
) -> Vec<Finding> {
    let kernel_cache_directory = kernel_cache.map(Path::to_owned);
    let options = CudaOptions { ordinal, kernel_cache_directory, ..CudaOptions::default() };
    let mut device = match CudaDevice::new(&options) {
        Ok(device) => device,
        Err(error) => {
            let advice = "models cannot run on this GPU until this is put right; the lines above may say why";
            return vec![Finding::problem("opening", error.to_string(), advice)];
        }
    };
    let correctness = match largest_error(&mut device, Activations::Bf16) {
        Ok(error) => verdict("correctness", error, Tolerance::default().bf16),
        Err(error) => Finding::problem("correctness", error.to_string(), WRONG),
    };
    let mut findings = vec![correctness];
    match device.measure_ceilings() {
        Ok(ceilings) => {
            // Asked at once, while the clocks are still those of the measurement.
            let statuses = nvml.and_then(|nvml| nvml.gpus().ok()).unwrap_or_default();
            let status = statuses.iter().find(|status| status.uuid == facts.uuid);
            findings.push(bandwidth(&ceilings, facts.memory_bytes_per_s));
            findings.push(rates(&ceilings));
            findings.extend(status.and_then(|status| gpu_findings::clocks("clocks at work", status)));
        }
        Err(error) => {
            let advice =
                "memory or clocks could not be measured: see the lines above for who holds the memory";
            findings.push(Finding::problem("bandwidth", error.to_string(), advice));
        }
    }
    findings
}

fn verdict(name: &'static str, error: f32, tolerance: f32) -> Finding {
    let found =
        format!("an int4 product of {ROWS} rows is off by {error:.1e} of its size, allowed {tolerance:.0e}");
    if error <= tolerance { Finding::ok(name, found) } else { Finding::problem(name, found, WRONG) }
}

fn bandwidth(ceilings: &Ceilings, possible: Option<f64>) -> Finding {
    let read = ceilings.read_bytes_per_s();
    let found = format!("{:.0} GB/s read, {:.0} GB/s copied", read / 1e9, ceilings.copy_bytes_per_s / 1e9);
    let Some(possible) = possible else { return Finding::ok("bandwidth", found) };
    let found = format!("{found}; its memory could deliver {:.0} GB/s", possible / 1e9);
    if read < possible * EXPECTED_SHARE {
        let advice = "slower than such a card is: somebody else may be using it, its clocks may be held down, or error \
                      correction may take its share";
        return Finding::warning("bandwidth", found, advice);
    }
    Finding::ok("bandwidth", found)
}

fn rates(ceilings: &Ceilings) -> Finding {
    let tera = |rate: f64| rate / 1e12;
    let found = format!(
        "{:.0} TFLOP/s bf16, {:.0} TOP/s int8, {:.1} TFLOP/s f32; a launch takes {:.1} us",
        tera(ceilings.bf16_flops_per_s),
        tera(ceilings.int8_flops_per_s),
        tera(ceilings.f32_flops_per_s),
        ceilings.launch_us,
    );
    Finding::ok("rates", found)
}

/// The largest error of a norm and an int4 product on a device, as the device suite measures it: relative to the
/// element's own size plus the root mean square of its row.
fn largest_error<D: Device>(device: &mut D, activations: Activations) -> Result<f32, DeviceError> {
    let inputs = Inputs::random();
    let expected = inputs.product(&mut ReferenceDevice::new(activations))?;
    let found = inputs.product(device)?;
    let rows = found.chunks(OUTPUTS).zip(expected.chunks(OUTPUTS));
    Ok(rows.map(|(found, expected)| row_error(found, expected)).fold(0.0, f32::max))
}

fn row_error(found: &[f32], expected: &[f32]) -> f32 {
    let squares: f32 = expected.iter().map(|value| value * value).sum();
    let size = (squares / expected.len() as f32).sqrt();
    let errors = found.iter().zip(expected).map(|(found, expected)| {
        let error = (found - expected).abs() / (expected.abs() + size);
        if error.is_nan() { f32::INFINITY } else { error }
    });
    errors.fold(0.0, f32::max)
}

/// A norm's and a matrix's random contents, the same on every machine.
struct Inputs {
    values: Vec<f32>,
    norm: Vec<f32>,
    packed: Vec<u8>,
    scales: Vec<u16>,
}

impl Inputs {
    fn random() -> Self {
        let mut random = Random::new(11, "self-test");
        Self {
            values: random
                .normals(ROWS * INPUTS, 1.0)
                .iter()
                .map(|value| Activations::Bf16.round(*value))
                .collect(),
            norm: random.normals(INPUTS, 1.0),
            packed: (0..OUTPUTS * INPUTS / 2).map(|_| random.bits() as u8).collect(),
            scales: (0..OUTPUTS * INPUTS / GROUP).map(|_| f32_to_f16(random.uniform(0.005, 0.02))).collect(),
        }
    }

    /// `matrix · rms_norm(values)`, row by row.
    fn product<D: Device>(&self, device: &mut D) -> Result<Vec<f32>, DeviceError> {
        let elements = MatrixElements::Int4 { packed: &self.packed, scales: &self.scales };
        let matrix = device.matrix(&MatrixData { rows: OUTPUTS, cols: INPUTS, elements })?;
        let norm = device.vector(&self.norm)?;
        let mut input = device.buffer(ROWS, INPUTS, Precision::Activation)?;
        let mut out = device.buffer(ROWS, OUTPUTS, Precision::Activation)?;
        device.write(&mut input, &self.values)?;
        device.norm_linears(ROWS, &input, &norm, 1e-6, &[&matrix], &mut out)?;
        device.read(&out, ROWS)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn this_machine_computes_rightly() {
        let finding = processor();
        assert_eq!(finding.level, Level::Ok, "{finding:?}");
    }

    #[test]
    fn one_wrong_element_is_seen() {
        let expected = vec![1.0, -2.0, 0.5];
        assert_eq!(row_error(&expected, &expected), 0.0);
        assert!(row_error(&[1.0, -2.0, 0.6], &expected) > 0.03);
        assert_eq!(row_error(&[1.0, f32::NAN, 0.5], &expected), f32::INFINITY);
        assert_eq!(verdict("correctness", f32::INFINITY, 1e-2).level, Level::Problem);
    }

    #[test]
    fn a_card_far_below_its_memorys_rate_is_a_warning() {
        let ceilings = |rate| Ceilings {
            reads: vec![qwill_cuda::ReadRate { bytes: 1 << 30, bytes_per_s: rate }],
            copy_bytes_per_s: rate,
            bf16_flops_per_s: 6e13,
            int8_flops_per_s: 2e14,
            f32_flops_per_s: 3e13,
            launch_us: 2.0,
        };
        assert_eq!(bandwidth(&ceilings(8.4e11), Some(9.36e11)).level, Level::Ok);
        assert_eq!(bandwidth(&ceilings(4.0e11), Some(9.36e11)).level, Level::Warning);
        assert_eq!(bandwidth(&ceilings(4.0e11), None).level, Level::Ok);
        assert!(rates(&ceilings(1.0)).found.starts_with("60 TFLOP/s bf16, 200 TOP/s int8, 30.0 TFLOP/s f32"));
    }
}
