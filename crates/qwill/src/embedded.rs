//! The model inside the binary: 27 MB that make `qwill serve` work on a bare machine.
//!
//! Without the feature `embedded-model` the weights are left out. The tokenizer stays: random weights borrow it.

#[cfg(feature = "embedded-model")]
use anyhow::Context;
use anyhow::Result;
use qwill_weights::Checkpoint;

#[cfg(not(feature = "embedded-model"))]
use crate::failure::Hinted;

/// Starts the bytes of a file at a multiple of 8, so that its tensors are used in place.
#[cfg(feature = "embedded-model")]
#[repr(C)]
struct Aligned<Bytes: ?Sized> {
    _start: [u64; 0],
    bytes: Bytes,
}

/// Name under which it is served.
pub(crate) const NAME: &str = "tiny";

/// It often answers, or stops, inside its thinking block, so it is asked not to think unless a request wants it.
pub(crate) const THINKING: bool = false;

/// Names and contents of the files that turn text into tokens and back.
const TOKENIZER_FILES: [(&str, &[u8]); 2] = [
    ("tokenizer.json", include_bytes!("../../../models/tiny/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../models/tiny/tokenizer_config.json")),
];

/// One of the tokenizer's files.
pub(crate) fn tokenizer_file(name: &str) -> Option<&'static [u8]> {
    TOKENIZER_FILES.iter().find(|(file, _)| *file == name).map(|(_, bytes)| *bytes)
}

/// The model, opened but not loaded.
#[cfg(feature = "embedded-model")]
pub(crate) fn checkpoint() -> Result<Checkpoint> {
    macro_rules! aligned {
        ($($name:literal),* $(,)?) => {
            [$(($name, {
                static FILE: &Aligned<[u8]> =
                    &Aligned { _start: [], bytes: *include_bytes!(concat!("../../../models/tiny/", $name)) };
                &FILE.bytes
            })),*]
        };
    }
    let files: [(&str, &[u8]); 5] = aligned![
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ];
    let files = files.into_iter().chain(TOKENIZER_FILES).collect();
    Checkpoint::embedded(files).context("the embedded model cannot be read")
}

/// This binary has none.
#[cfg(not(feature = "embedded-model"))]
pub(crate) fn checkpoint() -> Result<Checkpoint> {
    Err(Hinted::error(
        "this binary was built without the embedded model, and no other is named",
        "give the directory of a Hugging Face checkpoint, or --weights random --geometry NAME",
    ))
}
