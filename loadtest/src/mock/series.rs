//! What a worker counts, and its `/metrics` in vLLM's names (v0.32: `vllm/v1/metrics/loggers.py`), so that whatever
//! scrapes a real engine scrapes the mock. Times are wall-clock seconds, as a client sees them.

use std::fmt::Write as _;

use crate::engine_model::Engine;

/// Upper bounds of vLLM's buckets, in seconds.
const TTFT_S: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const ITL_S: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const E2E_S: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];

/// A histogram in Prometheus' sense.
#[derive(Debug)]
pub(super) struct Histogram {
    bounds: &'static [f64],
    /// One for each bound, and one above all.
    counts: Vec<u64>,
    sum: f64,
}

/// What one worker counts.
#[derive(Debug)]
pub(super) struct Series {
    /// Seconds to the first token.
    pub ttft: Histogram,
    /// Seconds between tokens.
    pub itl: Histogram,
    /// Seconds to the last token.
    pub e2e: Histogram,
    /// Prompt tokens of requests that were taken.
    pub prompt_tokens: u64,
    /// Requests that ended at their limit, by themselves, and with their client.
    pub ended: [(&'static str, u64); 3],
}

// === impl Histogram ===

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    /// Adds one value, in seconds.
    pub(super) fn observe(&mut self, seconds: f64) {
        self.counts[self.bounds.partition_point(|&bound| bound < seconds)] += 1;
        self.sum += seconds;
    }

    fn write(&self, name: &str, help: &str, labels: &str, out: &mut String) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut below = 0;
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            below += count;
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound:?}\"}} {below}");
        }
        let count = below + self.counts[self.bounds.len()];
        let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
        let _ = writeln!(out, "{name}_count{{{labels}}} {count}\n{name}_sum{{{labels}}} {}", self.sum);
    }
}

// === impl Series ===

impl Default for Series {
    fn default() -> Self {
        Self {
            ttft: Histogram::new(TTFT_S),
            itl: Histogram::new(ITL_S),
            e2e: Histogram::new(E2E_S),
            prompt_tokens: 0,
            ended: [("length", 0), ("stop", 0), ("abort", 0)],
        }
    }
}

impl Series {
    /// Counts a request that ended.
    pub(super) fn end(&mut self, reason: &str) {
        if let Some((_, count)) = self.ended.iter_mut().find(|(name, _)| *name == reason) {
            *count += 1;
        }
    }

    /// Prometheus' text format.
    pub(super) fn render(&self, engine: &Engine, model: &str) -> String {
        let model = model.replace('\\', "\\\\").replace('"', "\\\"");
        let labels = format!("engine=\"0\",model_name=\"{model}\"");
        let (totals, profile) = (engine.totals(), engine.profile());
        let used = profile.kv_blocks - engine.pool().available();
        let mut out = String::with_capacity(8 << 10);
        let mut one = |name: &str, kind: &str, help: &str, value: f64| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{{{labels}}} {value:?}");
        };
        one("vllm:num_requests_running", "gauge", "Requests in execution batches.", engine.running() as f64);
        one("vllm:num_requests_waiting", "gauge", "Requests waiting.", engine.waiting() as f64);
        let usage = f64::from(used) / f64::from(profile.kv_blocks);
        one("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", usage);
        one(
            "vllm:prefix_cache_queries_total",
            "counter",
            "Prompt tokens looked up.",
            totals.queried_tokens as f64,
        );
        one(
            "vllm:prefix_cache_hits_total",
            "counter",
            "Prompt tokens found cached.",
            totals.hit_tokens as f64,
        );
        one("vllm:num_preemptions_total", "counter", "Preemptions.", totals.preemptions as f64);
        one("vllm:prompt_tokens_total", "counter", "Prompt tokens processed.", self.prompt_tokens as f64);
        one("vllm:generation_tokens_total", "counter", "Tokens generated.", totals.generated_tokens as f64);
        let name = "vllm:request_success_total";
        let _ = writeln!(out, "# HELP {name} Requests that ended.\n# TYPE {name} counter");
        for (reason, count) in self.ended {
            let _ = writeln!(out, "{name}{{{labels},finished_reason=\"{reason}\"}} {count}");
        }
        self.ttft.write("vllm:time_to_first_token_seconds", "Time to first token.", &labels, &mut out);
        self.itl.write("vllm:inter_token_latency_seconds", "Time between tokens.", &labels, &mut out);
        self.e2e.write("vllm:e2e_request_latency_seconds", "Time to the last token.", &labels, &mut out);
        let _ = writeln!(
            out,
            "# HELP vllm:cache_config_info Cache configuration.\n# TYPE vllm:cache_config_info gauge\n\
             vllm:cache_config_info{{block_size=\"{}\",enable_prefix_caching=\"True\",engine=\"0\",num_gpu_blocks=\"{}\"}} 1.0",
            profile.block_tokens, profile.kv_blocks
        );
        out
    }
}
