//! What to look at.

use std::path::PathBuf;

use clap::Args;

use crate::env;

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Directory of a Hugging Face checkpoint to look at as well
    #[arg(value_name = "MODEL_DIR")]
    pub(crate) model_dir: Option<PathBuf>,
    /// Where compiled GPU kernels are kept [default: qwill/kernels in the user's cache directory]
    #[arg(long, value_name = "DIR", env = env::KERNEL_CACHE, help_heading = "Device")]
    pub(crate) kernel_cache: Option<PathBuf>,
    /// Print JSON
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}
