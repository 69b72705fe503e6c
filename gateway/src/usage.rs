//! Reads the `usage` of an answer as it passes, without holding it back: in a stream the last event that carries
//! one, in an unstreamed answer the body's own field. Below it: asking for the usage of a stream where the client did
//! not (`ask`), and hiding what that brings (`hide`).

pub mod ask;
pub mod hide;

use std::sync::LazyLock;

use bytes::Bytes;
use keyway_wire::openai::{PromptTokensDetails, Usage};
use memchr::memmem::Finder;
use serde::de::IgnoredAny;

use crate::{
    json::{Fields, Value},
    limits::MAX_USAGE_BODY_BYTES,
    sse,
};

/// Made once: to set a search up takes as long as to look through an event.
static NAME: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));

/// Likewise, for an answer that is an error.
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"error\""));

/// Whether the name of a usage stands in some events; almost none of a stream mentions it.
pub fn is_mentioned(bytes: &[u8]) -> bool {
    NAME.find(bytes).is_some()
}

/// The usage in a chunk or whole answer.
fn of(json: &[u8]) -> Option<Usage> {
    let text = std::str::from_utf8(json).ok()?;
    Value::last_object_of_document(text, &NAME, read).or_else(|| {
        let mut fields = Value::document(text)?.map_while(Result::ok);
        let (_, usage) = fields.find(|(name, _)| name == "usage")?;
        read(&mut usage.fields()?)
    })
}

/// As serde would: what is not there is 0, what is no number makes it no usage.
fn read(usage: &mut Fields<'_>) -> Option<Usage> {
    let number = |value: Value<'_>| value.raw().parse::<u64>().ok();
    let mut read = Usage::default();
    for field in usage {
        let (name, value) = field.ok()?;
        match &*name {
            "prompt_tokens" => read.prompt_tokens = number(value)?,
            "completion_tokens" => read.completion_tokens = number(value)?,
            "total_tokens" => read.total_tokens = number(value)?,
            "prompt_tokens_details" if value.raw() != "null" => {
                let mut details = value.fields()?.map_while(Result::ok);
                let cached = details.find(|(name, _)| name == "cached_tokens").map(|(_, cached)| cached);
                let cached_tokens = match cached.filter(|cached| cached.raw() != "null") {
                    Some(cached) => Some(number(cached)?),
                    None => None,
                };
                read.prompt_tokens_details = Some(PromptTokensDetails { cached_tokens });
            }
            _ => {}
        }
    }
    Some(read)
}

/// Remembers what of an answer may hold its usage. Keeps references to the relayed bytes, never copies.
#[derive(Debug)]
pub enum UsageTap {
    /// A stream: the last events that named a usage.
    Events(Option<Bytes>),
    /// An unstreamed answer, and its size so far.
    Body(Vec<Bytes>, usize),
    /// Not to be read: compressed, or too long.
    Blind,
}

impl UsageTap {
    /// Takes a piece of the answer: whole events, of which `mentioned` says whether they name a usage, or any part of an
    /// unstreamed body.
    pub fn see(&mut self, bytes: &Bytes, mentioned: bool) {
        match self {
            Self::Events(last) => {
                if mentioned && tells(bytes) {
                    *last = Some(bytes.clone());
                }
            }
            Self::Body(parts, size) => {
                *size += bytes.len();
                if *size > MAX_USAGE_BODY_BYTES {
                    *self = Self::Blind;
                } else {
                    parts.push(bytes.clone());
                }
            }
            Self::Blind => {}
        }
    }

    /// The usage, once the answer is complete.
    pub fn finish(&mut self) -> Option<Usage> {
        match std::mem::replace(self, Self::Blind) {
            Self::Events(last) => sse::events(&last?).filter_map(|event| of(&event.data?)).last(),
            // Mostly it came at once.
            Self::Body(parts, _) if parts.len() == 1 => of(&parts[0]),
            Self::Body(parts, _) => of(&parts.concat()),
            Self::Blind => None,
        }
    }

