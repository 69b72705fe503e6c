//! The series of who belongs to the fleet, and who of them refuses what it is asked for.

use prometheus::{IntCounterVec, IntGaugeVec};

use super::Declare;

/// Handles of these series.
#[derive(Debug)]
pub struct FleetMetrics {
    /// `keyway_fleet_workers{state}`: joining, ready, paused, down or draining; set before each scrape.
    pub workers: IntGaugeVec,
    /// `keyway_probe_failures_total{worker,cause}`: probes that found a fault, by its
    /// [`crate::fleet::Cause`].
    pub probe_failures: IntCounterVec,
    /// `keyway_discovery_updates_total{source,outcome="ok|failed"}`: looks at a list; one that fails changes
    /// nothing.
    pub discovery: IntCounterVec,
    /// `keyway_worker_refusals_total{worker,cause="busy|lost|failed|rejected|error_event"}`: requests that it
    /// refused or failed before their first token.
    pub refusals: IntCounterVec,
    /// `keyway_worker_misconfigured{worker}`: 1 where it refuses what others serve, and serves nothing.
    pub misconfigured: IntGaugeVec,
    /// `keyway_worker_role{worker,role="both|prefill|decode"}`: 1 for the one that it has; set before each
    /// scrape.
    pub roles: IntGaugeVec,
}

impl FleetMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            workers: d.gauges("keyway_fleet_workers", "Workers known, by state.", &["state"])?,
            probe_failures: d.counter(
                "keyway_probe_failures_total",
                "Probes that found something wrong with a worker, by what; `gateway`: they could not be sent.",
                &["worker", "cause"],
            )?,
            discovery: d.counter(
                "keyway_discovery_updates_total",
                "Looks at a list of workers, by source and whether it could be read.",
                &["source", "outcome"],
            )?,
            refusals: d.counter(
                "keyway_worker_refusals_total",
                "Requests that a worker refused or failed before its first token, whoever served them then.",
                &["worker", "cause"],
            )?,
            misconfigured: d.gauges(
                "keyway_worker_misconfigured",
                "1 where the worker refuses what others serve, and serves nothing.",
                &["worker"],
            )?,
            roles: d.gauges(
                "keyway_worker_role",
                "1 for the part of requests that the worker is for: both, prefill or decode.",
                &["worker", "role"],
            )?,
        })
    }
}
