//! The worker over real sockets, with the random model: what clients see.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed helper fails its test")]

mod abort;
mod answers;
mod bad_input;
mod checkpoint;
mod client;
mod exactness;
mod families;
mod process;
mod resume;
mod soak;
mod streaming;
