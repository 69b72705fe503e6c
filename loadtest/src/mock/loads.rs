//! SGLang's page for load balancers, `/v1/loads` (`python/sglang/srt/entrypoints/v1_loads.py`): the fields
//! that it always has, as JSON or in Prometheus' text format. Its `/metrics` is `series.rs`'.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::engine_model::Engine;

/// The page, of the one rank that there is.
pub(super) fn page(engine: &Engine, prometheus: bool) -> String {
    let profile = engine.profile();
    let used = profile.kv_blocks - engine.pool().available();
    let fields = [
        ("num_running_reqs", json!(engine.running())),
        ("num_waiting_reqs", json!(engine.waiting())),
        ("num_waiting_uncached_tokens", json!(engine.pending_prefill_tokens())),
        ("num_used_tokens", json!(u64::from(used) * u64::from(profile.block_tokens))),
        ("max_total_num_tokens", json!(profile.kv_tokens())),
        ("token_usage", json!(f64::from(used) / f64::from(profile.kv_blocks))),
    ];
    if !prometheus {
        let rank = ("dp_rank", json!(0));
        let load = fields.into_iter().chain([rank]).map(|(name, value)| (name.to_owned(), value));
        return json!({"loads": [Value::Object(load.collect())]}).to_string();
    }
    let mut page = String::new();
    for (name, value) in fields {
        // Writing to a string cannot fail.
        let _ = writeln!(page, "# TYPE sglang_{name} gauge\nsglang_{name}{{dp_rank=\"0\"}} {value}");
    }
    page
}
