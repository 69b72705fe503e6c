//! Every series of the worker, declared once. One registry per worker, because a process may embed several.
//! What is also exposed under vLLM's names is in `metrics/vllm.rs`.

mod experts;
mod kv_transfer;
mod page;
mod vllm;

use std::collections::HashMap;
use std::sync::Arc;

pub(crate) use experts::ExpertMetrics;
pub(crate) use kv_transfer::KvTransferMetrics;
pub(crate) use page::MetricsPage;
use prometheus::{
    Error, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry,
};

/// Seconds to the first token: from a warm prompt on an idle worker to a long queue.
const TTFT_BUCKETS_S: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// Seconds between tokens, and of a step: a small model's decode to a large one's prefill.
const STEP_BUCKETS_S: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5];

/// What a step consists of.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Phase {
    Prefill,
    Decode,
    Mixed,
}

/// How a request ended, as the label `outcome`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// By itself or at a stop string.
    Stop,
    /// It came to as many tokens as its `max_tokens` allows.
    Length,
    /// Its client went away.
    Aborted,
    /// It was refused through the client's mistake.
    Invalid,
    /// The queue was full.
    Overloaded,
    /// It failed through the worker's fault, as when the engine stopped.
    Error,
}

/// One engine's series, in a registry of its own; several engines' are told apart by the label `engine`.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    model: String,
    /// Set where a worker has several engines.
    rank: Option<usize>,
    pub(crate) requests_running: IntGauge,
    pub(crate) requests_waiting: IntGauge,
    pub(crate) waiting_uncached_tokens: IntGauge,
    pub(crate) kv_blocks_used: IntGauge,
    pub(crate) kv_blocks_held: IntGauge,
    pub(crate) prompt_tokens: IntCounter,
    pub(crate) cached_tokens: IntCounter,
    pub(crate) external_wanted_tokens: IntCounter,
    pub(crate) external_tokens: IntCounter,
    pub(crate) generation_tokens: IntCounter,
    pub(crate) drawn_tokens: IntCounter,
    pub(crate) preemptions: IntCounter,
    pub(crate) kv_event_batches: IntCounter,
    pub(crate) kv_event_batches_merged: IntCounter,
    pub(crate) kv_event_batches_missed: IntCounter,
    pub(crate) kv_replay_requests: IntCounter,
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token_latency: Histogram,
    steps: HistogramVec,
    requests: IntCounterVec,
}

/// What does not change while the worker runs.
#[derive(Debug)]
pub(crate) struct StaticInfo<'a> {
    pub(crate) model: &'a str,
    pub(crate) numerics_id: &'a str,
    pub(crate) block_size: usize,
    pub(crate) num_blocks: usize,
}

impl Metrics {
    /// The series of a worker's only engine.
    #[cfg(test)]
    pub(crate) fn new(info: &StaticInfo<'_>) -> Result<Self, Error> {
        Self::of_rank(info, None)
    }

