//! `keyway-loadtest`: sends a workload to an OpenAI-compatible server on schedule and says how long people
//! would have waited, how much of the prompts came from KV caches, and whether the measurement itself can be
//! trusted.
//!
//! Read in this order: `run.rs` (one measurement, start to end), `load.rs` (what the options mean),
//! `pacer.rs` (what is due next), `sender.rs` (keeps to it), `exchange.rs` (one request and its stream),
//! `report.rs` (what comes out).

pub mod args;
pub mod calibrate;
pub mod check;
pub mod client;
pub mod commands;
pub mod compare;
pub mod config;
pub mod draw;
pub mod engine_model;
pub mod error;
pub mod export;
pub mod limits;
pub mod load;
pub mod merge;
pub mod mock;
pub mod oracle;
pub mod output;
pub mod progress;
pub mod random;
pub mod report;
pub mod run;
pub mod schedule;
pub mod scrape;
pub mod search;
pub mod settled;
pub mod simulate;
pub mod slo;
pub mod stats;
pub mod stdout;
pub mod sums;
pub mod sweep;
pub mod tally;
pub mod trace;
pub mod trace_commands;
pub mod units;
pub mod workload;
