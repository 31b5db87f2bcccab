//! From a checkpoint, or from nothing but a seed, to named tensors.
//!
//! [`Checkpoint`] opens a Hugging Face directory, the same files in memory, or makes random weights of a
//! geometry; all three give [`Matrix`] and vector values under the same canonical names:
//! `embed_tokens`, `layers.0.mlp.gate_proj`, `norm.weight`, `mtp.fc`, `lm_head`, ...
//!
//! | module | holds |
//! | --- | --- |
//! | `header` | the safetensors container, read strictly |
//! | `files` | which files make up a checkpoint; canonical names |
//! | `config`, `quantization` | `config.json`, `generation_config.json` |
//! | `layout` | every tensor that a geometry needs, with its shape |
//! | `stored` | the forms in which a matrix can lie in a file, and their checks |
//! | `unpack` | GPTQ and compressed-tensors words to the device's codes |
//! | `quantize` | round to nearest at load, and which matrices it applies to |
//! | `random` | weights of the right distribution |
//! | `stream` | all matrices, block by block, read by several threads in bounded memory |
//! | `cache` | rounded weights kept on disk |
//! | `memory` | memory for numbers of any type and typed views of bytes: the only unsafe code |

mod cache;
mod checkpoint;
mod config;
mod error;
mod files;
mod header;
mod json;
mod layout;
mod matrix;
mod memory;
mod quantization;
mod quantize;
mod random;
mod stored;
mod stream;
mod unpack;

pub use cache::WeightCache;
pub use checkpoint::Checkpoint;
pub use config::{GenerationDefaults, ModelConfig};
pub use error::WeightsError;
pub use matrix::{Matrix, MatrixSpec};
pub use quantize::{Quantize, quantize_int4, quantize_int8};
pub use stream::{Block, StreamOptions, stream};
