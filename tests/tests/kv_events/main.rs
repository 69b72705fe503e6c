//! Hazard: what routers believe a worker to hold is not what it holds. Workers' KV events over real ZMQ
//! sockets: into the routing core's index, and into a decoder that knows only vLLM's own structures.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests fail the test by panicking"
)]

mod index;
mod libzmq;
mod subscriber;
mod traffic;
mod vllm_client;
