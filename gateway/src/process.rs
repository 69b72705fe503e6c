//! The process: its command line, its sockets and signals, its parts put together, its end.

pub mod args;
pub mod assemble;
pub mod commands;
#[cfg(feature = "embedded-worker")]
pub mod embedded;
pub mod handover;
mod otel;
pub mod run;
pub mod signals;
pub mod sockets;
pub mod systemd;
mod welcome;
