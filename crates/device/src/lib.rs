//! What a device must do to run a model of the Qwen3.5 family.
//!
//! The model is written once against [`Device`]; `qwill-cpu` and the CUDA crate implement it. This crate
//! holds the vocabulary both sides share (shapes, weight matrices, ragged batches, the memory plan) and the
//! op test-suite that every device must pass ([`suite`]). It computes nothing itself.

pub mod batch;
pub mod cache;
mod error;
pub mod geometry;
mod host_plan;
pub mod matrix;
pub mod numeric;
mod ops;
pub mod plan;
pub mod sample;
pub mod suite;

pub use batch::{Batch, Chunk, MAX_ROUND_ROWS, Phase, RING_TOKENS, Span};
pub use cache::{CacheSpec, GdnState, KvPage, KvType, StateType};
pub use error::DeviceError;
pub use geometry::{AttentionShape, GdnShape, Geometry, LayerKind};
pub use matrix::{GROUP, MatrixData, WeightFormat};
pub use numeric::Activations;
pub use ops::{Device, DeviceFacts, GdnWeights, Precision};
pub use sample::{SampleRow, Sampled, ScoreRow};
