//! The series of who belongs to the fleet.

use prometheus::{IntCounterVec, IntGaugeVec};

use super::Declare;

/// Handles of these series.
#[derive(Debug)]
pub struct FleetMetrics {
    /// `keyway_fleet_workers{state}`.
    pub workers: IntGaugeVec,
    /// `keyway_discovery_updates_total{source,outcome="ok|failed"}`.
    pub discovery: IntCounterVec,
}

impl FleetMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            workers: d.gauges("keyway_fleet_workers", "Workers known, by state.", &["state"])?,
            discovery: d.counter(
                "keyway_discovery_updates_total",
                "Looks at a list of workers, by source and whether it could be read.",
                &["source", "outcome"],
            )?,
        })
    }
}
