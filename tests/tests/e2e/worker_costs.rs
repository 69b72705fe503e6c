//! Hazard: a client that takes of a worker what it does not give: minutes and gigabytes for a prompt that
//! cannot fit, or for a body that is small on the wire and large once it is read.

use futures_util::future::join_all;
use keyway_tests::cluster::RealWorker;
use keyway_tests::{Resources, post};
use serde_json::{Value, json};

/// `--request-memory`.
const REQUEST_MEMORY: u64 = 64 << 20;
/// What the process may take besides what it had when it was ready and the memory for requests: connections,
/// KV blocks that are used for the first time, what allocators keep.
const OTHER: u64 = 48 << 20;
/// What glibc keeps for itself at most: twice the largest block that was freed, up to 64 MiB; and KV blocks
/// that were used.
const KEPT: u64 = 96 << 20;
/// Bytes of a hostile body: nearly the largest for which there is room, or what its text may have.
const LARGE: usize = 12 << 20;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

async fn worker(args: &[&str]) -> RealWorker {
    let mut worker = RealWorker::spawn(&[&["--model", "builtin"], args].concat());
    worker.ready().await;
    worker
}

/// `begin`, `piece` until there are `size` bytes, `end`.
fn filled(begin: &str, piece: &str, end: &str, size: usize) -> Vec<u8> {
    let mut text = begin.to_owned();
    text.extend(std::iter::repeat_n(piece, size / piece.len()));
    (text + end).into_bytes()
}

/// Paths and bodies that cost a reader more than they look.
fn hostile(size: usize) -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let user = "{\"messages\":[{\"role\":\"user\",\"content\":";
    let prompt = |piece: &str| filled("{\"prompt\":\"", piece, "\"}", size);
    let with = |begin: &str, piece: &str, end: &str| filled(begin, piece, end, size);
    let deep = format!("{}1{},", "[".repeat(100), "]".repeat(100));
    let tool = "{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"a\":{}}}},";
    vec![
        ("sentences", COMPLETIONS, prompt("Each of them keeps all that it has computed. ")),
        ("one long word", COMPLETIONS, prompt("q")),
        ("blanks", COMPLETIONS, prompt("\\t")),
        ("digits", COMPLETIONS, prompt("7 4 ")),
        ("marks of templates", COMPLETIONS, prompt("<|im_start|>")),
        ("marks upon marks", COMPLETIONS, prompt("e\u{301}\u{323}")),
        ("escapes", COMPLETIONS, prompt("\\u0161")),
        ("a long message", CHAT, with(&format!("{user}\""), "some more ", "\"}]}")),
        (
            "many messages",
            CHAT,
            with(
                "{\"messages\":[",
                "{\"role\":\"user\",\"content\":\"a\"},",
                "{\"role\":\"user\",\"content\":\"a\"}]}",
            ),
        ),
        (
            "many parts",
            CHAT,
            with(
                &format!("{user}["),
                "{\"type\":\"text\",\"text\":\"a\"},",
                "{\"type\":\"text\",\"text\":\"a\"}]}]}",
            ),
        ),
        ("ids", COMPLETIONS, with("{\"prompt\":[", "1,", "1]}")),
        ("many prompts", COMPLETIONS, with("{\"prompt\":[", "\"a\",", "\"a\"]}")),
        ("many prompts of no ids", COMPLETIONS, with("{\"prompt\":[", "[],", "[]]}")),
        ("empty arrays", COMPLETIONS, with("{\"prompt\":\"a\",\"metadata\":[", "[],", "[]]}")),
        ("small objects", COMPLETIONS, with("{\"prompt\":\"a\",\"metadata\":[", "{\"a\":1},", "{}]}")),
        ("as deep as may be", COMPLETIONS, with("{\"prompt\":\"a\",\"metadata\":[", &deep, "1]}")),
        ("brackets", COMPLETIONS, with("", "[", "")),
        ("functions", CHAT, with(&format!("{user}\"a\"}}],\"tools\":["), tool, "{}]}")),
        ("stop strings", COMPLETIONS, with("{\"prompt\":\"a\",\"stop\":[", "\"b\",", "\"b\"]}")),
        ("biases", COMPLETIONS, with("{\"prompt\":\"a\",\"logit_bias\":{", "\"1\":1,", "\"2\":1}}")),
        ("a long name", COMPLETIONS, with("{\"prompt\":\"a\",\"model\":\"", "m", "\"}")),
        ("a long field", COMPLETIONS, with("{\"prompt\":\"a\",\"", "f", "\":1}")),
        ("a schema", COMPLETIONS, with("{\"prompt\":\"a\",\"guided_json\":{\"enum\":[", "1,", "1]}}")),
        ("choices", COMPLETIONS, with("{\"prompt\":\"a\",\"guided_choice\":[", "\"b\",", "\"b\"]}")),
        ("an input", "/v1/embeddings", with("{\"input\":\"", "some more ", "\"}")),
        ("inputs", "/v1/embeddings", with("{\"input\":[", "\"a\",", "\"a\"]}")),
        ("a text to tokenise", "/tokenize", with("{\"prompt\":\"", "some more ", "\"}")),
        ("ids to tell", "/detokenize", with("{\"tokens\":[", "1,", "1]}")),
    ]
}

