//! What strangers send to a worker, and what must hold for any of it: the body of the fuzz target, which the
//! smoke test on stable drives too. A body panics where something does not hold.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a fuzz target fails by panicking"
)]

use std::sync::OnceLock;

use keyway_worker::fuzz::Requests;

/// Tokens of an answer that is written in a request's form.
const ANSWER_TOKENS: usize = 24;

/// Memory for one request: small, so that a fuzzer meets its bounds.
const MEMORY: usize = 64 << 20;

/// A request's body: it is refused in the API's own shape, as the client's mistake, or its form leads an
/// answer. The first byte says which endpoint, the next ones which tokens the answer takes.
pub fn forms(data: &[u8]) {
    static REQUESTS: OnceLock<Requests> = OnceLock::new();
    let requests = REQUESTS.get_or_init(|| Requests::new(MEMORY).expect("the built-in model's text"));
    let Some((first, rest)) = data.split_first() else { return };
    let (choices, body) = rest.split_at(rest.len().min(ANSWER_TOKENS));
    match requests.read(first % 2 == 0, body) {
        Ok(readable) => {
            if let Some(came) = readable.follow(choices) {
                assert!(came <= ANSWER_TOKENS);
            }
        }
        Err(refusal) => {
            assert!(
                matches!(refusal.status, 400 | 404 | 413 | 429 | 503),
                "{}: {}",
                refusal.status,
                refusal.error
            );
            let error = &refusal.error["error"];
            let message = error["message"].as_str().expect("a message");
            assert!(!message.is_empty() && message.len() < 4096, "{} bytes", message.len());
            assert!(error["type"].is_string() && error["code"].is_string(), "{error}");
        }
    }
}
