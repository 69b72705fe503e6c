//! Hazard: prompts that are costly to tokenise, sent together, take gigabytes of the gateway's memory and
//! keep them.

use futures_util::future::join_all;
use keyway_tests::openai::FAKE_MODEL;
use keyway_tests::{FakeWorker, Gateway, Resources, eventually, post};
use serde_json::json;

/// Of which prompts may take half on top.
const BODY_MEMORY: u64 = 16 << 20;
/// What the gateway takes besides bodies and prompts: connections, a tokenizer's first use, what allocators
/// keep.
const OTHER: u64 = 48 << 20;
const AT_ONCE: usize = 6;
/// Bytes of one body.
const SIZE: usize = 1 << 20;

fn chat(content: &str) -> Vec<u8> {
    json!({ "model": FAKE_MODEL, "messages": [{ "role": "user", "content": content }] }).to_string().into()
}

const KINDS: [&str; 6] =
    ["one word", "digits and blanks", "words", "token ids", "empty messages", "what is short enough"];

/// A body that takes much to be tokenised, each time another.
fn body(kind: &str, round: usize) -> Vec<u8> {
    let any = |of: &[u8], bytes: usize| -> String {
        let mut state = round as u64 + 1;
        // Some thousand bytes, and then again: they need not be made one by one.
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            char::from(of[(state >> 33) as usize % of.len()])
        };
        (0..bytes / 1024).map(|_| next()).collect::<String>().repeat(1024)
    };
    match kind {
        "one word" => chat(&any(b"abcdefgh", SIZE)),
        "digits and blanks" => chat(&any(b"0123456789 ", SIZE)),
        "words" => chat(&any(b"aeinrst   ", SIZE)),
        "token ids" => {
            format!(r#"{{"model":"{FAKE_MODEL}","prompt":[{round}{}]}}"#, ",17".repeat(SIZE / 3)).into()
        }
        "empty messages" => {
            let messages = r#"{"role":"user","content":""},"#.repeat(SIZE / 29);
            format!(r#"{{"model":"{FAKE_MODEL}","user":"{round}","messages":[{messages}{{"role":"user","content":""}}]}}"#)
                .into()
        }
        _ => chat(&any(b"aeinrst   ", 16 << 10)),
    }
}

#[tokio::test]
async fn prompts_that_are_tokenised_take_no_more_than_their_part() {
    let worker = FakeWorker::start().await;
    let toml = format!(
        "worker = [\"http://{}\"]\n[[model]]\nname = \"{FAKE_MODEL}\"\ntokenizer = \"builtin\"\n\
         [routing]\nindex_bytes = 4194304\n[limits]\nmax_body_memory_bytes = {BODY_MEMORY}\n",
        worker.addr()
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    eventually!(gateway.readyz().await == 200);
    post(gateway.addr, "/v1/chat/completions", &chat("first")).await;
    Resources::forget_peak(&gateway.process);
    let ready = Resources::of(&gateway.process);
    for name in KINDS {
        let bodies: Vec<_> = (0..AT_ONCE).map(|round| body(name, round)).collect();
        let path = if name == "token ids" { "/v1/completions" } else { "/v1/chat/completions" };
        Resources::forget_peak(&gateway.process);
        let answers = join_all(bodies.iter().map(|body| post(gateway.addr, path, body))).await;
        assert!(answers.iter().all(|answer| answer.status() == 200), "{name}");
        let taken = Resources::of(&gateway.process).peak_bytes.saturating_sub(ready.peak_bytes);
        eprintln!("{name}: {} MiB", taken >> 20);
        assert!(taken < BODY_MEMORY + BODY_MEMORY / 2 + OTHER, "{name}: {} MiB", taken >> 20);
    }
    // The short ones were, in turn.
    let page = gateway.metrics().await;
    assert!(page.sum("keyway_token_keyer_requests_total", &[("outcome", "tokens")]) >= 1.0);
    assert!(page.sum("keyway_token_keyer_requests_total", &[("outcome", "too_large")]) >= 1.0);
    let kept = Resources::of(&gateway.process).grown_since(&ready);
    assert!(kept < BODY_MEMORY / 2 + OTHER, "{} MiB stayed", kept >> 20);
}
