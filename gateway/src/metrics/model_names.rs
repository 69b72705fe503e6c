//! The series of requests that go to another model than the one that they name.

use prometheus::IntCounterVec;

use super::Declare;

/// Handles of these series. Names come from the configuration alone.
#[derive(Debug)]
pub struct ModelNameMetrics {
    /// `keyway_model_fallbacks_total{model,fallback}`: requests that another model took.
    pub fallbacks: IntCounterVec,
    /// `keyway_model_splits_total{model,chosen}`: requests of the share that goes to another model.
    pub splits: IntCounterVec,
}

impl ModelNameMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            fallbacks: d.counter(
                "keyway_model_fallbacks_total",
                "Requests that went to another model, as no worker of theirs could take them.",
                &["model", "fallback"],
            )?,
            splits: d.counter(
                "keyway_model_splits_total",
                "Requests of the share of a model that goes to another one.",
                &["model", "chosen"],
            )?,
        })
    }
}
