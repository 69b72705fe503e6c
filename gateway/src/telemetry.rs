//! What is written of a request: its record, its bill and its trace.

mod bill;
pub mod record;
pub mod trace;
