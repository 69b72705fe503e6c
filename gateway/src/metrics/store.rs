//! The series of the store by which gateways keep tenants' limits together. They appear where one is
//! configured.

use std::time::Duration;

use prometheus::{Histogram, IntCounterVec, IntGaugeVec};

use super::Declare;

/// Seconds: a round trip within a rack takes 0.2 ms, and what takes longer than the last is given up.
const BUCKETS: [f64; 10] = [0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25];

/// Handles of these series.
#[derive(Debug, Clone)]
pub struct StoreMetrics {
    up: IntGaugeVec,
    gateways: IntGaugeVec,
    seconds: Histogram,
    refusals: IntCounterVec,
}

impl StoreMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        let help =
            "1 where the store of [store] answers; 0: each gateway goes by its part of tenants' limits.";
        let up = d.gauges("keyway_store_up", help, &[])?;
        let help = "Gateways that keep tenants' limits together, as the store last said.";
        let gateways = d.gauges("keyway_store_gateways", help, &[])?;
        let help = "Time until the store of [store] has answered questions about tenants' limits.";
        let seconds = d.histogram("keyway_store_seconds", help, &BUCKETS)?;
        let help =
            "Requests refused by a gateway's own part of a tenant's limit, as the store was away or slow.";
        let refusals = d.counter("keyway_store_refusals_total", help, &[])?;
        Ok(Self { up, gateways, seconds, refusals })
    }

    /// Whether the store answers.
    pub fn is_up(&self, up: bool) {
        self.up.with_label_values::<&str>(&[]).set(i64::from(up));
        // There from the start, so that an alert on it looks at something.
        self.refusals.with_label_values::<&str>(&[]);
    }

    /// It has answered after this time, and knows so many gateways.
    pub fn answered(&self, time: Duration, gateways: usize) {
        self.seconds.observe(time.as_secs_f64());
        self.gateways.with_label_values::<&str>(&[]).set(gateways as i64);
    }

    /// A request was refused without it.
    pub fn refused_without(&self) {
        self.refusals.with_label_values::<&str>(&[]).inc();
    }
}
