//! Harness of the end-to-end tests: real gateways and workers as processes, a scripted fake worker, a chaos
//! proxy, raw clients, and patience. The tests themselves are in `tests/tests/`; see `tests/README.md`.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a harness fails its test by panicking, with a message that says what was awaited"
)]

pub mod bins;
pub mod canary;
pub mod chaos_proxy;
pub mod client;
pub mod cluster;
pub mod eventually;
pub mod exchange;
pub mod failing_connect;
pub mod fake_worker;
pub mod h2_client;
pub mod h2_worker;
pub mod http1;
pub mod kube_api;
pub mod metrics;
pub mod openai;
pub mod ports;
pub mod probe_shield;
pub mod process;
pub mod resources;
pub mod sources;
pub mod sse;
pub mod tls;
pub mod tools;

pub use chaos_proxy::ChaosProxy;
pub use client::{Client, Response, get, post};
pub use cluster::{Cluster, Gateway, GatewayBuilder, RealWorker};
pub use exchange::{Exchange, Protocol};
pub use failing_connect::FailingConnect;
pub use fake_worker::{Call, FakeWorker, REFUSE_ME};
pub use h2_worker::{H2Call, H2Worker};
pub use http1::End;
pub use kube_api::KubeApi;
pub use metrics::Metrics;
pub use probe_shield::ProbeShield;
pub use resources::Resources;
pub use sse::Next;
