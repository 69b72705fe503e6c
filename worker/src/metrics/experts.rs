//! The series of a worker whose experts are spread over ranks. A worker on one rank has none of them.

use std::sync::Arc;

use keyway_kernels::moe::parallel::Times;
use prometheus::{
    Error, Gauge, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
};

use super::Series;

/// Seconds of one layer's part: from an exchange between processes to a large prefill's experts.
const LAYER_BUCKETS_S: &[f64] =
    &[0.000_001, 0.000_005, 0.000_02, 0.000_1, 0.000_5, 0.002, 0.01, 0.05, 0.25, 1.0];

/// What an expert-parallel group tells.
#[derive(Debug)]
pub(crate) struct ExpertMetrics {
    pub(super) registry: Registry,
    /// Whether all ranks are there.
    pub(crate) up: IntGauge,
    /// Failures, by the rank at fault.
    pub(crate) failures: IntCounterVec,
    pub(crate) restarts: IntCounter,
    /// How often experts were given other ranks.
    pub(crate) placements: IntCounter,
    by_expert: Vec<IntCounter>,
    by_rank: Vec<IntCounter>,
    imbalance: Gauge,
    dispatch: Histogram,
    compute: Histogram,
    combine: Histogram,
}

impl ExpertMetrics {
    /// The series of `ranks` ranks with so many experts in the largest layer.
    pub(crate) fn new(ranks: usize, experts: usize) -> Result<Arc<Self>, Error> {
        let registry = Registry::new();
        let new = Series { registry: &registry };
        let counters =
            |name: &str, help: &str, label: &str, count: usize| -> Result<Vec<IntCounter>, Error> {
                let counter =
                    IntCounterVec::new(Opts::new(format!("keyway_worker_{name}_total"), help), &[label])?;
                registry.register(Box::new(counter.clone()))?;
                Ok((0..count).map(|i| counter.with_label_values(&[&i.to_string()])).collect())
            };
        let failures = IntCounterVec::new(
            Opts::new(
                "keyway_worker_expert_rank_failures_total",
                "Failures of the group, by the rank at fault.",
            ),
            &["rank"],
        )?;
        registry.register(Box::new(failures.clone()))?;
        for rank in 0..ranks {
            failures.with_label_values(&[&rank.to_string()]);
        }
        let imbalance = Gauge::new(
            "keyway_worker_expert_imbalance",
            "Rows of the busiest rank over the mean, in the last layer that ran (with data-parallel attention: the last \
             step); 1 is even.",
        )?;
        registry.register(Box::new(imbalance.clone()))?;
        let help = "Time of a layer's exchange between ranks or of its experts, on rank 0; waiting for others included.";
        let layer: HistogramVec = new.seconds("expert_layer", help, LAYER_BUCKETS_S, &["part"])?;
        Ok(Arc::new(Self {
            up: new.gauge(
                "expert_ranks_up",
                "1 while all expert-parallel ranks serve, 0 while the group restarts.",
            )?,
            failures,
            restarts: new.counter("expert_group_restarts", "Restarts of the expert-parallel group.")?,
            placements: new.counter("expert_placements", "Times that experts were moved between ranks.")?,
            by_expert: counters(
                "expert_tokens",
                "Tokens routed to each expert, over all layers.",
                "expert",
                experts,
            )?,
            by_rank: counters("expert_rank_tokens", "Tokens served by each rank's experts.", "rank", ranks)?,
            imbalance,
            dispatch: layer.with_label_values(&["dispatch"]),
            compute: layer.with_label_values(&["compute"]),
            combine: layer.with_label_values(&["combine"]),
            registry,
        }))
    }

    /// Counts a layer's slots.
    pub(crate) fn record_ids(&self, ids: &[u32]) {
        for counter in ids.iter().filter_map(|id| self.by_expert.get(*id as usize)) {
            counter.inc();
        }
    }

    /// Where a layer's time went.
    pub(crate) fn record_times(&self, times: Times) {
        self.dispatch.observe(times.dispatch.as_secs_f64());
        self.compute.observe(times.compute.as_secs_f64());
        self.combine.observe(times.combine.as_secs_f64());
    }

    /// How many rows each rank served.
    pub(crate) fn record_rows(&self, rows: impl Iterator<Item = usize>) {
        let (mut all, mut most) = (0, 0);
        for (counter, rows) in self.by_rank.iter().zip(rows) {
            counter.inc_by(rows as u64);
            all += rows;
            most = most.max(rows);
        }
        if all > 0 {
            self.imbalance.set((most * self.by_rank.len()) as f64 / all as f64);
        }
    }

    /// Counts so many slots of an expert.
    pub(crate) fn record_expert(&self, expert: usize, slots: u64) {
        if let Some(counter) = self.by_expert.get(expert) {
            counter.inc_by(slots);
        }
    }
}

#[cfg(test)]
impl ExpertMetrics {
    /// All series in Prometheus's text format.
    pub(crate) fn text(&self) -> String {
        prometheus::TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap()
    }
}
