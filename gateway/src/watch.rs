//! Who the workers are and how they are doing: discovery, probes, load, KV events, the other gateways.

pub mod discovery;
pub mod kubernetes;
pub mod kv_events;
pub mod load_push;
pub mod load_scrape;
pub mod members;
pub mod peers;
pub mod probe;
