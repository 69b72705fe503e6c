//! The page of all series: those of every engine, told apart by the label `engine` where there are several,
//! and those of the group whose experts they share.

use std::sync::Arc;

use prometheus::core::Collector;
use prometheus::proto::MetricFamily;
use prometheus::{Encoder as _, TextEncoder};

use crate::log;

use super::{ExpertMetrics, KvTransferMetrics, Metrics, RequestGuard, vllm};

/// Everything that a worker exposes.
#[derive(Debug)]
pub(crate) struct MetricsPage {
    /// By data-parallel rank, at least one.
    engines: Vec<Arc<Metrics>>,
    /// Where experts are spread over ranks.
    experts: Option<Arc<ExpertMetrics>>,
    /// Where KV goes between workers.
    kv_transfer: Option<Arc<KvTransferMetrics>>,
}

impl MetricsPage {
    pub(crate) fn new(engines: Vec<Arc<Metrics>>, experts: Option<Arc<ExpertMetrics>>) -> Self {
        Self { engines, experts, kv_transfer: None }
    }

    /// With those of KV that goes between workers.
    pub(crate) fn with_kv_transfer(self, metrics: Option<Arc<KvTransferMetrics>>) -> Self {
        Self { kv_transfer: metrics, ..self }
    }

    /// Whether all ranks are there that this worker needs.
    pub(crate) fn ranks_are_up(&self) -> bool {
        self.experts.as_ref().is_none_or(|experts| experts.up.get() == 1)
    }

    /// Counts a request once it is over; the first engine's, until it is known which takes it.
    pub(crate) fn guard(&self) -> RequestGuard {
        RequestGuard::new(Arc::clone(&self.engines[0]))
    }

    /// The request is this engine's.
    pub(crate) fn taken_by(&self, rank: usize, guard: &mut RequestGuard) {
        if let Some(engine) = self.engines.get(rank) {
            guard.metrics = Arc::clone(engine);
        }
    }

    /// The exposition in Prometheus's text format.
    pub(crate) fn render(&self) -> String {
        let mut families: Vec<MetricFamily> = Vec::new();
        let of_experts = self.experts.iter().flat_map(|experts| experts.registry.gather());
        let of_transfers = self.kv_transfer.iter().flat_map(|transfers| transfers.registry.gather());
        let of_engines = self.engines.iter().flat_map(|engine| {
            let own = engine.registry.gather();
            let theirs = vllm::families(&own, &engine.model, &engine.rank.unwrap_or(0).to_string());
            own.into_iter().chain(theirs)
        });
        let of_log = log::lost().into_iter().flat_map(Collector::collect);
        for mut family in of_engines.chain(of_experts).chain(of_transfers).chain(of_log) {
            match families.iter_mut().find(|known| known.name() == family.name()) {
                // The next engine's.
                Some(known) => known.mut_metric().extend(family.take_metric()),
                None => families.push(family),
            }
        }
        let mut out = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&families, &mut out) {
            tracing::error!(%error, "metrics cannot be rendered");
        }
        String::from_utf8(out).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Outcome, StaticInfo};

    #[test]
    fn engines_are_told_apart_by_a_label_and_families_come_once() {
        let info = StaticInfo { model: "m", numerics_id: "n", block_size: 16, num_blocks: 200 };
        let engines: Vec<_> =
            (0..2).map(|rank| Arc::new(Metrics::of_rank(&info, Some(rank)).unwrap())).collect();
        engines[0].requests_running.set(3);
        engines[1].requests_running.set(4);
        let experts = ExpertMetrics::new(2, 8).unwrap();
        let page = MetricsPage::new(engines, Some(experts));
        let mut guard = page.guard();
        page.taken_by(1, &mut guard);
        guard.set(Outcome::Stop);
        drop(guard);
        let text = page.render();
        for line in [
            r#"keyway_worker_requests_running{engine="0"} 3"#,
            r#"keyway_worker_requests_running{engine="1"} 4"#,
            r#"vllm:num_requests_running{engine="1",model_name="m"} 4"#,
            r#"keyway_worker_requests_total{outcome="stop",engine="1"} 1"#,
            r#"keyway_worker_requests_total{outcome="stop",engine="0"} 0"#,
            r#"vllm:cache_config_info{block_size="16",engine="1",model_name="m",num_gpu_blocks="200"} 1"#,
            "keyway_worker_expert_ranks_up 0",
            "keyway_worker_log_lines_lost_total 0",
        ] {
            assert!(text.lines().any(|l| l == line), "no {line} in {text}");
        }
        let helps = text.lines().filter(|l| l.starts_with("# HELP keyway_worker_requests_running ")).count();
        assert_eq!(helps, 1);
    }
}
