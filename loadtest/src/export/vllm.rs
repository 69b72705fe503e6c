//! A report in the keys of `vllm bench serve --save-result`, so that scripts made for it go on working. As
//! there, times count from the real sending. Keys of things that are not measured are left out.
//!
//! Shape: vllm-project/vllm, `vllm/benchmarks/serve.py`.

use serde_json::{Map, Value, json};

use crate::{report::Report, stats::Summary};

/// Renders `report` as a JSON object with the keys that `vllm bench serve` saves.
pub fn render(report: &Report) -> Value {
    let config = &report.config;
    let total = report.throughput.prompt_tokens_per_s + report.throughput.output_tokens_per_s;
    let rate = config.rate.map_or(json!("inf"), Value::from);
    let mut out = json!({
        "backend": "keyway-loadtest",
        "endpoint_type": config.endpoint,
        "model_id": config.model,
        "num_prompts": report.requests.scheduled,
        "request_rate": rate,
        "burstiness": config.burstiness.unwrap_or(1.0),
        "max_concurrency": config.concurrency.or(config.max_concurrency),
        "duration": report.elapsed_s,
        "completed": report.requests.ok,
        "failed": report.requests.failed,
        "total_input_tokens": report.tokens.prompt,
        "total_output_tokens": report.tokens.completion,
        "request_throughput": report.throughput.requests_per_s,
        "request_goodput": report.goodput.as_ref().map(|goodput| goodput.requests_per_s),
        "output_throughput": report.throughput.output_tokens_per_s,
        "total_token_throughput": total,
    });
    if let Value::Object(out) = &mut out {
        if config.endpoint.generates() {
            add(out, "ttft", report.service.ttft);
            add(out, "tpot", report.tpot);
            add(out, "itl", report.itl);
        }
        add(out, "e2el", report.service.e2e);
    }
    out
}

fn add(out: &mut Map<String, Value>, name: &str, summary: Option<Summary>) {
    // Without an answer vLLM writes zeros.
    let zero = Summary { n: 0, mean: 0.0, std: 0.0, p50: 0.0, p90: 0.0, p95: 0.0, p99: 0.0, max: 0.0 };
    let Summary { mean, std, p50, p90, p95, p99, .. } = summary.unwrap_or(zero);
    for (key, ms) in [
        ("mean", mean),
        ("median", p50),
        ("std", std),
        ("p50", p50),
        ("p90", p90),
        ("p95", p95),
        ("p99", p99),
    ] {
        out.insert(format!("{key}_{name}_ms"), json!(ms));
    }
}
