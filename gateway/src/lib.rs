//! Keyway, a prefix-aware routing gateway for LLM inference fleets.
//!
//! Read these five files in order to follow one request:
//!
//! 1. [`server`]: accept, HTTP/1.1 and h2, connection limits, drain
//! 2. [`stack`]: the tower stack, one layer a line
//! 3. [`mod@keyway_core::pick`]: the pure choice of a worker, with its reason
//! 4. [`dispatch`]: the request is read and given a worker; in [`attempts`], others are asked where one does not serve
//! 5. [`relay`]: the answer's body, passed through, counted, ended honestly
//!
//! `ARCHITECTURE.md` is the overview; `docs/invariants.md` says where each invariant is enforced.

pub mod admin;
pub mod admin_guard;
pub mod admission;
pub mod api;
pub mod args;
pub mod around;
pub mod asked;
pub mod assemble;
pub mod attempts;
pub mod autoscale;
pub mod body;
pub mod body_memory;
pub mod clock;
pub mod config;
pub mod content;
pub mod cores;
pub mod cors;
pub mod decision_log;
pub mod descriptors;
pub mod discovery;
pub mod dispatch;
pub mod drift;
pub mod ejection;
#[cfg(feature = "embedded-worker")]
pub mod embedded;
pub mod engine_paths;
pub mod error;
pub mod explain;
pub mod external_scaler;
pub mod fleet;
pub mod handover;
pub mod headers;
pub mod heap;
pub mod ignored;
pub mod json;
pub mod kubernetes;
pub mod kv_events;
pub mod leaving;
pub mod limits;
pub mod live;
pub mod load_push;
pub mod load_scrape;
pub mod locations;
pub mod log;
pub mod media;
pub mod members;
pub mod metrics;
pub mod models;
pub mod net;
pub mod own_fault;
pub mod panics;
mod path;
pub mod peers;
pub mod poison;
pub mod probe;
pub mod prompt;
pub mod reading;
pub mod record;
pub mod refusal;
pub mod relay;
pub mod reload;
pub mod request;
pub mod residency;
pub mod resume;
pub mod routing;
pub mod run;
pub mod scrape;
pub mod server;
pub mod session;
pub mod signals;
mod silence;
pub mod snapshot;
pub mod sockets;
pub mod sse;
pub mod stack;
pub mod standing;
pub mod stored_state;
pub mod systemd;
pub mod tenants;
mod threads;
pub mod tls;
pub mod token_keyer;
pub mod trace;
pub mod trailers;
pub mod upstream;
pub mod usage;
pub mod websocket;
pub mod well_formed;
pub mod whom;
pub mod work;

pub use keyway_clients::{client, impatient, party};