    /// Whether an unstreamed answer is an error, whatever its status says: `{"error":{…}}`.
    pub fn is_error(&self) -> bool {
        let Self::Body(parts, _) = self else { return false };
        if !parts.iter().any(|part| ERROR.find(part).is_some()) {
            return false;
        }
        let all = parts.concat();
        let fields = std::str::from_utf8(&all).ok().and_then(Value::document);
        let mut fields = fields.into_iter().flatten().map_while(Result::ok);
        fields.any(|(name, value)| match &*name {
            "error" => value.raw() != "null",
            "object" => value.raw() == "\"error\"",
            _ => false,
        })
    }

    /// Whether what has come of an unstreamed answer is one JSON value, or nothing; `None` where it was not kept.
    pub fn is_whole_json(&self) -> Option<bool> {
        let Self::Body(parts, bytes) = self else { return None };
        Some(*bytes == 0 || serde_json::from_slice::<IgnoredAny>(&parts.concat()).is_ok())
    }
}

/// Whether a usage that is mentioned has counts, and is not `null`.
fn tells(bytes: &[u8]) -> bool {
    let counts = |at: usize| {
        let mut behind = bytes[at + NAME.needle().len()..].iter();
        behind.find(|byte| !matches!(byte, b':' | b' ' | b'\t')).is_some_and(|byte| *byte != b'n')
    };
    NAME.find_iter(bytes).any(counts)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_last_usage_of_a_stream_counts_and_null_ones_do_not() {
        let mut tap = UsageTap::Events(None);
        for event in [
            "data: {\"usage\":{\"prompt_tokens\":1}}\n\n",
            "data: {\"choices\":[],\"usage\": {\"prompt_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\r\n\r\n",
            "data: {\"usage\":null}\n\ndata: [DONE]\n\n",
        ] {
            let event = Bytes::from(event);
            tap.see(&event, is_mentioned(&event));
        }
        let usage = tap.finish().unwrap();
        assert_eq!((usage.prompt_tokens, usage.cached_tokens()), (9, Some(8)));
    }

    proptest! {
        /// What serde reads of engines' answers is read, wherever in them the usage stands.
        #[test]
        fn it_is_what_serde_reads(
            counts in prop::collection::vec(prop_oneof!["0|[1-9][0-9]{0,8}", "null", "-1", "1\\.5", "\"1\"", "18446744073709551616"], 3),
            details in prop_oneof![Just(String::new()), "null", "\\{\\}", "\\{\"cached_tokens\":(7|null|-1)\\}", "[0-9]"],
            before in prop::sample::select(vec!["", "\"choices\":[{\"usage\":{\"prompt_tokens\":99}}],", "\"id\":\"\\\"usage\\\":{\","]),
            after in prop::sample::select(vec!["", ",\"x\":null", ",\"y\":{\"usage\":{}}", ",\"s\":\"usage\""]),
        ) {
            #[derive(serde::Deserialize)]
            struct Carrier {
                usage: Option<Usage>,
            }
            let details = if details.is_empty() { details } else { format!(",\"prompt_tokens_details\":{details}") };
            let [prompt, completion, total] = &counts[..] else { unreachable!("three") };
            let json = format!(
                "{{{before}\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{completion},\"total_tokens\":{total}{details}}}{after}}}"
            );
            let serde = serde_json::from_str::<Carrier>(&json).ok().and_then(|carrier| carrier.usage);
            prop_assert_eq!(of(json.as_bytes()), serde, "{}", json);
        }
    }

    #[test]
    fn an_unstreamed_usage_is_read_across_parts() {
        let mut tap = UsageTap::Body(Vec::new(), 0);
        for part in ["{\"id\":\"x\",\"usa", "ge\":{\"prompt_tokens\":3,\"completion_tokens\":2}}"] {
            tap.see(&Bytes::from(part), false);
        }
        assert_eq!(tap.finish().unwrap().completion_tokens, 2);
    }

    #[test]
    fn a_long_answer_is_not_held() {
        let mut tap = UsageTap::Body(Vec::new(), 0);
        for _ in 0..3 {
            tap.see(&Bytes::from(vec![b' '; MAX_USAGE_BODY_BYTES / 2]), false);
        }
        assert!(matches!(tap, UsageTap::Blind));
    }
}
