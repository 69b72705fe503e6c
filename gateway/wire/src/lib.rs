//! What the gateway, the worker and the load tester agree on, and nothing else: the prefix hash chain, KV
//! events, the names of headers, the worker extension, and the OpenAI shapes of errors and usage. No I/O, no
//! runtime.

pub mod block_hash;
pub mod extension;
pub mod headers;
pub mod kv_event;
pub mod openai;
pub mod spans;
pub mod zmtp;
