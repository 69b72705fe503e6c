//! The series of what is believed of workers' caches: where it comes from, and how true it turned out to be.

use prometheus::{CounterVec, GaugeVec, IntCounterVec, IntGauge, IntGaugeVec};

use super::Declare;

/// Handles of these series.
#[derive(Debug)]
pub struct CacheMetrics {
    /// `keyway_index_expected_blocks`: under way at workers with KV events, and not announced yet.
    pub index_expected: IntGauge,
    /// `keyway_worker_cached_blocks{worker}`: what the index believes it to hold, blocks of text and of
    /// tokens.
    pub worker_blocks: IntGaugeVec,
    /// `keyway_worker_cache_capacity_tokens{worker}`: 0 where it is unknown.
    pub worker_capacity: IntGaugeVec,
    /// `keyway_worker_prefill_tokens_per_second{worker}`: 0 until enough answers have told.
    pub worker_rate: GaugeVec,
    /// Predictions, and what became of them.
    pub truth: TruthMetrics,
    /// Prompts that leave their session's past.
    pub drift: DriftMetrics,
    /// `keyway_token_keyer_requests_total{model,outcome}`: `tokens`, `beginning`, or why not
    /// ([`crate::prompt::text::Unknown`]).
    pub token_keyer: IntCounterVec,
    /// `keyway_decision_log_lines_total{outcome="written|dropped|failed"}`: dropped where the file was too
    /// slow.
    pub decision_log: IntCounterVec,
    /// `keyway_kv_events_trusted{worker}`: 1 where the index holds exactly what its events say, else 0.
    pub kv_trusted: IntGaugeVec,
    /// `keyway_kv_event_batches_total{worker,source="live|replay"}`: batches received, live or asked for
    /// again.
    pub kv_batches: IntCounterVec,
    /// `keyway_kv_event_problems_total{worker,kind}`: gaps, restarts, and what could not be read or placed.
    pub kv_problems: IntCounterVec,
    /// `keyway_kv_replays_total{worker,outcome="complete|given_up"}`: requests for events that were missed.
    pub kv_replays: IntCounterVec,
    /// `keyway_kv_event_lag_seconds{worker}`: age of its last live batch when that came, by its own time
    /// stamp.
    pub kv_lag: GaugeVec,
}

/// Handles of the series of prompts that leave their session's past.
#[derive(Debug, Clone)]
pub struct DriftMetrics {
    /// `keyway_prompt_drifts_total{model,field}`: prompts that stopped repeating their session's past, by the
    /// field that changed.
    pub prompts: IntCounterVec,
    /// `keyway_prompt_drift_bytes_total{model}`: bytes of that past that they did not repeat.
    pub bytes: IntCounterVec,
}

impl DriftMetrics {
    fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            prompts: d.counter(
                "keyway_prompt_drifts_total",
                "Prompts that stopped repeating their session's past before its last message, by the field that changed.",
                &["model", "field"],
            )?,
            bytes: d.counter(
                "keyway_prompt_drift_bytes_total",
                "Bytes of their session's past that such prompts did not repeat, and so cannot find cached.",
                &["model"],
            )?,
        })
    }
}

/// Handles of the series of what was predicted of workers' caches.
#[derive(Debug)]
pub struct TruthMetrics {
    /// `keyway_predictions_total{worker,result="right|over|under"}`: answers, by whether about as many tokens
    /// were cached as predicted.
    pub predictions: IntCounterVec,
    /// `keyway_prediction_misses_total{worker,cause}`: predictions that were not right, by why.
    pub misses: IntCounterVec,
    /// `keyway_predictions_uncounted_total{worker,cause}`: answers that do not tell whether their prediction
    /// was right, by why.
    pub uncounted: IntCounterVec,
    /// `keyway_prediction_error_tokens_total{worker,direction="over|under"}`: tokens by which predictions
    /// were too high or too low.
    pub prediction_error: IntCounterVec,
    /// `keyway_ttft_prediction_seconds_total{worker}`: times to first token that were predicted, as they
    /// came out.
    pub ttft: CounterVec,
    /// `keyway_ttft_prediction_error_seconds_total{worker,direction="over|under"}`: by how much predictions
    /// were too high or too low.
    pub ttft_error: CounterVec,
}

