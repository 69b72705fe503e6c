//! libFuzzer's entry to `bodies::answer`.
#![no_main]

#[path = "../bodies.rs"]
#[allow(dead_code, reason = "each target has one body")]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| bodies::answer(data));
