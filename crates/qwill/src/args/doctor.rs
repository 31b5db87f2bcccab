//! What to look at.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Directory of a Hugging Face checkpoint to look at as well
    #[arg(value_name = "MODEL_DIR")]
    pub(crate) model_dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}
