//! The operations of a decoder, one file each: its contract, its `oracle` (naive, float64, what tests compare
//! with) and its `cpu` form. No model, no allocation policy: callers own the buffers.
//!
//! **Exactness.** Every output element is one fixed chain of fused multiply-adds; vector lanes run across
//! independent outputs, or across positions that are fixed absolutely. So a result does not depend on how
//! many rows ran beside it, on chunking, on paging, on the number of threads ([`compute`]), nor on the
//! instruction set: AVX-512, AVX2, NEON and scalar code agree in every bit ([`isa`]).
//!
//! Read [`rms_norm`] first: it is the smallest complete operation.

mod arena;
pub mod compute;
pub mod cuda;
pub mod elementwise;
pub mod fabric;
mod grid;
pub mod heads;
pub mod isa;
pub mod kv_cache;
mod lanes;
pub mod matmul;
pub mod moe;
pub mod paged_attention;
mod pool;
pub mod probe;
pub mod quant;
pub mod rms_norm;
pub mod rope;
pub mod scalar;
mod simd;
mod zeroed;

#[cfg(test)]
mod check;

/// Changes whenever an edit changes a bit of any operation's result; part of a worker's numerics id.
pub const NUMERICS_VERSION: u32 = 3;
