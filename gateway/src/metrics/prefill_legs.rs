//! The series of prompts that one worker computes for another.

use prometheus::{GaugeVec, Histogram, IntCounterVec};

use super::{Declare, TTFT_BUCKETS};

/// Handles of these series.
#[derive(Debug)]
pub struct PrefillLegMetrics {
    /// `keyway_prefill_legs_total{worker,outcome}`: by the worker that was to compute the prompt.
    pub legs: IntCounterVec,
    /// `keyway_prompt_ways_total{way}`: requests with a choice of ways, by what was chosen.
    ways: IntCounterVec,
    /// `keyway_prefill_leg_seconds`: from the choice of that worker to the end of its answer.
    pub seconds: Histogram,
    /// `keyway_kv_handover_seconds`: from the question to the worker that answers to its first token.
    pub handover: Histogram,
    /// `keyway_kv_transfer_seconds_per_token{from,to}`, as it is believed.
    pub transfer_seconds_per_token: GaugeVec,
    /// `keyway_kv_transfer_handover_seconds{from,to}`, likewise.
    pub transfer_handover_seconds: GaugeVec,
    /// `keyway_prefill_asked_share{worker}`: of workers for prefill.
    pub asked_share: GaugeVec,
}

impl PrefillLegMetrics {
    pub(super) fn declare(d: &Declare) -> prometheus::Result<Self> {
        Ok(Self {
            legs: d.counter(
                "keyway_prefill_legs_total",
                "Prompts that a worker was to compute for another, by what came of it: done, or why that was tried again or computed \
                 where it is answered (busy, lost, failed, rejected, no_params, unreadable, ended).",
                &["worker", "outcome"],
            )?,
            seconds: d.histogram(
                "keyway_prefill_leg_seconds",
                "Time that requests waited for another worker to compute their prompt.",
                &TTFT_BUCKETS,
            )?,
            ways: d.counter(
                "keyway_prompt_ways_total",
                "Requests whose prompt another worker than the one that answers could compute, by the way chosen (here, split), and \
                 those of which another worker has cached what the one that answers fetches (pull).",
                &["way"],
            )?,
            handover: d.histogram(
                "keyway_kv_handover_seconds",
                "Time from asking a worker whose KV another has computed to its first token.",
                &TTFT_BUCKETS,
            )?,
            transfer_seconds_per_token: d.real_gauges_of(
                "keyway_kv_transfer_seconds_per_token",
                "What fetching the KV of a prompt token takes between two workers, fitted from handovers; once three were seen.",
                &["from", "to"],
            )?,
            transfer_handover_seconds: d.real_gauges_of(
                "keyway_kv_transfer_handover_seconds",
                "What each handover between two workers takes however little is fetched, fitted likewise.",
                &["from", "to"],
            )?,
            asked_share: d.real_gauges_of(
                "keyway_prefill_asked_share",
                "Share of a prefill worker's time that this gateway's prompts ask for, whether they are sent to it or not, once its speed \
                 is known. Where the sum over gateways is above 1, such workers cannot compute all prompts.",
                &["worker"],
            )?,
        })
    }

    /// A request had a choice of ways.
    pub fn chose(&self, splits: bool, pulls: bool) {
        let way = match (splits, pulls) {
            (true, _) => "split",
            (false, true) => "pull",
            (false, false) => "here",
        };
        self.ways.with_label_values(&[way]).inc();
    }
}
