//! One request at the workers: read, dispatched, tried again, relayed, resumed.

pub(crate) mod arriving;
mod as_chat;
pub mod asked;
pub mod attempts;
pub mod body;
mod both_legs;
pub mod dispatch;
mod engine_error;
pub mod engine_paths;
pub mod fallback;
mod kv_transfer;
pub mod locations;
pub mod message_threads;
pub mod model_names;
pub mod named_body;
pub mod own_fault;
pub mod poison;
mod prefill_leg;
pub mod reading;
pub mod relay;
pub mod request_reader;
pub mod resume;
pub mod retry_limits;
pub(crate) mod silence;
pub mod websocket;
pub mod whom;
