//! What a worker counts, and its `/metrics` in vLLM's names (v0.32: `vllm/v1/metrics/loggers.py`) or SGLang's
//! (v0.5: `python/sglang/srt/metrics/collector.py`), so that whatever scrapes a real engine scrapes the mock.
//! Times are wall-clock seconds, as a client sees them.

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

/// Whose names the metrics have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Names {
    /// vLLM's.
    Vllm,
    /// SGLang's.
    Sglang,
}

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
    /// Seconds from one token of a request to its next.
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

    /// Prometheus' text format, in the words of the chosen engine.
    pub(super) fn render(&self, engine: &Engine, model: &str, names: Names) -> String {
        let model = model.replace('\\', "\\\\").replace('"', "\\\"");
        match names {
            Names::Vllm => self.vllm(engine, &format!("engine=\"0\",model_name=\"{model}\"")),
            Names::Sglang => self.sglang(
                engine,
                &format!("model_name=\"{model}\",engine_type=\"unified\",tp_rank=\"0\",pp_rank=\"0\""),
            ),
        }
    }

    fn vllm(&self, engine: &Engine, labels: &str) -> String {
        let (totals, profile) = (engine.totals(), engine.profile());
        let used = profile.kv_blocks - engine.pool().available();
        let usage = f64::from(used) / f64::from(profile.kv_blocks);
        let mut page = Page::new(labels);
        page.gauge("vllm:num_requests_running", "Requests in execution batches.", engine.running() as f64);
        page.gauge("vllm:num_requests_waiting", "Requests waiting.", engine.waiting() as f64);
        page.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage);
        page.counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up.", totals.queried_tokens);
        page.counter("vllm:prefix_cache_hits_total", "Prompt tokens found cached.", totals.hit_tokens);
        page.counter("vllm:num_preemptions_total", "Preemptions.", totals.preemptions);
        page.counter("vllm:prompt_tokens_total", "Prompt tokens processed.", self.prompt_tokens);
        page.counter("vllm:generation_tokens_total", "Tokens generated.", totals.generated_tokens);
        let mut out = page.out;
        let name = "vllm:request_success_total";
        let _ = writeln!(out, "# HELP {name} Requests that ended.\n# TYPE {name} counter");
        for (reason, count) in self.ended {
            let _ = writeln!(out, "{name}{{{labels},finished_reason=\"{reason}\"}} {count}");
        }
        self.ttft.write("vllm:time_to_first_token_seconds", "Time to first token.", labels, &mut out);
        self.itl.write("vllm:inter_token_latency_seconds", "Time between tokens.", labels, &mut out);
        self.e2e.write("vllm:e2e_request_latency_seconds", "Time to the last token.", labels, &mut out);
        let _ = writeln!(
            out,
            "# HELP vllm:cache_config_info Cache configuration.\n# TYPE vllm:cache_config_info gauge\n\
             vllm:cache_config_info{{block_size=\"{}\",enable_prefix_caching=\"True\",engine=\"0\",num_gpu_blocks=\"{}\"}} 1.0",
            profile.block_tokens, profile.kv_blocks
        );
        out
    }

    fn sglang(&self, engine: &Engine, labels: &str) -> String {
        let (totals, profile) = (engine.totals(), engine.profile());
        let used = profile.kv_blocks - engine.pool().available();
        let hits = totals.hit_tokens as f64 / totals.queried_tokens.max(1) as f64;
        let requests = self.ended.iter().map(|(_, count)| count).sum();
        let aborted =
            self.ended.iter().filter(|(reason, _)| *reason == "abort").map(|(_, count)| count).sum();
        let mut page = Page::new(labels);
        page.gauge("sglang:num_running_reqs", "The number of running requests.", engine.running() as f64);
        page.gauge(
            "sglang:num_queue_reqs",
            "The number of requests in the waiting queue.",
            engine.waiting() as f64,
        );
        page.gauge(
            "sglang:num_used_tokens",
            "The number of used tokens.",
            f64::from(used * profile.block_tokens),
        );
        page.gauge("sglang:token_usage", "The token usage.", f64::from(used) / f64::from(profile.kv_blocks));
        page.gauge(
            "sglang:max_total_num_tokens",
            "Maximum total number of tokens in the KV pool.",
            profile.kv_tokens() as f64,
        );
        page.gauge("sglang:cache_hit_rate", "The prefix cache hit rate.", hits);
        page.counter("sglang:prompt_tokens_total", "Prompt tokens processed.", self.prompt_tokens);
        page.counter("sglang:generation_tokens_total", "Tokens generated.", totals.generated_tokens);
        page.counter("sglang:cached_tokens_total", "Prompt tokens found cached.", totals.hit_tokens);
        page.counter("sglang:num_requests_total", "Requests that ended.", requests);
        page.counter("sglang:num_aborted_requests_total", "Requests that were aborted.", aborted);
        page.counter(
            "sglang:num_retracted_requests_total",
            "Requests that gave up their KV.",
            totals.preemptions,
        );
        let mut out = page.out;
        self.ttft.write("sglang:time_to_first_token_seconds", "Time to first token.", labels, &mut out);
        self.itl.write("sglang:inter_token_latency_seconds", "Time between tokens.", labels, &mut out);
        self.e2e.write("sglang:e2e_request_latency_seconds", "Time to the last token.", labels, &mut out);
        out
    }
}

/// Series of one value each.
struct Page<'a> {
    labels: &'a str,
    out: String,
}

// === impl Page ===

impl<'a> Page<'a> {
    fn new(labels: &'a str) -> Self {
        Self { labels, out: String::with_capacity(8 << 10) }
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.one(name, "gauge", help, value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.one(name, "counter", help, value as f64);
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        let labels = self.labels;
        // Writing to a string cannot fail.
        let _ =
            writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{{{labels}}} {value:?}");
    }
}
