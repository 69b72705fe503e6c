//! The series of a model with their handles looked up once, as requests come by the ten thousand a second.

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use foldhash::fast::RandomState;
use parking_lot::RwLock;
use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, core::Metric};

use super::{Declare, TTFT_BUCKETS};
use crate::limits::MAX_MODEL_LABELS;

/// Seconds, from speculative decoding to a badly overloaded batch.
const ITL_BUCKETS: [f64; 15] =
    [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0, 80.0, 300.0];

/// The outcome of a request that ended well.
pub const COMPLETE: &str = "complete";

/// Of what is counted by model.
#[derive(Debug, Clone)]
pub(super) struct Families {
    pub(super) requests: IntCounterVec,
    pub(super) ttft: HistogramVec,
    pub(super) objectives: IntCounterVec,
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
            objectives: d.counter(
                "keyway_ttft_objectives_total",
                "Streams with a first token whose request said when it wants it (x-keyway-slo-ttft-ms): kept or missed.",
                &["model", "outcome"],
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

/// What has been counted of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelTotals {
    /// The value of `model` in its series.
    pub model: String,
    /// Requests that have ended.
    pub ended: u64,
    /// Those of them that did not end well.
    pub failed: u64,
    /// Times to the first token, by the histogram's buckets and above the last of them; not cumulative.
    pub ttft: [u64; TTFT_BUCKETS.len() + 1],
    /// Prompt tokens, as workers report them.
    pub prompt_tokens: u64,
    /// Those that were found cached.
    pub cached_tokens: u64,
}

/// Handles of one model's series. A series appears when it is first counted.
#[derive(Debug)]
pub struct ModelSeries {
    label: String,
    families: Families,
    complete: OnceLock<IntCounter>,
    /// All that ended in another way.
    failed: AtomicU64,
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
            failed: AtomicU64::new(0),
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
        if outcome == COMPLETE {
            self.complete.get_or_init(|| of(outcome)).inc();
        } else {
            self.failed.fetch_add(1, Relaxed);
            of(outcome).inc();
        }
    }

    /// Counts a stream whose request wanted its first token by a certain time.
    pub fn had_objective(&self, kept: bool) {
        let outcome = if kept { "kept" } else { "missed" };
        self.families.objectives.with_label_values(&[self.label.as_str(), outcome]).inc();
    }

    fn totals(&self) -> ModelTotals {
        let complete = self.complete.get().map_or(0, IntCounter::get);
        let failed = self.failed.load(Relaxed);
        let ttft = self.ttft.get().map(buckets).unwrap_or_default();
        let tokens = |at: usize| self.tokens.get().map_or(0, |counters| counters[at].get());
        ModelTotals {
            model: self.label.clone(),
            ended: complete + failed,
            failed,
            ttft,
            prompt_tokens: tokens(0),
            cached_tokens: tokens(3),
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

/// How many a histogram has in each of its buckets, and above the last.
fn buckets(histogram: &Histogram) -> [u64; TTFT_BUCKETS.len() + 1] {
    let metric = histogram.metric();
    let found = metric.get_histogram();
    let up_to = found.get_bucket().iter().map(prometheus::proto::Bucket::cumulative_count);
    let (mut counts, mut below) = ([0; TTFT_BUCKETS.len() + 1], 0);
    for (count, up_to) in counts.iter_mut().zip(up_to.chain([found.get_sample_count()])) {
        (*count, below) = (up_to.saturating_sub(below), up_to);
    }
    counts
}

/// The models that have series of their own, and the two rows for the rest.
#[derive(Debug)]
pub(super) struct PerModel {
    families: Families,
    /// By names of the fleet's own, which no client chooses.
    known: RwLock<HashMap<String, Arc<ModelSeries>, RandomState>>,
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

    /// Of each model that has counted something.
    pub(super) fn totals(&self) -> Vec<ModelTotals> {
        let known = self.known.read();
        let all = known.values().chain([&self.other, &self.none]);
        let totals = all.map(|series| series.totals()).filter(|totals| totals.ended > 0);
        totals.collect()
    }

    pub(super) fn get(&self, model: Option<&str>) -> Arc<ModelSeries> {
        match model {
            Some(model) => Arc::clone(self.known.read().get(model).unwrap_or(&self.other)),
            None => Arc::clone(&self.none),
        }
    }
}
