//! What strangers send is read in time linear in its size, also where it is made to take longer: sixteen
//! times the bytes take about sixteen times the CPU time of the thread. What is read of it is held against a
//! JSON library elsewhere (`fuzz_smoke.rs`).
#![allow(clippy::expect_used, reason = "helpers of tests fail the test by panicking")]

use std::{fs, num::NonZeroUsize, thread};

use bytes::Bytes;
use keyway::{
    access::tenants,
    json,
    prompt::{
        content::{self, Multipart},
        request::{self, KeyerConfig},
        text::{self, PromptApi},
    },
    sse::EventSplitter,
    usage::UsageTap,
};
use keyway_text::TextModel;
use keyway_wire::block_hash::HashKey;

/// Bytes of the smaller text.
const SIZE: usize = 8 << 10;
/// How many times as large the larger one is, and how many times the time the same bytes may take in it:
/// squares would take this many times.
const TIMES: usize = 16;
const BAR: f64 = 6.0;
/// How often the larger one is read in a try, and what a try takes at least for the kernel's account to be
/// good.
const OFTEN: usize = 4;
const FLOOR_NS: f64 = 50_000.0;
/// Of so many tries the fastest counts: nothing makes one faster than it is.
const TRIES: usize = 3;

/// Text of a shape: a beginning, a piece again and again, and an end.
type Shape = (&'static str, &'static str, &'static str);

const BODIES: [Shape; 31] = [
    ("", "[", ""),
    ("", "{\"a\":", ""),
    ("{\"x\":", "[", "}"),
    ("{", "]", "}"),
    ("{\"x\":[", "[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]],", "1]}"),
    ("{\"messages\":[", "{},", "{}]}"),
    ("{\"messages\":[", "{\"role\":\"user\",\"content\":\"a\"},", "{\"role\":\"user\",\"content\":\"a\"}]}"),
    ("{\"messages\":[{\"role\":\"user\",\"content\":[", "{\"type\":\"text\",\"text\":\"a\"},", "{}]}]}"),
    ("{\"messages\":[{\"role\":\"user\",\"content\":\"", "\\u0041", "\"}]}"),
    ("{\"messages\":[{\"role\":\"user\",\"content\":\"", "\\\"", "\"}]}"),
    ("{\"messages\":[{\"role\":\"user\",\"content\":\"", "\\\\", "\"}]}"),
    ("{\"messages\":[{\"role\":\"user\",\"content\":\"", "\\ud83d", "\"}]}"),
    ("{\"messages\":[{\"role\":\"user\",\"content\":\"", "a", ""),
    ("{\"messages\":[{", "\"role\":\"user\",", "\"content\":\"a\"}]}"),
    ("{\"prompt\":[", "\"a\",", "\"a\"]}"),
    ("{\"prompt\":[", "1,", "1]}"),
    ("{", "\"model\":\"m\",", "\"model\":\"m\"}"),
    ("{", "\"cache_salt\":\"s\",", "\"prompt\":\"a\"}"),
    ("{", "\"mo\\u0064el\":1,", "\"prompt\":\"a\"}"),
    ("{", "\"stream\":true,\"stream_options\":{},", "\"prompt\":\"a\"}"),
    ("{\"temperature\":1", "0", "}"),
    ("{\"tools\":[{\"a\":{", "\"b\":{},", "\"z\":1}}]}"),
    ("{", " ", "}"),
    ("{\"model\":\"", "m", "\"}"),
    ("{", "\"previous_response_id\":\"a\",", "\"x_id\":\"b\"}"),
    ("{", "\"\\ud83d\":1,", "\"y_id\":\"b\"}"),
    (
        "{\"messages\":[{\"role\":\"user\",\"content\":[",
        "{\"type\":\"tool_result\",\"tool_use_id\":\"a\"},",
        "{\"type\":\"text\",\"text\":\"a\"}]}]}",
    ),
    (
        "{\"messages\":[{\"role\":\"assistant\",\"content\":[",
        "{\"type\":\"thinking\",\"thinking\":\"a\"},",
        "{\"type\":\"text\",\"text\":\"a\"}]}]}",
    ),
    (
        "{\"tools\":[{\"name\":\"t\",\"input_schema\":{}}],\"messages\":[",
        "{\"role\":\"system\",\"content\":[{\"type\":\"tool_addition\",\"tool\":{\"name\":\"t\"}}]},",
        "{\"role\":\"user\",\"content\":\"a\"}]}",
    ),
    (
        "{\"input\":[",
        "{\"type\":\"function_call\",\"call_id\":\"a\",\"name\":\"f\",\"arguments\":\"{}\"},",
        "{\"role\":\"user\",\"content\":\"a\"}]}",
    ),
    ("{\"input\":[", "{\"type\":\"reasoning\",\"summary\":[]},", "{\"role\":\"user\",\"content\":\"a\"}]}"),
];

const FORMS: [Shape; 6] = [
    ("", "--xX", ""),
    ("", "--xX\r\n", "--xX--"),
    ("", "--xX\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n", "--xX--"),
    ("--xX\r\n", "content-disposition: form-data; name=\"a\"\r\n", "\r\nm\r\n--xX--"),
    ("--xX\r\ncontent-disposition: form-data", "; x=\"\\\"\"", "; name=model\r\n\r\nm\r\n--xX--"),
    ("--xX\r\ncontent-disposition: form-data; name=model\r\n\r\n", "\n--x", "\r\n--xX--"),
];

const STREAMS: [Shape; 8] = [
    ("", "\n", ""),
    ("", "\r", ""),
    ("", ":\n", ""),
    ("data: ", "a", "\n\n"),
    ("", "data:\n", "\n"),
    ("", "data: {\"usage\":\n\n", ""),
    ("data: {\"usage\":{", "\"usage\":{", "\n\n"),
    ("data: {\"choices\":[", "{},", "{}]}\n\n"),
];

fn text((begin, piece, end): Shape, size: usize) -> Bytes {
    Bytes::from(format!("{begin}{}{end}", piece.repeat(size / piece.len())))
}

/// Nanoseconds that this thread was on a core.
fn on_core() -> u64 {
    // Where a thread gives way the kernel's account of it is brought up to date.
    thread::yield_now();
    let stat = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux says");
    stat.split_whitespace().next().and_then(|n| n.parse().ok()).expect("nanoseconds")
}

/// CPU time of reading a text so often, in the fastest try.
fn time(text: &Bytes, often: usize, read: &dyn Fn(&Bytes)) -> f64 {
    let once = || {
        let before = on_core();
        (0..often).for_each(|_| read(text));
        on_core() - before
    };
    (0..TRIES).map(|_| once()).min().unwrap_or_default() as f64
}

#[track_caller]
fn is_linear(name: &str, shapes: &[Shape], read: &dyn Fn(&Bytes)) {
    let mut faults = Vec::new();
    for &shape in shapes {
        let (small, large) = (text(shape, SIZE), text(shape, SIZE * TIMES));
        // As many bytes either way.
        let ratio = time(&large, OFTEN, read) / time(&small, OFTEN * TIMES, read).max(FLOOR_NS);
        if ratio > BAR {
            faults.push(format!(
                "{name}: {shape:?}: {ratio:.1} times the time in texts {TIMES} times as large"
            ));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_body_is_read_in_linear_time() {
    let keyer = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(64).expect("not 0") };
    is_linear("request", &BODIES, &|body| drop(request::read(body, keyer)));
    let salt = Some((&["cache_salt"][..], "salt"));
    is_linear("salted", &BODIES, &|body| drop(tenants::rewritten(body, salt, |_| false)));
    let stream_options = |body: &Bytes| {
        let text = std::str::from_utf8(body).expect("UTF-8");
        let name = memchr::memmem::Finder::new("\"stream_options\"");
        std::hint::black_box(json::Value::last_object_of_document(text, &name, |_| Some(())));
    };
    is_linear("the last field", &BODIES, &stream_options);
}

#[test]
fn a_form_and_a_charset_are_read_in_linear_time() {
    let parts = |body: &Bytes| {
        std::hint::black_box(Multipart::new(body, b"xX").count());
    };
    is_linear("form", &FORMS, &parts);
    // As surrogates without partners, which become escapes.
    let surrogates = |text: &Bytes| {
        let bytes: Vec<u8> = text.iter().flat_map(|_| [0xed, 0xa0, 0xbd]).collect();
        let _ = std::hint::black_box(content::mended(&bytes, 1 << 30));
    };
    is_linear("charset", &[("", "x", "")], &surrogates);
}

#[test]
fn a_prompt_is_rendered_in_linear_time() {
    let template = TextModel::builtin().template;
    for api in [PromptApi::Chat, PromptApi::Completions, PromptApi::Messages, PromptApi::Responses] {
        is_linear(&format!("{api:?}"), &BODIES, &|body| drop(text::read(api, body, &template)));
    }
}

#[test]
fn a_stream_is_split_in_linear_time() {
    for piece in [1, 1_000, usize::MAX] {
        let split = |stream: &Bytes| {
            let (mut events, mut tap) = (EventSplitter::new(1 << 30), UsageTap::events());
            for piece in stream.chunks(piece.min(stream.len())) {
                let whole = events.push(Bytes::copy_from_slice(piece)).expect("below the cap");
                tap.see(&whole, true);
            }
            std::hint::black_box((events.take_tail(), tap.finish()));
        };
        is_linear(&format!("pieces of {piece}"), &STREAMS, &split);
    }
}
