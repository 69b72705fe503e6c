//! A report in the shape of AIPerf's `profile_export_aiperf.json`: a metric is an object of unit and
//! statistics. As there, times count from the real sending, and `inter_token_latency` is a request's mean.
//! Metrics that are not measured are left out.
//!
//! Shape: AIPerf 0.13.0, `aiperf/common/models/export_models.py`, and the tags in `aiperf/metrics/types`.

use serde_json::{Map, Value, json};

use crate::{
    report::{Report, Status},
    stats::Summary,
};

/// Renders `report` as a JSON object in AIPerf's shape.
pub fn render(report: &Report) -> Value {
    let mut out = Map::new();
    out.insert("schema_version".into(), json!("1.1"));
    for (tag, summary) in [
        ("time_to_first_token", report.service.ttft),
        ("time_to_second_token", report.ttst),
        ("inter_token_latency", report.tpot),
        ("inter_chunk_latency", report.itl),
        ("request_latency", report.service.e2e),
    ] {
        if let Some(summary) = summary {
            out.insert(tag.into(), times(summary));
        }
    }
    let rates = report.throughput;
    let goodput = report.goodput.as_ref();
    for (tag, unit, value) in [
        ("request_count", "requests", Some(report.requests.ok as f64)),
        ("error_request_count", "requests", Some(report.requests.failed as f64)),
        ("request_throughput", "requests/sec", Some(rates.requests_per_s)),
        ("output_token_throughput", "tokens/sec", Some(rates.output_tokens_per_s)),
        ("input_token_throughput", "tokens/sec", Some(rates.prompt_tokens_per_s)),
        ("total_token_throughput", "tokens/sec", Some(rates.output_tokens_per_s + rates.prompt_tokens_per_s)),
        ("benchmark_duration", "sec", Some(report.elapsed_s)),
        ("total_isl", "tokens", Some(report.tokens.prompt as f64)),
        ("total_osl", "tokens", Some(report.tokens.completion as f64)),
        ("goodput", "requests/sec", goodput.map(|goodput| goodput.requests_per_s)),
        ("good_request_count", "requests", goodput.map(|goodput| goodput.met as f64)),
        ("usage_prompt_cache_read_tokens", "tokens", report.cache.cached_tokens.map(|n| n as f64)),
    ] {
        if let Some(value) = value {
            out.insert(tag.into(), json!({"unit": unit, "avg": value}));
        }
    }
    let errors = report.errors.iter().map(|error| {
        let message = error.samples.first().cloned().unwrap_or_default();
        json!({"error_details": {"type": error.class, "message": message}, "count": error.count})
    });
    out.insert("error_summary".into(), errors.collect());
    out.insert("was_cancelled".into(), json!(report.verdict.status == Status::Interrupted));
    out.insert("input_config".into(), serde_json::to_value(&report.config).unwrap_or_default());
    Value::Object(out)
}

fn times(summary: Summary) -> Value {
    let Summary { n, mean, std, p50, p90, p95, p99, max } = summary;
    let sum = mean * n as f64;
    json!({
        "unit": "ms", "avg": mean, "p50": p50, "p90": p90, "p95": p95, "p99": p99, "max": max, "std": std,
        "count": n, "sum": sum,
    })
}
