//! The model inside the binary: 27 MB that make `qwill serve` work on a bare machine.

/// Starts the bytes of a file at a multiple of 8, so that its tensors are used in place.
#[repr(C)]
struct Aligned<Bytes: ?Sized> {
    _start: [u64; 0],
    bytes: Bytes,
}

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        [$(($name, {
            static FILE: &Aligned<[u8]> =
                &Aligned { _start: [], bytes: *include_bytes!(concat!("../../../models/tiny/", $name)) };
            &FILE.bytes
        })),*]
    };
}

/// Name under which it is served.
pub(crate) const NAME: &str = "tiny";

/// It often answers, or stops, inside its thinking block, so it is asked not to think unless a request wants it.
pub(crate) const THINKING: bool = false;

/// File names and contents, as in a checkpoint's directory.
pub(crate) static FILES: [(&str, &[u8]); 7] = embedded![
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// One of the files.
pub(crate) fn file(name: &str) -> Option<&'static [u8]> {
    FILES.iter().find(|(file, _)| *file == name).map(|(_, bytes)| *bytes)
}
