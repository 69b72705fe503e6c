//! The series of the fleet's size: the autoscaling sum term by term, its result, and those who wait for a
//! first worker. Where a model's workers have no roles, its series have no label for one.

use keyway_core::autoscale::ScaleReason;
use prometheus::{GaugeVec, IntCounterVec, IntGaugeVec, proto::MetricFamily};

use super::Declare;

/// Whether a family has a series for each role.
pub(super) fn is_by_role(name: &str) -> bool {
    name.starts_with("keyway_scale_") || name == "keyway_desired_workers"
}

/// Leaves the label of a role out where a model's workers have none.
pub(super) fn without_no_role(family: &mut MetricFamily) {
    for series in family.mut_metric() {
        let labels = series.take_label().into_iter().filter(|label| !label.value().is_empty());
        series.set_label(labels.collect());
    }
}

/// Handles of these series.
#[derive(Debug)]
pub struct ScaleMetrics {
    /// `keyway_desired_workers{model,role}`: the result, by what this gateway alone sees.
    pub desired: IntGaugeVec,
    /// `keyway_scale_term_workers{model,role,term="prefill|backlog|decode|kv"}`: of this gateway alone; add
    /// them up.
    pub terms: GaugeVec,
    /// `keyway_scale_need_workers{model,role}`: what the terms come to, correction included, before bounds.
    pub need: GaugeVec,
    /// `keyway_scale_correction_ratio{model,role}`: factor on the terms that missed SLOs have taught; at
    /// least 1.
    pub correction: GaugeVec,
    /// `keyway_scale_margin_ratio{model,role}`: factor from workers needed to those that let one be given up.
    pub margin: GaugeVec,
    /// `keyway_scale_guard_workers{model,role}`: what the SLO guard asks for; 0 where the SLO is met.
    pub guard: IntGaugeVec,
    /// `keyway_scale_peak_workers{model,role}`: the most that were needed with a margin during the scale-in
    /// time.
    pub peak: IntGaugeVec,
    /// `keyway_scale_bound_workers{model,role,bound="min|max"}`: fewest and most, as the operator configured
    /// them.
    pub bounds: IntGaugeVec,
    /// `keyway_scale_reason{model,role,reason}`: 1 for the one in force.
    pub reason: IntGaugeVec,
    /// `keyway_scale_workers{model,role,state="ready|starting"}`: those that take requests, and those that do
    /// not yet.
    pub workers: IntGaugeVec,
    /// `keyway_scale_uncached_tokens_per_second{model,role}`: uncached prompt tokens that came lately.
    pub uncached: GaugeVec,
    /// `keyway_scale_prefill_tokens_per_second{model,role}`: what one worker computes, as the sum takes it.
    pub rate: GaugeVec,
    /// `keyway_scale_backlog_tokens{model,role}`: an in-flight gauge.
    pub backlog: GaugeVec,
    /// `keyway_scale_ttft_slo_seconds{model,role}`: time to first token that nine of ten streams are to keep.
    pub slo: GaugeVec,
    /// `keyway_scale_waiting_requests{model}`: an in-flight gauge.
    pub waiting: IntGaugeVec,
    /// `keyway_scale_waits_total{model,outcome="served|timed_out|refused|left"}`: requests that met a model
    /// without a worker, by what became of them.
    pub waits: IntCounterVec,
    /// `keyway_external_scaler_calls_total{method,outcome="ok|failed"}`: KEDA's calls, by method.
    pub external_calls: IntCounterVec,
}

impl ScaleMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        let fleet = &["model", "role"][..];
        let real = |name, help| d.real_gauges_of(name, help, fleet);
        let whole = |name, help| d.gauges(name, help, fleet);
        Ok(Self {
            desired: whole("keyway_desired_workers", "Workers that a model needs by what this gateway sees; with several gateways see the recording rule.")?,
            terms: d.real_gauges_of(
                "keyway_scale_term_workers",
                "Terms of the autoscaling sum in workers, of this gateway's requests alone: add up over gateways.",
                &["model", "role", "term"],
            )?,
            need: real("keyway_scale_need_workers", "What the terms come to in workers, correction included, before bounds and holding.")?,
            correction: real("keyway_scale_correction_ratio", "Factor on the terms that missed SLOs have taught; at least 1.")?,
            margin: real("keyway_scale_margin_ratio", "Factor from workers needed to workers that must be enough before one is given up.")?,
            guard: whole("keyway_scale_guard_workers", "Workers that the SLO guard asks for; 0 where it is met.")?,
            peak: whole("keyway_scale_peak_workers", "Greatest number of workers needed with a margin during the scale-in time.")?,
            bounds: d.gauges(
                "keyway_scale_bound_workers",
                "Least and most workers of a model, as configured.",
                &["model", "role", "bound"],
            )?,
            reason: d.gauges(
                "keyway_scale_reason",
                "1 for the term that decides how many workers are desired.",
                &["model", "role", "reason"],
            )?,
            workers: d.gauges("keyway_scale_workers", "Workers of a model by state.", &["model", "role", "state"])?,
            uncached: real("keyway_scale_uncached_tokens_per_second", "Uncached prompt tokens that come in a second.")?,
            rate: real("keyway_scale_prefill_tokens_per_second", "Prompt tokens that one worker of a model computes in a second, as the sum takes it.")?,
            backlog: real("keyway_scale_backlog_tokens", "Uncached prompt tokens of requests without a first token.")?,
            slo: real("keyway_scale_ttft_slo_seconds", "Time to first token that nine of ten streams are to keep, as configured.")?,
            waiting: d.gauges("keyway_scale_waiting_requests", "Requests that wait for the first worker of their model.", &["model"])?,
            waits: d.counter(
                "keyway_scale_waits_total",
                "Requests that met a model without a worker, by what became of them.",
                &["model", "outcome"],
            )?,
            external_calls: d.counter(
                "keyway_external_scaler_calls_total",
                "Calls of KEDA to the external scaler, by method.",
                &["method", "outcome"],
            )?,
        })
    }

    /// Removes the series of a model's workers together, whose sum is one by role from now on.
    pub(crate) fn forget_undivided(&self, model: &str) {
        let label = [model, ""];
        let whole = [&self.desired, &self.guard, &self.peak];
        let real = [
            &self.need,
            &self.correction,
            &self.margin,
            &self.uncached,
            &self.rate,
            &self.backlog,
            &self.slo,
        ];
        // What was not there is not there.
        for family in whole {
            drop(family.remove_label_values(&label));
        }
        for family in real {
            drop(family.remove_label_values(&label));
        }
        for term in ["prefill", "backlog", "decode", "kv"] {
            drop(self.terms.remove_label_values(&[model, "", term]));
        }
        for (family, values) in [(&self.bounds, ["min", "max"]), (&self.workers, ["ready", "starting"])] {
            for value in &values {
                drop(family.remove_label_values(&[model, "", value]));
            }
        }
        for reason in ScaleReason::ALL {
            drop(self.reason.remove_label_values(&[model, "", reason.as_str()]));
        }
    }
}
