//! CUDA forms of the operations: for each `x.cu` here a module that turns typed arguments into a
//! [`Launch`], a plain description of what to start. Nothing here touches a driver; a [`Device`] carries
//! launches out: a GPU (`gpu`, feature `cuda`) or, in tests, the emulator that compiles the same `.cu`
//! files for the CPU.
//!
//! Numbers are bf16 in memory and f32 in sums. As on the CPU, no bit of a result depends on what ran beside
//! it.

mod constants;
pub mod device;
pub mod elementwise;
pub mod gather;
#[cfg(feature = "cuda")]
pub mod gpu;
mod kernel;
pub mod matmul;
pub mod moe;
pub mod paged_attention;
pub mod peer;
mod pipeline;
pub mod probe;
pub mod rms_norm;
pub mod rope;
pub mod rules;
pub mod sample;

/// Changes whenever an edit changes a bit of any of these operations' results; part of a worker's numerics
/// id.
pub const NUMERICS_VERSION: u32 = 5;

pub use device::{Argument, Device, DeviceError, Element, Launch, Slice};
pub use kernel::Kernel;
