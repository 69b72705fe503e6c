//! What is written of a request: its record and its trace.

pub mod record;
pub mod trace;
