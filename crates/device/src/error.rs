use thiserror::Error;

/// What can go wrong on a device. Every variant says what was attempted.
#[derive(Debug, Clone, Error)]
pub enum DeviceError {
    /// A buffer, cache or weight did not fit.
    #[error("out of memory on {device}: {what} needs {needed_bytes} bytes, {free_bytes} are free")]
    OutOfMemory {
        /// Device name.
        device: String,
        /// What was being placed.
        what: String,
        /// Bytes it needs.
        needed_bytes: u64,
        /// Bytes left.
        free_bytes: u64,
    },
    /// A shape the device or op cannot take; a bug in the caller or an unsupported model.
    #[error("{op}: {reason}")]
    Shape {
        /// Op or constructor name.
        op: &'static str,
        /// What does not fit, with both numbers.
        reason: String,
    },
    /// The driver or hardware failed.
    #[error("{op} failed on {device}: {reason}")]
    Failed {
        /// Op name.
        op: &'static str,
        /// Device name.
        device: String,
        /// The driver's own words.
        reason: String,
    },
}

impl DeviceError {
    /// Shorthand for [`DeviceError::Shape`].
    pub fn shape(op: &'static str, reason: impl Into<String>) -> Self {
        Self::Shape { op, reason: reason.into() }
    }
}
