//! The worker's series once more under vLLM's names and labels, so that routers and dashboards made for vLLM
//! read them. Copies made at each scrape; nothing is counted here. Names: vLLM v1's metrics documentation
//! (`docs/design/metrics.md`).
//!
//! A colon is not what Prometheus recommends for an exporter's names, but these are vLLM's.

use prometheus::proto::{Gauge, LabelPair, Metric, MetricFamily, MetricType};

use super::Outcome;

/// Own name, vLLM's name. Counters end with `_total` in both.
const SAME: [(&str, &str); 12] = [
    ("keyway_worker_requests_running", "vllm:num_requests_running"),
    ("keyway_worker_requests_waiting", "vllm:num_requests_waiting"),
    ("keyway_worker_preemptions_total", "vllm:num_preemptions_total"),
    ("keyway_worker_prompt_tokens_total", "vllm:prompt_tokens_total"),
    ("keyway_worker_generation_tokens_total", "vllm:generation_tokens_total"),
    ("keyway_worker_cached_tokens_total", "vllm:prefix_cache_hits_total"),
    ("keyway_worker_external_wanted_tokens_total", "vllm:external_prefix_cache_queries_total"),
    ("keyway_worker_external_tokens_total", "vllm:external_prefix_cache_hits_total"),
    ("keyway_worker_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    ("keyway_worker_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
    (REQUESTS, "vllm:request_success_total"),
    (CACHE_CONFIG, "vllm:cache_config_info"),
];
const REQUESTS: &str = "keyway_worker_requests_total";
const CACHE_CONFIG: &str = "keyway_worker_cache_config_info";
/// Prompt tokens that were looked up in the prefix cache: all of them.
const QUERIES: (&str, &str) = ("keyway_worker_prompt_tokens_total", "vllm:prefix_cache_queries_total");
const USAGE: &str = "vllm:kv_cache_usage_perc";

/// What vLLM would expose for these families of one engine, for `model`.
pub(super) fn families(own: &[MetricFamily], model: &str, engine: &str) -> Vec<MetricFamily> {
    let copies = SAME.iter().chain([&QUERIES]).filter_map(|(name, theirs)| {
        let family = own.iter().find(|family| family.name() == *name)?;
        Some(copy(family, theirs, model, engine))
    });
    let mut families: Vec<MetricFamily> = copies.collect();
    families.extend(usage(own, model, engine));
    families
}

fn copy(own: &MetricFamily, name: &str, model: &str, engine: &str) -> MetricFamily {
    let mut family = own.clone();
    family.set_name(name.to_owned());
    if own.name() == REQUESTS {
        // vLLM counts those that ended by themselves.
        let success = [Outcome::Stop, Outcome::Length].map(Outcome::as_str);
        let kept = family.take_metric().into_iter();
        let kept = kept.filter(|m| m.get_label().iter().any(|label| success.contains(&label.value())));
        family.set_metric(kept.collect());
    }
    for metric in family.mut_metric() {
        let mut labels = vec![label("model_name", model), label("engine", engine)];
        let own = metric.take_label().into_iter().filter(|own| own.name() != "engine");
        labels.extend(own.map(renamed));
        labels.sort();
        metric.set_label(labels);
    }
    family
}

/// The share of KV blocks that running sequences hold.
fn usage(own: &[MetricFamily], model: &str, engine: &str) -> Option<MetricFamily> {
    let value = |name: &str| {
        let family = own.iter().find(|family| family.name() == name)?;
        Some(family.get_metric().first()?.get_gauge().get_value())
    };
    let share = value("keyway_worker_kv_blocks_used")? / value("keyway_worker_kv_blocks")?.max(1.0);
    let mut gauge = Gauge::default();
    gauge.set_value(share);
    let mut metric = Metric::from_gauge(gauge);
    metric.set_label(vec![label("engine", engine), label("model_name", model)]);
    let mut family = MetricFamily::default();
    family.set_name(USAGE.to_owned());
    family.set_help("KV-cache usage. 1 means 100 percent usage.".to_owned());
    family.set_field_type(MetricType::GAUGE);
    family.set_metric(vec![metric]);
    Some(family)
}

fn renamed(mut own: LabelPair) -> LabelPair {
    let theirs = match own.name() {
        "outcome" => "finished_reason",
        "num_blocks" => "num_gpu_blocks",
        _ => return own,
    };
    own.set_name(theirs.to_owned());
    own
}

fn label(name: &str, value: &str) -> LabelPair {
    let mut pair = LabelPair::default();
    pair.set_name(name.to_owned());
    pair.set_value(value.to_owned());
    pair
}

#[cfg(test)]
mod tests {
    use crate::metrics::{Metrics, MetricsPage, Outcome, RequestGuard, StaticInfo};

    fn value(text: &str, series: &str) -> f64 {
        let line = |line: &str| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok();
        text.lines().find_map(line).unwrap_or_else(|| panic!("no {series} in {text}"))
    }

    #[test]
    fn vllms_series_say_what_ours_say() {
        let info = StaticInfo { model: "m\"1", numerics_id: "n", block_size: 16, num_blocks: 200 };
        let metrics = std::sync::Arc::new(Metrics::new(&info).unwrap());
        metrics.requests_running.set(3);
        metrics.requests_waiting.set(5);
        metrics.kv_blocks_used.set(50);
        metrics.prompt_tokens.inc_by(100);
        metrics.cached_tokens.inc_by(64);
        metrics.external_wanted_tokens.inc_by(36);
        metrics.external_tokens.inc_by(32);
        metrics.time_to_first_token.observe(0.003);
        for outcome in [Outcome::Length, Outcome::Aborted] {
            RequestGuard::new(metrics.clone()).set(outcome);
        }
        let text = MetricsPage::new(vec![metrics], None).render();
        let labels = r#"{engine="0",model_name="m\"1"}"#;
        for (name, expected) in [
            ("num_requests_running", 3.0),
            ("num_requests_waiting", 5.0),
            ("kv_cache_usage_perc", 0.25),
            ("prefix_cache_queries_total", 100.0),
            ("prefix_cache_hits_total", 64.0),
            ("external_prefix_cache_queries_total", 36.0),
            ("external_prefix_cache_hits_total", 32.0),
            ("prompt_tokens_total", 100.0),
            ("num_preemptions_total", 0.0),
            ("generation_tokens_total", 0.0),
            ("time_to_first_token_seconds_count", 1.0),
            ("inter_token_latency_seconds_count", 0.0),
        ] {
            assert_eq!(value(&text, &format!("vllm:{name}{labels}")), expected, "{name}");
        }
        let config =
            r#"vllm:cache_config_info{block_size="16",engine="0",model_name="m\"1",num_gpu_blocks="200"}"#;
        assert_eq!(value(&text, config), 1.0);
        let ended = |reason| {
            format!(
                r#"vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="m\"1"}}"#
            )
        };
        assert_eq!(value(&text, &ended("length")), 1.0);
        assert!(!text.contains(r#"finished_reason="aborted""#));
    }
}
