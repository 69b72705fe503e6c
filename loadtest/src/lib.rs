//! `keyway-loadtest`: sends a workload to an OpenAI-compatible server on schedule and says how long people would
//! have waited, how much of the prompts came from KV caches, and whether the measurement itself can be trusted.
//!
//! Read in this order: `run.rs` (one measurement, start to end), `load.rs` (what the options mean), `pacer.rs` (what is
//! due next), `sender.rs` (keeps to it), `exchange.rs` (one request and its stream), `report.rs` (what comes out).

pub mod args;
pub mod arrivals;
pub mod body;
pub mod bootstrap;
pub mod calibrate;
pub mod check;
pub mod client;
pub mod commands;
pub mod compare;
pub mod config;
pub mod conversation;
pub mod dist;
pub mod engine_model;
pub mod error;
pub mod event;
pub mod exchange;
pub mod export;
pub mod gate;
pub mod hdr;
pub mod knee;
pub mod limits;
pub mod load;
pub mod mock;
pub mod oracle;
pub mod output;
pub mod pacer;
pub mod progress;
pub mod prompt;
pub mod random;
pub mod rate;
pub mod record;
pub mod report;
pub mod run;
pub mod samples;
pub mod scale;
pub mod schedule;
pub mod search;
pub mod sender;
pub mod series;
pub mod simulate;
pub mod slo;
pub mod sse;
pub mod stats;
pub mod stdout;
pub mod svg;
pub mod sweep;
pub mod synthetic;
pub mod table;
pub mod tally;
pub mod texts;
pub mod trace;
pub mod trace_formats;
pub mod trace_info;
pub mod units;
pub mod workload;