#[tokio::test]
async fn no_request_takes_more_memory_than_there_is_for_all() {
    let worker = worker(&["--request-memory", "64MiB"]).await;
    let ready = Resources::of(&worker.process);
    let most = ready.peak_bytes + REQUEST_MEMORY + OTHER;
    // Four at once, which have no more together than one; and the largest by itself, lest it be refused on
    // its way.
    for (size, at_once) in [(3 << 20, 4), (LARGE, 1)] {
        for (name, path, body) in hostile(size) {
            let addr = worker.addr();
            let answers = join_all((0..at_once).map(|_| post(addr, path, &body))).await;
            for answer in &answers {
                let refused = matches!(answer.status(), 400 | 404 | 413 | 429 | 503);
                let small = size < LARGE && answer.status() == 200;
                assert!(refused || small, "{name}: {} {:.300}", answer.status(), answer.text());
                if refused {
                    let error: Value = answer.json();
                    assert!(
                        error["error"]["message"].as_str().is_some_and(|said| said.len() < 2_000),
                        "{name}"
                    );
                }
            }
            let now = Resources::of(&worker.process);
            assert!(now.peak_bytes <= most, "{name} of {size} bytes: {} MiB", now.peak_bytes >> 20);
        }
    }
    // What was taken is given back: to others, and to the system.
    let answer =
        post(worker.addr(), COMPLETIONS, json!({"prompt": "What", "max_tokens": 2}).to_string().as_bytes())
            .await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let kept = Resources::of(&worker.process).grown_since(&ready);
    assert!(kept <= KEPT, "{} MiB are kept", kept >> 20);
}

#[tokio::test]
async fn a_prompt_that_cannot_fit_is_refused_untokenised_and_one_that_fits_is_answered() {
    let worker = worker(&["--max-model-len", "4096"]).await;
    let completion = |prompt: String| json!({"prompt": prompt, "max_tokens": 1}).to_string().into_bytes();
    let chat = |prompt: String| {
        json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}).to_string().into_bytes()
    };
    let before = Resources::of(&worker.process);
    for (path, noun, body) in [
        (COMPLETIONS, "prompt", completion("Tell what each of them has. ".repeat(400_000))),
        (CHAT, "messages", chat("Tell what each of them has. ".repeat(400_000))),
    ] {
        let answer = post(worker.addr(), path, &body).await;
        let error = &answer.json()["error"];
        assert_eq!(
            (answer.status(), error["code"].as_str()),
            (400, Some("context_length_exceeded")),
            "{error}"
        );
        assert_eq!(
            (error["param"].as_str(), error["type"].as_str()),
            (Some(noun), Some("invalid_request_error"))
        );
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("maximum context length is 4096 tokens"), "{message}");
    }
    // Tokenised they would have taken some 100 bytes for each of theirs.
    let grown = Resources::of(&worker.process).peak_bytes - before.peak_bytes;
    assert!(grown < 100 << 20, "{} MiB", grown >> 20);
    // The longest tokens that there are, as many as fit: of so many bytes a careless bound would say that
    // they do not.
    let longest = "<|endoftext|>".repeat(4000);
    let answer = post(worker.addr(), COMPLETIONS, &completion(longest)).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    assert_eq!(answer.json()["usage"]["prompt_tokens"], 4000);
}
