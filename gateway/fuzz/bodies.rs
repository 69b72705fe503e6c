//! What strangers send, and what must hold for any of it: the bodies of the fuzz targets, which the smoke
//! test on stable drives too. A body panics where something does not hold.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a fuzz target fails by panicking"
)]

use std::{num::NonZeroUsize, sync::OnceLock};

use bytes::Bytes;
use http::Method;
use keyway::{
    access::tenants,
    prompt::{
        content::{self, Coding, Form, Multipart},
        request::{self, KeyerConfig},
        stored_ids::StoredPath,
    },
    sse::EventSplitter,
    upstream::{
        Http1Error,
        recorded::{self, RecordedAnswer},
    },
};
use keyway_core::{
    index::{PrefixIndex, WorkerId},
    kv_feed::{Alone, KvFeed, Recovery},
};
use keyway_text::{ChatTemplate, RenderOptions, TextError};
use keyway_wire::{
    block_hash::HashKey,
    kv_event::Events,
    zmtp::{Bounds, Incoming, Reader, SocketType},
};
use serde_json::Value;

/// A request's body: what routing reads of it is what a JSON library reads.
pub fn request(data: &[u8]) {
    let keyer = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(16).unwrap() };
    let info = request::read(data, keyer);
    let Ok(Value::Object(fields)) = serde_json::from_slice::<Value>(data) else { return };
    if let Some(Value::String(model)) = fields.get("model") {
        // Engines take an empty name for none.
        let named = Some(model).filter(|model| !model.is_empty());
        assert_eq!(info.model.as_ref(), named, "the worker would serve another model");
    }
    if let Some(Value::Bool(stream)) = fields.get("stream") {
        assert_eq!(info.stream, *stream);
    }
    if let Some(Value::String(salt)) = fields.get("cache_salt") {
        assert_eq!(&info.salt, salt);
    }
    let again = request::read(data, keyer);
    assert_eq!(info.chain.names, again.chain.names);
}

/// A tenant's request: it carries the tenant's salt and no other, nothing that steers, and nothing else has
/// changed.
pub fn salt(data: &[u8]) {
    let body = Bytes::copy_from_slice(data);
    let salt = Some((&["cache_salt"][..], "the-salt"));
    let Ok(Some(salted)) = tenants::rewritten(&body, salt, |name| name == "priority") else { return };
    let Ok(Value::Object(mut before)) = serde_json::from_slice::<Value>(data) else { return };
    let Value::Object(mut after) = serde_json::from_slice::<Value>(&salted).expect("still JSON") else {
        panic!("no object any more")
    };
    before.retain(|name, _| !name.eq_ignore_ascii_case("cache_salt") && name != "priority");
    assert_eq!(after.remove("cache_salt"), Some(Value::String("the-salt".to_owned())));
    assert_eq!(before, after);
    let text = String::from_utf8(salted.to_vec()).expect("still text");
    let keyer = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(16).unwrap() };
    assert_eq!(request::read(text.as_bytes(), keyer).salt, "the-salt", "and routing sees it");
}

/// A body in any charset: what is mended is text, and needs no mending; and JSON in UTF-8 is not changed.
pub fn charset(data: &[u8]) {
    let body = Bytes::copy_from_slice(data);
    let Ok(Some(text)) = content::utf8(&body, 1 << 20) else { return };
    if let Ok(Some(mended)) = content::mended(&text, 1 << 20) {
        std::str::from_utf8(&mended).expect("text");
        assert_eq!(content::mended(&mended, 1 << 20).unwrap(), None);
        assert!(std::str::from_utf8(&text).is_err(), "it is text");
    }
    if serde_json::from_slice::<Value>(data).is_ok() {
        assert_eq!(text, body, "a JSON library reads it as it is");
        let utf16: Vec<u8> =
            String::from_utf8(data.to_vec()).unwrap().encode_utf16().flat_map(u16::to_be_bytes).collect();
        let marked = [&[0xfe, 0xff][..], &utf16].concat();
        assert_eq!(content::utf8(&marked.into(), 1 << 20).unwrap(), Some(body));
    }
}

