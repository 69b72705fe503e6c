//! One request at the workers: read, dispatched, tried again, relayed, resumed.

pub(crate) mod arriving;
pub mod asked;
pub mod attempts;
pub mod body;
pub mod dispatch;
pub mod engine_paths;
pub mod locations;
pub mod own_fault;
pub mod poison;
pub mod reading;
pub mod relay;
pub mod request_reader;
pub mod resume;
pub mod retry_limits;
pub(crate) mod silence;
pub mod websocket;
pub mod whom;
