//! The series of what is kept of who has used how much.

use prometheus::{IntCounter, IntGauge};

use super::Declare;

/// Handles of these series.
#[derive(Debug, Clone)]
pub struct UsageMetrics {
    /// `keyway_usage_write_failures_total`: tries at the usage file that failed.
    pub failures: IntCounter,
    /// `keyway_usage_unwritten_requests`: those whose usage is in memory alone; set once a second.
    pub unwritten: IntGauge,
    /// `keyway_usage_other_total`: requests that were added to the row for the rest.
    pub other: IntCounter,
}

impl UsageMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        let counter = |name: &str, help: &str| d.register("counter", IntCounter::new(name, help));
        Ok(Self {
            failures: counter(
                "keyway_usage_write_failures_total",
                "Times that the usage file could not be opened, written or cleared of what is old.",
            )?,
            unwritten: d.gauge(
                "keyway_usage_unwritten_requests",
                "Requests whose usage is held in memory and is not in the usage file yet.",
            )?,
            other: counter(
                "keyway_usage_other_total",
                "Requests whose usage was added to the row `other`, as the hour had usage.max_series rows.",
            )?,
        })
    }
}
