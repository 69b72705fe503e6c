//! The series of a worker that each request moves, with their handles looked up once, as `per_model.rs` has a
//! model's.

use std::sync::OnceLock;

use keyway_core::policy::Reason;
use prometheus::{Counter, IntCounter, IntCounterVec, IntGauge};

use super::Metrics;

/// Handles of one worker's series. They go on counting, unseen, where the worker's series have been removed.
#[derive(Debug)]
pub struct WorkerSeries {
    /// `keyway_requests_in_flight{worker}`. Added to and subtracted from, never set: two answers may end at
    /// once.
    pub in_flight: IntGauge,
    /// `keyway_waiting_prefill_tokens{worker}`, likewise: uncached prompt tokens whose first token is
    /// awaited.
    pub waiting_prefill_tokens: IntGauge,
    picks: Counters<{ Reason::COUNT }>,
    predictions: Counters<3>,
    prediction_error: Counters<2>,
    ttft: Counter,
    ttft_error: [Counter; 2],
}

/// How a prediction of cached tokens came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prediction {
    /// As many were cached as predicted, give or take a block.
    Right,
    /// More were predicted than the worker found cached.
    Over,
    /// Fewer were predicted than the worker found cached.
    Under,
}

impl WorkerSeries {
    pub(super) fn new(metrics: &Metrics, worker: &str) -> Self {
        let caches = &metrics.caches;
        Self {
            in_flight: metrics.worker_in_flight.with_label_values(&[worker]),
            waiting_prefill_tokens: metrics.waiting_prefill_tokens.with_label_values(&[worker]),
            picks: Counters::new(&metrics.picks, worker),
            predictions: Counters::new(&caches.truth.predictions, worker),
            prediction_error: Counters::new(&caches.truth.prediction_error, worker),
            ttft: caches.truth.ttft.with_label_values(&[worker]),
            ttft_error: ["over", "under"]
                .map(|direction| caches.truth.ttft_error.with_label_values(&[worker, direction])),
        }
    }

    /// Counts a choice of this worker.
    pub fn picked(&self, reason: Reason) {
        self.picks.get(reason as usize, reason.as_str()).inc();
    }

    /// How often it was chosen.
    pub fn picks(&self) -> u64 {
        self.picks.handles.iter().filter_map(OnceLock::get).map(IntCounter::get).sum()
    }

    /// Counts a prediction of its cached tokens, and how many too many or too few it named.
    pub fn predicted(&self, came_out: Prediction, over: u64, under: u64) {
        let label = match came_out {
            Prediction::Right => "right",
            Prediction::Over => "over",
            Prediction::Under => "under",
        };
        self.predictions.get(came_out as usize, label).inc();
        self.prediction_error.get(0, "over").inc_by(over);
        self.prediction_error.get(1, "under").inc_by(under);
    }

    /// Counts a time to first token, in seconds, and by how much it was predicted otherwise.
    pub fn ttft_predicted(&self, predicted_s: f64, measured_s: f64) {
        let [over, under] = &self.ttft_error;
        self.ttft.inc_by(measured_s);
        let off = predicted_s - measured_s;
        if off > 0.0 { over.inc_by(off) } else { under.inc_by(-off) }
    }
}

/// One worker's counters of a family with one more label, by that label's place among its values. A series
/// appears when it is first counted.
#[derive(Debug)]
struct Counters<const N: usize> {
    family: IntCounterVec,
    worker: String,
    handles: [OnceLock<IntCounter>; N],
}

impl<const N: usize> Counters<N> {
    fn new(family: &IntCounterVec, worker: &str) -> Self {
        Self {
            family: family.clone(),
            worker: worker.to_owned(),
            handles: std::array::from_fn(|_| OnceLock::new()),
        }
    }

    fn get(&self, place: usize, label: &str) -> &IntCounter {
        self.handles[place].get_or_init(|| self.family.with_label_values(&[self.worker.as_str(), label]))
    }
}
