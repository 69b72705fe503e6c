//! The series of what becomes of traces.

use prometheus::IntCounterVec;

use super::Declare;

/// Handles of these series.
#[derive(Debug)]
pub struct TraceMetrics {
    /// `keyway_trace_spans_total{outcome="sent|failed|dropped"}`: dropped where the queue was full.
    pub spans: IntCounterVec,
}

impl TraceMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            spans: d.counter(
                "keyway_trace_spans_total",
                "Spans of requests: taken by the collector, given up after some tries, or dropped because the queue was full.",
                &["outcome"],
            )?,
        })
    }
}