impl TruthMetrics {
    fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            predictions: d.counter(
                "keyway_predictions_total",
                "Answers by whether about as many tokens were cached as the index predicted.",
                &["worker", "result"],
            )?,
            misses: d.counter(
                "keyway_prediction_misses_total",
                "Predictions that were not right, by why: tokens (template or tokenizer differ), under_way (another \
                 request was computing it), evicted, announced_late, model, text, unexplained.",
                &["worker", "cause"],
            )?,
            uncounted: d.counter(
                "keyway_predictions_uncounted_total",
                "Answers that do not tell whether their prediction was right, by why: not_reported (the worker does not say how much \
                 was cached), samples (several are asked for), batch (several prompts), prompt_logprobs (the cache is not read), \
                 truncated.",
                &["worker", "cause"],
            )?,
            prediction_error: d.counter(
                "keyway_prediction_error_tokens_total",
                "Tokens by which predictions of cached tokens were too high (over) or too low (under).",
                &["worker", "direction"],
            )?,
            ttft: d.real_counter(
                "keyway_ttft_prediction_seconds_total",
                "Times to first token of streams, from sending them to a worker, that were predicted: as they came out.",
                &["worker"],
            )?,
            ttft_error: d.real_counter(
                "keyway_ttft_prediction_error_seconds_total",
                "By how much predictions of such times were too high (over) or too low (under).",
                &["worker", "direction"],
            )?,
        })
    }
}

impl CacheMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            index_expected: d.gauge(
                "keyway_index_expected_blocks",
                "Blocks under way at workers with KV events and not announced yet.",
            )?,
            worker_blocks: d.gauges(
                "keyway_worker_cached_blocks",
                "Blocks that the index believes a worker to hold.",
                &["worker"],
            )?,
            worker_capacity: d.gauges(
                "keyway_worker_cache_capacity_tokens",
                "Tokens that a worker's cache is believed to hold; 0 where that is unknown.",
                &["worker"],
            )?,
            worker_rate: d.real_gauges(
                "keyway_worker_prefill_tokens_per_second",
                "How fast a worker computes prompts, by its answers' first tokens; 0 until that is known.",
            )?,
            truth: TruthMetrics::declare(d)?,
            drift: DriftMetrics::declare(d)?,
            token_keyer: d.counter(
                "keyway_token_keyer_requests_total",
                "Requests for models with a tokenizer: routed by their tokens, by those of their beginning where an image follows, \
                 or why by their text alone (differs: engines make other tokens of that API's requests).",
                &["model", "outcome"],
            )?,
            decision_log: d.counter(
                "keyway_decision_log_lines_total",
                "Choices sampled for the decision log, by what became of them: written, dropped as the file was too slow, or \
                 failed as it could not be written.",
                &["outcome"],
            )?,
            kv_trusted: d.gauges(
                "keyway_kv_events_trusted",
                "1 where the index holds exactly what a worker's KV events say.",
                &["worker"],
            )?,
            kv_batches: d.counter(
                "keyway_kv_event_batches_total",
                "Batches of KV events received, live or replayed.",
                &["worker", "source"],
            )?,
            kv_problems: d.counter(
                "keyway_kv_event_problems_total",
                "What was wrong with KV events: gaps, restarts, what could not be read or placed.",
                &["worker", "kind"],
            )?,
            kv_replays: d.counter(
                "keyway_kv_replays_total",
                "Requests for missed KV events, by how they ended.",
                &["worker", "outcome"],
            )?,
            kv_lag: d
                .real_gauges("keyway_kv_event_lag_seconds", "Age of the last live batch when it came.")?,
        })
    }
}
