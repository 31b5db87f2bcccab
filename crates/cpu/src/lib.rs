//! [`qwill_device::Device`] on the CPU, twice: [`ReferenceDevice`], plain loops that define what every op means,
//! and [`CpuDevice`], packed weights, SIMD and threads.

#[macro_use]
mod cache_ops;
pub mod fast;
mod host;
mod memory;
pub mod reference;
mod state;
mod storage;

pub use fast::CpuDevice;
pub use host::HostStore;
pub use memory::available_memory_bytes;
pub use reference::ReferenceDevice;
pub use storage::{Buffer, Cache};
