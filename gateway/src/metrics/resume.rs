//! The series of streams that broke off.

use prometheus::{IntCounterVec, IntGauge};

use super::{Declare, Obstacle};

/// Handles of these series.
#[derive(Debug)]
pub struct ResumeMetrics {
    /// `keyway_streams_resumed_total{how="restart|exact|text"}`: times that another worker went on with one.
    pub resumed: IntCounterVec,
    /// `keyway_streams_not_resumed_total{reason}`: those that broke off and ended there, by [`Obstacle`].
    pub not_resumed: IntCounterVec,
    /// `keyway_resume_bytes`: an in-flight gauge, 0 when nothing is in flight.
    pub bytes: IntGauge,
}

impl ResumeMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        let series = Self {
            resumed: d.counter(
                "keyway_streams_resumed_total",
                "Times that another worker went on with a stream: from its beginning, exactly where it broke off, or from its text.",
                &["how"],
            )?,
            not_resumed: d.counter(
                "keyway_streams_not_resumed_total",
                "Streams that broke off and ended there, by why.",
                &["reason"],
            )?,
            bytes: d.gauge(
                "keyway_resume_bytes",
                "Requests, token ids and texts kept while their streams may have to be resumed.",
            )?,
        };
        // There from the start, so that the first one is an increase.
        for how in ["restart", "exact", "text"] {
            series.resumed.with_label_values(&[how]);
        }
        for obstacle in Obstacle::ALL {
            series.not_resumed.with_label_values(&[obstacle.as_str()]);
        }
        Ok(series)
    }
}
