use std::error::Error;
use std::time::Duration;

use thiserror::Error;

use crate::disk::DiskCacheError;

/// Why an engine does not run.
#[derive(Debug, Error)]
pub enum EngineError {
    /// An option is out of range; the message has the numbers.
    #[error("{0}")]
    Options(String),
    /// The operating system gave no thread.
    #[error("the engine's thread could not be started")]
    Spawn(#[source] std::io::Error),
    /// The directory of the disk cache cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskCacheError),
    /// The model could not be made.
    #[error("the model could not be loaded")]
    Build(#[source] Box<dyn Error + Send + Sync>),
    /// The model is there but does not generate.
    #[error("the model failed its self-test: {0}")]
    SelfTest(String),
    /// A step did not end after a stop was asked for.
    #[error("the engine did not end within {0:?}: its last step hangs")]
    Stuck(Duration),
    /// The thread ended by a failure.
    #[error("the engine has failed: {0}")]
    Failed(String),
}

impl EngineError {
    /// The message with those of its causes.
    pub(crate) fn chain(&self) -> String {
        let mut message = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            message.push_str(": ");
            message.push_str(&error.to_string());
            cause = error.source();
        }
        message
    }
}