/// A form, whose first byte ends its boundary: every part is one of the body's, in its order, and none holds
/// the boundary's line.
pub fn form(data: &[u8]) {
    let Some((boundary, body)) = data.split_first() else { return };
    let boundary = [b"xX", &[*boundary][..]].concat();
    let line = [b"\n--", &boundary[..], b"\r\n"].concat();
    let mut from = 0;
    for (name, value) in Multipart::new(body, &boundary) {
        assert!(name.len() <= body.len());
        let at = value.as_ptr() as usize - body.as_ptr() as usize;
        assert!(at >= from && at + value.len() <= body.len(), "not in order");
        assert!(!value.windows(line.len()).any(|window| window == line), "two parts in one");
        from = at + value.len();
    }
    drop(Form::of(Some(&[b"multipart/form-data; boundary=", data].concat()), body));
    let mut headers = http::HeaderMap::new();
    headers.insert(http::header::CONTENT_ENCODING, http::HeaderValue::from_static("deflate, gzip"));
    assert!(Coding::of(&headers).is_some());
    // A path is looked at as a whole, too.
    if let Ok(path) = std::str::from_utf8(data) {
        StoredPath::of(path)
            .into_iter()
            .flat_map(keyway::prompt::stored_ids::StoredPath::ids)
            .for_each(|id| assert!(id.len() <= 3 * path.len()));
    }
}

/// A stream of events, in pieces whose lengths are the first bytes: no byte is lost, doubled or held back
/// once its event is whole, however it was cut.
pub fn sse(data: &[u8]) {
    let (cuts, stream) = data.split_at(data.len().min(8));
    let mut whole = EventSplitter::new(1 << 20);
    let at_once = whole.push(Bytes::copy_from_slice(stream)).expect("below the cap");
    let (mut splitter, mut out, mut rest) = (EventSplitter::new(1 << 20), Vec::new(), stream);
    for cut in cuts.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (piece, later) = rest.split_at(rest.len().min(usize::from(*cut) + 1));
        out.extend(splitter.push(Bytes::copy_from_slice(piece)).expect("below the cap"));
        rest = later;
    }
    if !cuts.is_empty() {
        // A CR at the end of a piece waits for the LF that may follow, so pieces may hold back more, never
        // less.
        assert!(out.len() <= at_once.len() && stream.starts_with(&out));
        out.extend(splitter.take_tail());
        assert_eq!(out, stream);
    }
}

/// A worker's KV events: whatever it sends, the index stays whole.
pub fn kv_event(data: &[u8]) {
    let index = Alone::new(PrefixIndex::new(1 << 16));
    let mut feed = KvFeed::new(WorkerId(1), HashKey::new(1), Recovery::Replay, 64);
    let _ = index.run(feed.connected(&index));
    for (seq, batch) in data.chunks(64).chain([data]).enumerate() {
        let _ = index.run(feed.live(&index, seq as u64, Events::open(batch)));
        index.run(feed.reply(&index, seq as u64, Events::open(batch)));
    }
    let _ = index.run(feed.reply_ended(&index, true));
    let mut index = index.0.into_inner();
    assert!(index.bytes() <= 1 << 16 && index.len() <= 64);
    index.remove_worker(WorkerId(1));
    assert!(index.is_empty());
}

/// What comes from where a worker's KV events are said to be: in pieces as the first byte has it, it is read
/// as it is at once, and nothing of it is kept beyond the bounds.
pub fn zmtp(data: &[u8]) {
    let bounds = Bounds { message_bytes: 300, frames: 3 };
    let Some((piece, data)) = data.split_first() else { return };
    let read = |piece: usize| {
        let mut reader = Reader::new(SocketType::Sub, bounds);
        let mut came = Vec::new();
        for piece in data.chunks(piece) {
            reader.unread.extend_from_slice(piece);
            loop {
                match reader.read() {
                    Ok(Some(incoming)) => came.push(incoming),
                    Ok(None) => break,
                    Err(error) => return (came, Some(error)),
                }
            }
        }
        (came, None)
    };
    let (came, error) = read(1 + usize::from(*piece % 80));
    for incoming in &came {
        if let Incoming::Message(frames) = incoming {
            assert!((1..=bounds.frames).contains(&frames.len()));
            assert!(frames.iter().map(Bytes::len).sum::<usize>() <= bounds.message_bytes);
        }
    }
    assert_eq!((came, error), read(data.len().max(1)));
}

