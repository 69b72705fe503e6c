//! Keyway, a prefix-aware routing gateway for LLM inference fleets.
//!
//! Read these five files in order to follow one request:
//!
//! 1. [`edge::server`]: accept, HTTP/1.1 and h2, connection limits, drain
//! 2. [`edge::stack`]: the tower stack, one layer a line
//! 3. [`mod@keyway_core::pick`]: the pure choice of a worker, with its reason
//! 4. [`proxy::dispatch`]: the request is read and given a worker; in [`proxy::attempts`], others are asked
//!    where one does not serve
//! 5. [`proxy::relay`]: the answer's body, passed through, counted, ended honestly
//!
//! The modules are rooms. Each imports from those behind it here, and from none before it:
//!
//! [`process`] [`ops`] [`edge`] [`watch`] [`proxy`] [`scale`] [`routing`] [`stored_state`] [`demand`]
//! [`telemetry`] [`access`] [`ledger`] [`usage`] [`fleet`] [`prompt`] [`upstream`] [`store`] [`config`]
//! [`net`]
//! [`metrics`] [`machine`], and tables: [`headers`], `path`, [`error`], [`api`], [`sse`], [`json`],
//! [`shortage`], [`limits`], [`leaving`], [`clock`].
//!
//! `ARCHITECTURE.md` is the overview; `docs/rooms.md` has every file, `docs/invariants.md` where each
//! invariant is enforced.

pub mod access;
pub mod api;
pub mod clock;
pub mod config;
pub mod demand;
pub mod edge;
pub mod error;
pub mod fleet;
pub mod headers;
pub mod json;
pub mod leaving;
pub mod ledger;
pub mod limits;
pub mod machine;
pub mod metrics;
pub mod net;
pub mod ops;
mod path;
pub mod process;
pub mod prompt;
pub mod proxy;
pub mod routing;
pub mod scale;
pub mod shortage;
pub mod sse;
pub mod store;
pub mod stored_state;
pub mod telemetry;
pub mod translation;
pub mod upstream;
pub mod usage;
pub mod watch;

pub use keyway_clients::{client, impatient, party};
