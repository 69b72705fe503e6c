//! The series of what workers store for their clients.

use prometheus::{IntCounterVec, IntGauge};

use super::Declare;

/// Handles of these series.
#[derive(Debug, Clone)]
pub struct StoredStateMetrics {
    /// `keyway_stored_ids`: ids of stored responses, files and the like whose worker is known.
    pub ids: IntGauge,
    /// `keyway_stored_state_requests_total{outcome}`: requests that name what is stored, by what was found.
    pub requests: IntCounterVec,
}

impl StoredStateMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        let series = Self {
            ids: d.gauge("keyway_stored_ids", "Ids of stored responses, files and the like whose worker is known.")?,
            requests: d.counter(
                "keyway_stored_state_requests_total",
                "Requests that name what is stored: their worker known, found by asking, unknown to all, away, or stored for another tenant.",
                &["outcome"],
            )?,
        };
        for outcome in ["known", "found", "unknown", "away", "foreign"] {
            series.requests.with_label_values(&[outcome]);
        }
        Ok(series)
    }
}
