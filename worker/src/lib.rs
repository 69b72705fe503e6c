//! Keyway's inference worker: an OpenAI-compatible server over an engine with continuous batching, a paged KV
//! cache and automatic prefix caching.
//!
//! Read these files in the order in which a request meets them:
//!
//! 1. `server.rs` accepts it, and `api.rs` checks, tokenises and answers it;
//! 2. `engine.rs` runs the step loop on a thread of its own;
//! 3. `engine/scheduler.rs` chooses who runs in a step;
//! 4. `engine/block_manager.rs` finds its cached prefix and gives it KV blocks;
//! 5. `model.rs` computes, behind the seam `engine/backend.rs`.
//!
//! `worker.rs` puts them together: [`start`]. Each module imports from those behind it here, and from none
//! before it: [`cli`], [`fuzz`], `worker`, `server`, `api`, `answer`, `kv_transfer`, `parallel`, [`model`],
//! `engine`, `request_memory`, `metrics`, [`log`], `memory`, `device`, `limits`.

mod answer;
mod api;
pub mod cli;
mod device;
mod engine;
#[doc(hidden)]
pub mod fuzz;
mod kv_transfer;
mod limits;
pub mod log;
mod memory;
mod metrics;
pub mod model;
mod parallel;
mod request_memory;
mod server;
mod worker;

pub use answer::answer_format::{CallFormat, ReasoningFormat};
pub use device::DeviceChoice;
pub use engine::backend;
#[doc(hidden)]
pub use engine::bench;
pub use engine::block_manager::CacheChange;
pub use engine::generation_config::GenerationConfigError;
pub use engine::kv_events::{BadZmqAddr, KvEventOptions, KvEventsError, ZmqAddr};
pub use keyway_wire::kv_event::WireFormat;
pub use kv_transfer::{KvTransferError, KvTransferOptions};
pub use limits::ClientBounds;
pub use memory::{BadByteSize, ByteSize};
pub use model::ExpertParallelOptions;
#[cfg(target_os = "linux")]
pub use parallel::expert_parallel::run_rank;
pub use parallel::expert_parallel::{ListenError, RankExit, RankGroup, RankOptions};
#[cfg(all(target_os = "linux", feature = "cuda"))]
pub use parallel::expert_parallel::{run_synthetic_rank, synthetic_on_gpus};
pub use worker::{OptionsError, RunningWorker, StartError, WorkerOptions, builtin_text, start};