/// A worker's answer over HTTP/1.1, whose first two bytes say in what pieces it comes, to which method, and
/// whether the connection ends: it is read as it is at once, what a client is told of it is clear, and
/// whatever stands behind it is no part of it.
pub fn answer(data: &[u8]) {
    let [piece, how, answer @ ..] = data else { return };
    let answer = &answer[..answer.len().min(1 << 15)];
    let method = || if how & 1 == 0 { Method::POST } else { Method::HEAD };
    let closes = how & 2 != 0;
    let told = |read: Option<Result<RecordedAnswer, Http1Error>>| match read {
        None => ("waits".to_owned(), None),
        Some(Err(error)) => (error.to_string(), None),
        Some(Ok(RecordedAnswer { head, body, trailers, may_serve_again })) => {
            let head = (head.status(), head.headers().clone());
            (String::new(), Some((head, body, trailers, may_serve_again)))
        }
    };
    let at_once = told(recorded::read(method(), std::iter::once(answer), closes));
    let pieces = answer.chunks(1 + usize::from(piece % 80));
    assert_eq!(told(recorded::read(method(), pieces, closes)), at_once);
    let Some(((status, headers), body, trailers, may_serve_again)) = at_once.1 else { return };
    assert!(!status.is_informational());
    let lengths: Vec<_> = headers.get_all("content-length").iter().collect();
    let length = lengths.first().map(|length| length.to_str().unwrap().parse::<u64>().unwrap());
    assert!(lengths.len() <= 1 && !(length.is_some() && headers.contains_key("transfer-encoding")));
    if method() == Method::HEAD || status == 204 || status == 304 {
        assert!(body.is_empty() && trailers.is_empty());
    } else {
        assert!(length.is_none_or(|length| length == body.len() as u64));
    }
    for name in ["content-length", "transfer-encoding", "host", "connection", "set-cookie", "x-request-id"] {
        assert!(!trailers.contains_key(name), "{name}");
    }
    if may_serve_again {
        let forged = [answer, b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged"].concat();
        let (_, behind) = told(recorded::read(method(), std::iter::once(&forged[..]), closes));
        assert_eq!(behind, Some(((status, headers), body, trailers, false)), "not its end");
    }
}

/// Bytes of a prompt: small, so that a fuzzer meets the bound.
const PROMPT_BYTES: usize = 64 << 10;

/// Chat templates as models' families have them.
const TEMPLATES: [&str; 3] = [
    include_str!("templates/blocks.jinja"),
    include_str!("templates/alternates.jinja"),
    include_str!("templates/headers.jinja"),
];

/// A conversation, whose first byte says for which template: whatever it holds, it comes to a prompt within
/// its bound, the same each time and with all of its last message's text, or to an error.
pub fn template(data: &[u8]) {
    static COMPILED: OnceLock<Vec<ChatTemplate>> = OnceLock::new();
    let compiled = COMPILED.get_or_init(|| {
        let special = serde_json::json!({"bos_token": "<s>", "eos_token": "</s>"});
        let compile = |source: &&str| {
            ChatTemplate::from_source(source, special.as_object().expect("an object").clone())
                .expect("it compiles")
        };
        TEMPLATES.iter().map(compile).collect()
    });
    let Some((which, body)) = data.split_first() else { return };
    let Ok(Value::Object(mut fields)) = serde_json::from_slice::<Value>(body) else { return };
    let goes_on = fields.get("continue_final_message") == Some(&Value::Bool(true));
    let mut given = |name: &str| fields.remove(name).filter(|value| !value.is_null());
    let messages = given("messages").unwrap_or_default();
    let options = RenderOptions {
        add_generation_prompt: !goes_on,
        continue_final_message: goes_on,
        tools: given("tools"),
        documents: given("documents"),
        variables: match given("chat_template_kwargs") {
            Some(Value::Object(variables)) => variables,
            _ => serde_json::Map::new(),
        },
        now_unix_seconds: Some(1_700_000_000),
        bytes_max: PROMPT_BYTES,
        ..RenderOptions::default()
    };
    let template = &compiled[usize::from(*which) % compiled.len()];
    let rendered = template.render(&messages, &options);
    match (&rendered, template.render(&messages, &options)) {
        (Ok(text), again) => {
            // A statement more may have been written behind the last look at the bound.
            assert!(text.len() <= 2 * PROMPT_BYTES + data.len(), "{} bytes", text.len());
            assert_eq!(*text, again.expect("it renders again"));
            let last = messages.as_array().and_then(|messages| messages.last()).unwrap_or(&Value::Null);
            if let (Some(said), Some("user")) = (last["content"].as_str(), last["role"].as_str()) {
                // A template may indent lines, so white space does not count.
                let dense = |text: &str| text.split_whitespace().collect::<String>();
                assert!(dense(text).contains(&dense(said)), "{said:?} is not shown in {text:?}");
            }
        }
        (Err(error), again) => {
            assert!(!matches!(error, TextError::NoChatTemplate | TextError::Template(_)), "{error}");
            assert_eq!(error.to_string(), again.expect_err("it fails again").to_string());
        }
    }
}
