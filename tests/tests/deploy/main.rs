//! What operators rely on: workers that come and go, the numbers that size the fleet, and every file under
//! `deploy/` and `examples/`, held against the real tools.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests fail the test by panicking"
)]

mod chart;
mod compose;
mod discovery;
mod examples;
mod external_scaler;
mod first_worker;
mod kubernetes;
mod manifests;
mod notices;
mod page;
mod pod_roles;
mod prometheus;
mod release;