    /// The series of one engine, with a label that says which if there are several.
    pub(crate) fn of_rank(info: &StaticInfo<'_>, rank: Option<usize>) -> Result<Self, Error> {
        let label = rank.map(|rank| HashMap::from([("engine".to_owned(), rank.to_string())]));
        let registry = Registry::new_custom(None, label)?;
        let new = Series { registry: &registry };
        new.gauge("kv_blocks", "KV blocks of the cache.")?.set(info.num_blocks as i64);
        new.info(info)?;
        let requests = IntCounterVec::new(
            Opts::new("keyway_worker_requests_total", "Requests for a generation, by how they ended."),
            &["outcome"],
        )?;
        registry.register(Box::new(requests.clone()))?;
        let help = "Time of one engine step, by what ran in it; the sum is the busy time.";
        let steps = new.seconds("step", help, STEP_BUCKETS_S, &["phase"])?;
        for outcome in Outcome::ALL {
            requests.with_label_values(&[outcome.as_str()]);
        }
        for phase in [Phase::Prefill, Phase::Decode, Phase::Mixed] {
            steps.with_label_values(&[phase.as_str()]);
        }
        let none: &[&str] = &[];
        let first = "Time from a request's arrival at the engine to its first token.";
        let first = new.seconds("time_to_first_token", first, TTFT_BUCKETS_S, none)?;
        let between = "Time between two tokens of one sequence.";
        let between = new.seconds("inter_token_latency", between, STEP_BUCKETS_S, none)?;
        let used = "KV blocks held by running sequences; cached blocks without a holder are free.";
        let held = "KV blocks held for other workers, and for KV that comes from them.";
        let wanted = "Prompt tokens not cached here, of requests that say where their KV is.";
        let external = "Prompt tokens whose KV came from another worker.";
        let waiting = "Sequences waiting for KV blocks or a place in the batch.";
        let uncached = "Prompt tokens to be computed before first tokens: those of waiting sequences that are not cached now, \
                        and the rest of prefills that have begun.";
        let preemptions = "Sequences put back to the queue because KV blocks ran out.";
        let merged = "Steps whose KV events went out in a later batch because the publisher was behind.";
        let missed = "Batches of KV events that a slow subscriber missed, for each such subscriber.";
        let drawn = "Tokens generated that a GPU drew itself; the others were sampled from their logits.";
        let replays = "Requests for a replay or a snapshot of KV events.";
        Ok(Self {
            requests_running: new.gauge("requests_running", "Sequences that hold KV blocks.")?,
            requests_waiting: new.gauge("requests_waiting", waiting)?,
            // Named as SGLang's, by which routers know it.
            waiting_uncached_tokens: new.gauge("num_waiting_uncached_tokens", uncached)?,
            kv_blocks_used: new.gauge("kv_blocks_used", used)?,
            kv_blocks_held: new.gauge("kv_blocks_held", held)?,
            prompt_tokens: new
                .counter("prompt_tokens", "Tokens of the prompts admitted, cached ones included.")?,
            cached_tokens: new
                .counter("cached_tokens", "Prompt tokens whose KV was found in the prefix cache.")?,
            external_wanted_tokens: new.counter("external_wanted_tokens", wanted)?,
            external_tokens: new.counter("external_tokens", external)?,
            generation_tokens: new.counter("generation_tokens", "Tokens generated.")?,
            drawn_tokens: new.counter("drawn_tokens", drawn)?,
            preemptions: new.counter("preemptions", preemptions)?,
            kv_event_batches: new.counter("kv_event_batches", "Batches of KV events published.")?,
            kv_event_batches_merged: new.counter("kv_event_batches_merged", merged)?,
            kv_event_batches_missed: new.counter("kv_event_batches_missed", missed)?,
            kv_replay_requests: new.counter("kv_replay_requests", replays)?,
            time_to_first_token: first.with_label_values(none),
            inter_token_latency: between.with_label_values(none),
            steps,
            requests,
            registry,
            model: info.model.to_owned(),
            rank,
        })
    }

    pub(crate) fn step_seconds(&self, phase: Phase) -> Histogram {
        self.steps.with_label_values(&[phase.as_str()])
    }
}

/// Creates series and registers them.
struct Series<'a> {
    registry: &'a Registry,
}

impl Series<'_> {
    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, Error> {
        let gauge = IntGauge::new(format!("keyway_worker_{name}"), help)?;
        self.registry.register(Box::new(gauge.clone()))?;
        Ok(gauge)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, Error> {
        let counter = IntCounter::new(format!("keyway_worker_{name}_total"), help)?;
        self.registry.register(Box::new(counter.clone()))?;
        Ok(counter)
    }

    fn seconds(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
        labels: &[&str],
    ) -> Result<HistogramVec, Error> {
        let opts =
            HistogramOpts::new(format!("keyway_worker_{name}_seconds"), help).buckets(buckets.to_vec());
        let histogram = HistogramVec::new(opts, labels)?;
        self.registry.register(Box::new(histogram.clone()))?;
        Ok(histogram)
    }

    /// Gauges that are 1 and say something in their labels.
    fn info(&self, info: &StaticInfo<'_>) -> Result<(), Error> {
        let one = |name: &str, help: &str, labels: &[(&str, &str)]| -> Result<(), Error> {
            let (names, values): (Vec<&str>, Vec<&str>) = labels.iter().copied().unzip();
            let gauge = IntGaugeVec::new(Opts::new(format!("keyway_worker_{name}_info"), help), &names)?;
            gauge.with_label_values(&values).set(1);
            self.registry.register(Box::new(gauge))
        };
        let (block_size, num_blocks) = (info.block_size.to_string(), info.num_blocks.to_string());
        one(
            "cache_config",
            "Shape of the KV cache.",
            &[("block_size", &block_size), ("num_blocks", &num_blocks)],
        )?;
        let build = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("model", info.model),
            ("numerics_id", info.numerics_id),
        ];
        one("build", "Version, model and numerics id of this worker.", &build)
    }
}

impl Phase {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
        }
    }
}

impl Outcome {
    const ALL: [Self; 6] =
        [Self::Stop, Self::Length, Self::Aborted, Self::Invalid, Self::Overloaded, Self::Error];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Aborted => "aborted",
            Self::Invalid => "invalid",
            Self::Overloaded => "overloaded",
            Self::Error => "error",
        }
    }
}

/// Counts one request when it is over, which is when this is dropped: as aborted, unless told otherwise
/// before.
#[derive(Debug)]
pub(crate) struct RequestGuard {
    metrics: Arc<Metrics>,
    outcome: Outcome,
}

impl RequestGuard {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, outcome: Outcome::Aborted }
    }

    pub(crate) fn set(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.metrics.requests.with_label_values(&[self.outcome.as_str()]).inc();
    }
}
