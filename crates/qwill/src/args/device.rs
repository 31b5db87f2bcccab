//! Where the model runs.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::values::ByteCount;
use crate::env;

/// `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The first usable GPU, else the processor.
    Auto,
    /// The processor.
    Cpu,
    /// A GPU, as the driver numbers them.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = text.strip_prefix("cuda:").map(str::parse);
        match (text, ordinal) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            (_, Some(Ok(ordinal))) => Ok(Self::Cuda(ordinal)),
            _ => Err("write auto, cpu, cuda or cuda:N, N counting GPUs from 0".to_owned()),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct DeviceArgs {
    /// Where the model runs: `auto` takes the first usable GPU, else the processor; `cpu`; `cuda` or `cuda:N`, a GPU
    /// as the driver numbers them
    #[arg(long, default_value = "auto", env = env::DEVICE, help_heading = "Device")]
    pub(crate) device: DeviceChoice,
    /// Memory of the GPU that everything may take together, the driver's part included, such as 24GiB
    /// [default: what is free]
    #[arg(long, value_name = "BYTES", env = env::GPU_MEMORY, help_heading = "Device")]
    pub(crate) gpu_memory: Option<ByteCount>,
    /// Where compiled GPU kernels are kept [default: qwill/kernels in the user's cache directory]
    #[arg(long, value_name = "DIR", env = env::KERNEL_CACHE, help_heading = "Device")]
    pub(crate) kernel_cache: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_one_of_four_words() {
        assert_eq!("auto".parse(), Ok(DeviceChoice::Auto));
        assert_eq!("cpu".parse(), Ok(DeviceChoice::Cpu));
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(DeviceChoice::Cuda(3)));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda0", "CPU", "cuda:99999999999999999999"] {
            assert!(text.parse::<DeviceChoice>().unwrap_err().contains("cuda:N"), "{text}");
        }
    }
}
