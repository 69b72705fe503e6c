//! `keyway-loadtest`: replays a request trace against an OpenAI-compatible server and says how long people would
//! have waited, how much of the prompts came from KV caches, and whether the measurement itself can be trusted.
//!
//! Read in this order: `run.rs` (one measurement, start to end), `schedule.rs` (when each request is due),
//! `sender.rs` (keeps to it), `exchange.rs` (one request and its stream), `report.rs` (what comes out).

pub mod args;
pub mod body;
pub mod calibrate;
pub mod client;
pub mod commands;
pub mod engine_model;
pub mod error;
pub mod event;
pub mod exchange;
pub mod limits;
pub mod mock;
pub mod oracle;
pub mod progress;
pub mod prompt;
pub mod record;
pub mod report;
pub mod run;
pub mod scale;
pub mod schedule;
pub mod sender;
pub mod simulate;
pub mod sse;
pub mod stats;
pub mod stdout;
pub mod table;
pub mod tally;
pub mod trace;
pub mod trace_info;
pub mod units;
