//! End-to-end tests over real sockets and real processes, one file per hazard. One binary, so that the
//! harness links once; `tests/README.md` names the tables.
#![allow(clippy::unnecessary_debug_formatting, reason = "a path in quotes is a TOML string")]
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests fail the test by panicking"
)]

mod access;
mod ambiguous;
mod budgets;
mod cache_size;
mod cancel;
mod chains;
mod config;
mod continuation;
mod cookies;
mod cors;
mod costs;
mod data_parallel;
mod ejection;
mod engine_errors;
mod explain;
mod floods;
mod handover;
mod http2_workers;
mod index_credit;
mod index_share;
mod isolation;
mod kept_connections;
mod kv_engines;
mod kv_hostile;
mod kv_routing;
mod ledger;
mod lifecycle;
mod limits;
mod locations;
mod log;
mod metrics;
mod mock_events;
mod model_names;
mod models;
mod odd_heads;
mod oidc;
mod openai_client;
mod others;
mod passthrough;
mod peers;
mod pictures;
mod poison;
mod prefill_decode;
mod prefill_mooncake;
mod prefill_or_not;
mod prefill_sglang;
mod prefill_workers;
mod prompt_memory;
mod pulls;
mod real_workers;
mod refusals;
mod reload;
mod restarts;
mod resume;
mod rolling;
mod routing;
mod secrets;
mod sessions;
mod shared_limits;
mod shares;
mod shortages;
mod slow_clients;
mod smuggling;
mod stored_state;
mod stream_ends;
mod streaming;
mod tenant_tokens;
mod tenants;
mod timeouts;
mod tls;
mod tls_scan;
mod told_placements;
mod traces;
mod translated;
mod unusable_workers;
mod upstream_failure;
mod usage;
mod vtc;
mod waiting;
mod watched;
mod websocket;
mod well_formed;
mod worker_costs;
mod zero_config;
