//! The series of the process's own life.

use prometheus::{IntCounterVec, IntGauge};

use super::Declare;

/// Handles of these series.
#[derive(Debug)]
pub struct LifecycleMetrics {
    /// `keyway_config_reloads_total{outcome="applied|refused"}`.
    pub reloads: IntCounterVec,
    /// `keyway_config_last_reload_ok`: 0 while the file in place is one that was refused.
    pub last_reload_ok: IntGauge,
}

impl LifecycleMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        let series = Self {
            reloads: d.counter(
                "keyway_config_reloads_total",
                "Times that the configuration was read again, and whether it was taken over.",
                &["outcome"],
            )?,
            last_reload_ok: d.gauge(
                "keyway_config_last_reload_ok",
                "0 where the last reload was refused and the configuration before it stays in force.",
            )?,
        };
        series.last_reload_ok.set(1);
        // There from the start, so that the first one is an increase.
        for outcome in ["applied", "refused"] {
            series.reloads.with_label_values(&[outcome]);
        }
        Ok(series)
    }
}
