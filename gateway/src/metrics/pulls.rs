//! The series of what workers fetch from each other's caches.

use prometheus::{GaugeVec, IntCounterVec};

use super::Declare;

/// Handles of the series about fetching from other workers' caches.
#[derive(Debug)]
pub struct PullMetrics {
    /// `keyway_kv_pulls_total{worker,outcome}`: by the worker that was to fetch.
    pub pulls: IntCounterVec,
    /// `keyway_kv_pull_seconds_per_token{from,to}`, as it is believed.
    pub seconds_per_token: GaugeVec,
    /// `keyway_kv_pull_each_seconds{from,to}`, likewise.
    pub each_seconds: GaugeVec,
}

impl PullMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            pulls: d.counter(
                "keyway_kv_pulls_total",
                "Prompts of which a worker was to fetch what another one has cached, by what came (done, part, missed), or refused \
                 where it knows no such request.",
                &["worker", "outcome"],
            )?,
            seconds_per_token: d.real_gauges_of(
                "keyway_kv_pull_seconds_per_token",
                "What fetching the KV of a cached prompt token takes between two workers, fitted from times to the first token; once \
                 three were seen.",
                &["from", "to"],
            )?,
            each_seconds: d.real_gauges_of(
                "keyway_kv_pull_each_seconds",
                "What each such fetch takes between two workers however little is fetched, fitted likewise.",
                &["from", "to"],
            )?,
        })
    }
}
