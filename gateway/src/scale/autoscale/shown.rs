//! A model's sum as others see it: its series, and its row on the operators' page.

use keyway_core::autoscale::{ScaleReason, Seen, Sum};
use serde::Serialize;

use super::{Autoscale, Pool};
use crate::config::Role;

impl Autoscale {
    /// Sets the series of a model's workers, or of those of a role.
    pub(super) fn show(&self, model: &str, role: Option<Role>, seen: &Seen, sum: &Sum) {
        let metrics = &self.metrics.scale;
        let part = role.map_or("", Role::as_str);
        let label = [model, part];
        metrics.desired.with_label_values(&label).set(sum.desired.into());
        let terms = &sum.terms;
        for (term, workers) in [
            ("prefill", terms.prefill),
            ("backlog", terms.backlog),
            ("decode", terms.decode),
            ("kv", terms.kv),
        ] {
            metrics.terms.with_label_values(&[model, part, term]).set(workers);
        }
        metrics.need.with_label_values(&label).set(sum.need);
        metrics.correction.with_label_values(&label).set(sum.correction);
        metrics.margin.with_label_values(&label).set(sum.spare);
        metrics.guard.with_label_values(&label).set(sum.guard.into());
        metrics.peak.with_label_values(&label).set(sum.peak.into());
        for reason in ScaleReason::ALL {
            let is = i64::from(reason == sum.reason);
            metrics.reason.with_label_values(&[model, part, reason.as_str()]).set(is);
        }
        for (state, workers) in [("ready", seen.ready), ("starting", seen.starting)] {
            metrics.workers.with_label_values(&[model, part, state]).set(workers.into());
        }
        metrics.uncached.with_label_values(&label).set(seen.uncached_tokens_per_s);
        metrics.rate.with_label_values(&label).set(seen.prefill_tokens_per_s);
        metrics.backlog.with_label_values(&label).set(seen.backlog_tokens);
        let rules = &self.config.of(model, role).rules;
        metrics.slo.with_label_values(&label).set(rules.ttft_slo_s);
        for (bound, workers) in [("min", rules.min), ("max", rules.max)] {
            metrics.bounds.with_label_values(&[model, part, bound]).set(workers.into());
        }
    }

    /// Takes back the series of a model whose workers turn out to have roles.
    pub(super) fn hide(&self, model: &str) {
        self.metrics.scale.forget_undivided(model);
    }
}

/// One model's sum, as the operators' page shows it.
#[derive(Debug, Serialize)]
pub struct ScaleRow {
    /// Base model of the fleet; requests for its adapters count here.
    pub model: String,
    /// For which part of requests these workers are; absent where the model's have no roles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Workers wanted, from `min` to `max`.
    pub desired: u32,
    /// Which term or bound decided: a [`ScaleReason`] by its name.
    pub reason: &'static str,
    /// Workers that take requests.
    pub ready: u32,
    /// Workers known that do not yet.
    pub starting: u32,
    /// Fewest workers that may be wanted, by the operator's rules.
    pub min: u32,
    /// Most workers that may be wanted, by the operator's rules.
    pub max: u32,
    /// Workers for the uncached prompt tokens that come, at the utilisation that the rules name.
    pub prefill: f64,
    /// Workers for what comes, and to catch up with what waits.
    pub backlog: f64,
    /// Workers for requests past their first token; 0 unless the rules say how many one bears.
    pub decode: f64,
    /// Workers for the KV cache that running requests hold; 0 where no worker's cache size is known.
    pub kv: f64,
    /// What they come to.
    pub need: f64,
    /// Factor that missed SLOs have taught.
    pub correction: f64,
    /// What the SLO guard asks for.
    pub guard: u32,
    /// The greatest of the scale-in time.
    pub peak: u32,
    /// Uncached prompt tokens that come in a second.
    pub uncached_tokens_per_s: f64,
    /// Uncached prompt tokens of requests without a first token, with or without a worker.
    pub backlog_tokens: f64,
    /// Prompt tokens that a worker computes in a second.
    pub prefill_tokens_per_s: f64,
    /// What nine of ten streams kept.
    pub ttft_p90_s: Option<f64>,
    /// What they are to keep.
    pub ttft_slo_s: f64,
    /// The same for the mean time between an answer's tokens.
    pub itl_p90_s: Option<f64>,
    /// What they are to keep, if that is watched.
    pub itl_slo_s: Option<f64>,
    /// Requests that wait for a first worker.
    pub first_waiting: u64,
}

impl Pool {
    /// One for all workers, or one for each role that they have.
    pub(super) fn rows(&self) -> Vec<ScaleRow> {
        self.parts().into_iter().filter_map(|role| self.row(role)).collect()
    }

    fn row(&self, role: Option<Role>) -> Option<ScaleRow> {
        let state = self.of(role.unwrap_or_default());
        let (seen, sum) = state.last?;
        let rules = state.scaler.rules();
        Some(ScaleRow {
            model: self.model.clone(),
            role,
            desired: sum.desired,
            reason: sum.reason.as_str(),
            ready: seen.ready,
            starting: seen.starting,
            min: rules.min,
            max: rules.max,
            prefill: sum.terms.prefill,
            backlog: sum.terms.backlog,
            decode: sum.terms.decode,
            kv: sum.terms.kv,
            need: sum.need,
            correction: sum.correction,
            guard: sum.guard,
            peak: sum.peak,
            uncached_tokens_per_s: seen.uncached_tokens_per_s,
            backlog_tokens: seen.backlog_tokens,
            prefill_tokens_per_s: seen.prefill_tokens_per_s,
            ttft_p90_s: seen.ttft_p90_s,
            ttft_slo_s: rules.ttft_slo_s,
            itl_p90_s: seen.itl_p90_s,
            itl_slo_s: rules.itl_slo_s,
            first_waiting: state.first_waiting,
        })
    }
}
