//! The series of a model with their handles looked up once, as requests come by the ten thousand a second.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

use parking_lot::RwLock;
use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec};

use super::{Declare, TTFT_BUCKETS};
use crate::limits::MAX_MODEL_LABELS;

/// Seconds, from speculative decoding to a badly overloaded batch.
const ITL_BUCKETS: [f64; 15] =
    [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0, 80.0, 300.0];

/// Of what is counted by model.
#[derive(Debug, Clone)]
pub(super) struct Families {
    pub(super) requests: IntCounterVec,
    pub(super) ttft: HistogramVec,
    pub(super) itl: HistogramVec,
    pub(super) prompt_tokens: IntCounterVec,
    pub(super) generation_tokens: IntCounterVec,
    pub(super) cached_tokens: IntCounterVec,
}

impl Families {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            requests: d.counter("keyway_requests_total", "Requests ended.", &["model", "outcome"])?,
            ttft: d.histograms(
                "keyway_time_to_first_token_seconds",
                "From request head to the first generated content: text, a thought, a call, audio; not a role, a comment, or the \
                 word that an answer was begun.",
                &TTFT_BUCKETS,
            )?,
            itl: d.histograms(
                "keyway_inter_token_latency_seconds",
                "Between the events of a stream.",
                &ITL_BUCKETS,
            )?,
            prompt_tokens: d.counter(
                "keyway_prompt_tokens_total",
                "Prompt tokens, as workers report them.",
                &["model"],
            )?,
            generation_tokens: d.counter(
                "keyway_generation_tokens_total",
                "Generated tokens, as workers report them.",
                &["model"],
            )?,
            cached_tokens: d.counter(
                "keyway_cached_tokens_total",
                "Prompt tokens found in a prefix cache: predicted by the index, reported by the worker.",
                &["model", "source"],
            )?,
        })
    }
}

/// Handles of one model's series. A series appears when it is first counted.
#[derive(Debug)]
pub struct ModelSeries {
    label: String,
    families: Families,
    complete: OnceLock<IntCounter>,
    ttft: OnceLock<Histogram>,
    itl: OnceLock<Histogram>,
    tokens: OnceLock<[IntCounter; 4]>,
}

impl ModelSeries {
    fn new(label: &str, families: &Families) -> Arc<Self> {
        Arc::new(Self {
            label: label.to_owned(),
            families: families.clone(),
            complete: OnceLock::new(),
            ttft: OnceLock::new(),
            itl: OnceLock::new(),
            tokens: OnceLock::new(),
        })
    }

    /// The value of `model` in its series: a name of the fleet's, `other` or `none`.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Counts a request that ended this way.
    pub fn ended(&self, outcome: &'static str) {
        let of = |outcome| self.families.requests.with_label_values(&[self.label.as_str(), outcome]);
        if outcome == "complete" {
            self.complete.get_or_init(|| of(outcome)).inc();
        } else {
            of(outcome).inc();
        }
    }

    /// `keyway_time_to_first_token_seconds`: from a request's head to its first generated content.
    pub fn ttft(&self) -> &Histogram {
        self.ttft.get_or_init(|| self.families.ttft.with_label_values(&[self.label.as_str()]))
    }

    /// `keyway_inter_token_latency_seconds`: between two events of a stream.
    pub fn itl(&self) -> &Histogram {
        self.itl.get_or_init(|| self.families.itl.with_label_values(&[self.label.as_str()]))
    }

    /// Counts an answer's tokens: of the prompt, generated, and those of the prompt that were to be found
    /// cached and were.
    pub fn tokens(&self, prompt: u64, generated: u64, predicted: u64, reported: u64) {
        let label = self.label.as_str();
        let counters = self.tokens.get_or_init(|| {
            [
                self.families.prompt_tokens.with_label_values(&[label]),
                self.families.generation_tokens.with_label_values(&[label]),
                self.families.cached_tokens.with_label_values(&[label, "predicted"]),
                self.families.cached_tokens.with_label_values(&[label, "reported"]),
            ]
        });
        for (counter, tokens) in counters.iter().zip([prompt, generated, predicted, reported]) {
            counter.inc_by(tokens);
        }
    }
}

/// The models that have series of their own, and the two rows for the rest.
#[derive(Debug)]
pub(super) struct PerModel {
    families: Families,
    known: RwLock<HashMap<String, Arc<ModelSeries>>>,
    other: Arc<ModelSeries>,
    none: Arc<ModelSeries>,
}

impl PerModel {
    pub(super) fn new(families: Families) -> Self {
        Self {
            other: ModelSeries::new("other", &families),
            none: ModelSeries::new("none", &families),
            known: RwLock::default(),
            families,
        }
    }

    pub(super) fn admit(&self, model: &str) {
        if self.known.read().contains_key(model) {
            return;
        }
        let mut known = self.known.write();
        if known.len() < MAX_MODEL_LABELS {
            known.entry(model.to_owned()).or_insert_with(|| ModelSeries::new(model, &self.families));
        }
    }

    pub(super) fn get(&self, model: Option<&str>) -> Arc<ModelSeries> {
        match model {
            Some(model) => Arc::clone(self.known.read().get(model).unwrap_or(&self.other)),
            None => Arc::clone(&self.none),
        }
    }
}
