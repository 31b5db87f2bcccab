use std::io;

use thiserror::Error;

/// What can be wrong with a checkpoint. Every message names the file, and the tensor or field where there is
/// one, with what was found and what was expected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// A file could not be opened or read.
    #[error("cannot read {file}: {source}")]
    Read {
        /// Path as given.
        file: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The system refused threads to read with.
    #[error("cannot start a thread to read weights: {source}")]
    Threads {
        /// The system's reason.
        source: io::Error,
    },
    /// No checkpoint where one was expected.
    #[error("no checkpoint in {place}: found {found}, expected {expected}")]
    NoCheckpoint {
        /// The directory, or a word for files in memory.
        place: String,
        /// What is there instead.
        found: String,
        /// The file that is needed.
        expected: &'static str,
    },
    /// A file that breaks the safetensors format.
    #[error("{file}: damaged safetensors file: found {found}, expected {expected}")]
    Header {
        /// File name.
        file: String,
        /// What is there.
        found: String,
        /// What the format asks for.
        expected: String,
    },
    /// The shard index and the shards disagree.
    #[error("{file}: {what}: found {found}, expected {expected}")]
    Index {
        /// Name of the index file.
        file: String,
        /// The tensor or shard.
        what: String,
        /// What is there.
        found: String,
        /// What the index promises.
        expected: String,
    },
    /// A JSON file that cannot be parsed.
    #[error("{file}: not valid JSON: {reason}")]
    Json {
        /// File name.
        file: String,
        /// The parser's reason with line and column.
        reason: String,
    },
    /// A configuration field with a value that is wrong or that this engine does not run.
    #[error("{file}: field `{field}`: found {found}, supported: {supported}")]
    Config {
        /// File name.
        file: String,
        /// Field with its path, such as `text_config.hidden_size`.
        field: String,
        /// The value, or "nothing".
        found: String,
        /// What is supported.
        supported: String,
    },
    /// A tensor that the configuration calls for and no file has.
    #[error("tensor `{tensor}` is missing from {file}: found nothing, expected {expected}")]
    Missing {
        /// Canonical name.
        tensor: String,
        /// The files searched.
        file: String,
        /// Shape that the configuration implies.
        expected: String,
    },
    /// A tensor of the wrong shape, type or content.
    #[error("tensor `{tensor}` in {file}: {what}: found {found}, expected {expected}")]
    Tensor {
        /// Name as stored.
        tensor: String,
        /// File name.
        file: String,
        /// The property: "shape", "dtype", "zero point", ...
        what: &'static str,
        /// What is there.
        found: String,
        /// What is supported or implied by the configuration.
        expected: String,
    },
    /// Two tensors of one name.
    #[error("tensor `{tensor}` is stored twice: found it in {first} and in {second}, expected one")]
    Duplicate {
        /// Name, canonical unless both copies are in one file.
        tensor: String,
        /// File of the first copy.
        first: String,
        /// File of the second copy.
        second: String,
    },
}

impl WeightsError {
    /// What a person can do about it, where something general can be said.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Read { source, .. } if source.kind() == io::ErrorKind::UnexpectedEof => {
                Some("the file became shorter while it was read: do not change a checkpoint that is in use")
            }
            Self::Read { .. } => Some("check the path and its permissions"),
            Self::Threads { .. } => Some("raise the limit on processes (`ulimit -u`)"),
            Self::NoCheckpoint { .. } => Some(
                "point at the model's directory, the one that holds config.json; other weight formats \
                 (.bin, .pt, .gguf) must be converted to safetensors first",
            ),
            Self::Header { .. } => Some(
                "the file is damaged or its download did not finish: fetch it again and compare its size",
            ),
            Self::Index { .. } => {
                Some("the shards and the index are not of one checkpoint, or a shard was not downloaded")
            }
            Self::Json { .. } => Some("the file is damaged or was edited by hand: fetch it again"),
            Self::Config { field, .. } if field.contains("quant") => {
                Some("take a 16-bit checkpoint and quantise it at load, or one in a supported format")
            }
            Self::Config { .. } => None,
            Self::Missing { .. } => {
                Some("a shard is missing, or config.json belongs to another model than the weights")
            }
            Self::Tensor { what: "truncated file", .. } => {
                Some("the download of this file did not finish: fetch it again and compare its size")
            }
            Self::Tensor {
                what: "overlapping bytes" | "gap before the bytes" | "data_offsets" | "header shape",
                ..
            } => Some("the file is damaged or was exported wrongly: fetch it again"),
            Self::Tensor { what: "shape" | "length" | "number of layers", .. } => {
                Some("config.json belongs to another model than the weights")
            }
            Self::Tensor { what: "value" | "scale", .. } => {
                Some("the checkpoint was damaged or exported wrongly: fetch it again")
            }
            Self::Tensor { .. } => {
                Some("take a 16-bit checkpoint and quantise it at load, or one in a supported format")
            }
            Self::Duplicate { .. } => {
                Some("remove the file that does not belong: two copies of the weights lie in one directory")
            }
        }
    }
}

/// A shape as people write it: `[248320, 5120]`.
pub(crate) fn shape(dims: &[usize]) -> String {
    format!("{dims:?}")
}
