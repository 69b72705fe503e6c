//! Keyway's inference worker: an OpenAI-compatible server over an engine with continuous batching, a paged KV cache
//! and automatic prefix caching.
//!
//! Read these files in the order in which a request meets them:
//!
//! 1. `server.rs` accepts it, and `api.rs` checks, tokenises and answers it;
//! 2. `engine.rs` runs the step loop on a thread of its own;
//! 3. `scheduler.rs` chooses who runs in a step;
//! 4. `block_manager.rs` finds its cached prefix and gives it KV blocks;
//! 5. `model.rs` computes, behind the seam `backend.rs`.
//!
//! `worker.rs` puts them together: [`start`].

mod answer_format;
mod api;
pub mod backend;
#[doc(hidden)]
pub mod bench;
mod block_manager;
pub mod cli;
mod data_parallel;
mod device;
mod engine;
mod engines;
mod expert_parallel;
#[doc(hidden)]
pub mod fuzz;
mod generation_config;
mod grammar;
mod kv_events;
mod limits;
pub mod log;
mod logprobs;
mod memory;
mod metrics;
pub mod model;
mod output;
mod reader;
mod request_memory;
mod sampler;
mod scheduler;
mod sequence;
mod server;
mod stop;
mod token_rules;
mod worker;

pub use answer_format::{CallFormat, ReasoningFormat};
pub use block_manager::CacheChange;
pub use device::DeviceChoice;
#[cfg(target_os = "linux")]
pub use expert_parallel::run_rank;
pub use expert_parallel::{ExpertParallelOptions, RankGroup, RankOptions};
#[cfg(all(target_os = "linux", feature = "cuda"))]
pub use expert_parallel::{run_synthetic_rank, synthetic_on_gpus};
pub use keyway_wire::kv_event::WireFormat;
pub use kv_events::{BadZmqAddr, KvEventOptions, ZmqAddr};
pub use memory::{BadByteSize, ByteSize};
pub use server::ClientBounds;
pub use worker::{RunningWorker, StartError, WorkerOptions, builtin_text, start};
