//! A simulated inference engine, sans-IO: paged KV blocks with a prefix cache, continuous batching with
//! chunked prefill, and a formula for how long each step takes. It knows no sockets, no clock and no text:
//! time is an argument, prompts are chains of block hashes. The mock serves it, the simulator runs it in
//! virtual time.
//!
//! The behaviour is that of vLLM's V1 engine (`vllm/v1/core/sched/scheduler.py`,
//! `vllm/v1/core/block_pool.py`), restated. Deliberately absent: speculative decoding, several cache groups,
//! LoRA, offloading.
//!
//! Read in this order: `profile.rs` (what a step costs), `block_pool.rs` (who holds which block), `engine.rs`
//! (the step loop), `hardware.rs` (the named profiles and where their numbers come from).

mod block_pool;
mod engine;
mod hardware;
mod links;
mod profile;
#[cfg(test)]
mod tests;

pub use self::{
    block_pool::{BlockPool, Change},
    engine::{Engine, Listener, Nanos, Refusal, RequestId, Submission, Token, Totals},
    hardware::{PROFILES, UnknownProfile, named},
    links::Links,
    profile::{Profile, StepCost, StepWork},
};
