use qwill_device::DeviceError;
use qwill_weights::WeightsError;
use thiserror::Error;

/// What can go wrong while a model is loaded or run.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The device failed or refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The checkpoint is not what the model needs.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A batch that the model cannot run; a bug in the caller.
    #[error("invalid batch: {0}")]
    Batch(String),
    /// The MTP module was asked for, the checkpoint has none.
    #[error("this checkpoint has no MTP module")]
    NoMtp,
}
