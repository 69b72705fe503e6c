//! The worker over real sockets, with the random model: what clients see.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed helper fails its test")]

mod abort;
mod answers;
mod bad_input;
mod checkpoint;
mod client;
mod clients;
mod data_parallel;
mod endpoints;
mod exactness;
mod expert_parallel;
mod families;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod gpu;
mod messages;
mod process;
mod reasoning;
mod responses;
mod resume;
mod sampling;
mod soak;
mod streaming;
mod structured;
