//! Reads the `usage` of an answer as it passes, without holding it back: in a stream the last event that
//! carries one, in an unstreamed answer the body's own field. Below it: the shapes of it (`shapes`), asking
//! for the usage of a stream where the client did not (`ask`), hiding what that brings (`hide`), and what of
//! an answer has passed where none is said (`passed`).

pub mod ask;
pub mod cached;
pub mod hide;
pub mod passed;
mod shapes;

use std::{collections::VecDeque, sync::LazyLock};

use bytes::Bytes;
use keyway_wire::openai::Usage;
use memchr::memmem::{self, Finder};
use serde::de::IgnoredAny;
use smallvec::SmallVec;

pub use self::shapes::of;

use self::shapes::in_tail;
use crate::{
    json::Value,
    limits::{MAX_USAGE_BODY_BYTES, USAGE_TAIL_BYTES},
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

/// Remembers what of an answer may hold its usage. Keeps references to the relayed bytes, never copies.
#[derive(Debug)]
pub enum UsageTap {
    /// A stream: the last events that named a usage, and what its first ones said of the prompt
    /// (Anthropic's).
    Events(Option<Bytes>, Opening),
    /// An unstreamed answer, and its size so far.
    Body(SmallVec<[Bytes; 1]>, usize),
    /// The end of one that is too long to be kept, and its size.
    Tail(VecDeque<Bytes>, usize),
    /// Not to be read: compressed, or no JSON.
    Blind,
}

/// What a stream said of its usage when it began: Anthropic's say there what the prompt took, and at the end
/// what the answer did.
#[derive(Debug, Default)]
pub enum Opening {
    /// Nothing has come yet.
    #[default]
    Unread,
    /// Nothing that the end does not repeat.
    Nothing,
    /// This, in the event that began the stream (`message_start`).
    Said(Box<Usage>),
}

impl UsageTap {
    /// For a stream: it is to be shown whole events.
    pub fn events() -> Self {
        Self::Events(None, Opening::Unread)
    }

    /// For an answer that is no stream.
    pub fn body() -> Self {
        Self::Body(SmallVec::new(), 0)
    }

    /// Takes a piece of the answer: whole events, of which `mentioned` says whether they name a usage, or any
    /// part of an unstreamed body.
    pub fn see(&mut self, bytes: &Bytes, mentioned: bool) {
        match self {
            Self::Events(last, opening) => {
                if mentioned && tells(bytes) {
                    if let (Opening::Unread, Some(first)) = (&*opening, &last) {
                        *opening = Opening::of(first);
                    }
                    *last = Some(bytes.clone());
                }
            }
            Self::Body(parts, size) => {
                *size += bytes.len();
                parts.push(bytes.clone());
                if *size > MAX_USAGE_BODY_BYTES {
                    *self = Self::Tail(std::mem::take(parts).into_iter().collect(), *size);
                    self.shorten();
                }
            }
            Self::Tail(parts, size) => {
                *size += bytes.len();
                parts.push_back(bytes.clone());
                self.shorten();
            }
            Self::Blind => {}
        }
    }

    /// Drops what is before an answer's end.
    fn shorten(&mut self) {
        let Self::Tail(parts, size) = self else { return };
        while let Some(first) =
            parts.front().map(Bytes::len).filter(|first| *size >= first + USAGE_TAIL_BYTES)
        {
            *size -= first;
            parts.pop_front();
        }
    }

    /// The usage, as far as it has come.
    pub fn usage(&self) -> Option<Usage> {
        match self {
            Self::Events(last, opening) => {
                let mut usages = sse::events(last.as_ref()?).filter_map(|event| of(&event.data?));
                let mut usage = usages.next()?;
                // A stream may come in one piece, its opening and its end.
                usages.for_each(|next| usage = later(&usage, next));
                Some(if let Opening::Said(first) = opening { later(first, usage) } else { usage })
            }
            // Mostly it came at once.
            Self::Body(parts, _) if parts.len() == 1 => of(&parts[0]),
            Self::Body(parts, _) => of(&parts.concat()),
            Self::Tail(parts, _) => in_tail(&parts.iter().flatten().copied().collect::<Vec<u8>>()),
            Self::Blind => None,
        }
    }

    /// The usage, once the answer is complete; nothing of it is kept.
    pub fn finish(&mut self) -> Option<Usage> {
        let usage = self.usage();
        *self = Self::Blind;
        usage
    }

    /// Tokens of what an unstreamed answer says, where it does not say its usage.
    pub fn tokens(&self) -> u64 {
        match self {
            Self::Body(parts, _) => passed::tokens_of_body(&parts.concat()),
            _ => 0,
        }
    }

    /// Whether an unstreamed answer is an error, whatever its status says: `{"error":{…}}`.
    pub fn is_error(&self) -> bool {
        let Self::Body(parts, _) = self else { return false };
        if !is_in(parts, &ERROR) {
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

    /// Whether what has come of an unstreamed answer is one JSON value, or nothing; `None` where it was not
    /// kept.
    pub fn is_whole_json(&self) -> Option<bool> {
        let Self::Body(parts, bytes) = self else { return None };
        Some(*bytes == 0 || serde_json::from_slice::<IgnoredAny>(&parts.concat()).is_ok())
    }
}

/// Whether a name is anywhere in what came in these parts, be it in one or over their seams.
fn is_in(parts: &[Bytes], name: &Finder<'_>) -> bool {
    let reach = name.needle().len() - 1;
    let mut seam = Vec::new();
    parts.iter().any(|part| {
        if name.find(part).is_some() {
            return true;
        }
        if parts.len() == 1 {
            return false;
        }
        seam.extend_from_slice(&part[..part.len().min(reach)]);
        let found = name.find(&seam).is_some();
        if part.len() > reach {
            seam.clear();
            seam.extend_from_slice(&part[part.len() - reach..]);
        }
        seam.drain(..seam.len().saturating_sub(reach));
        found
    })
}

/// Whether a usage that is mentioned has counts, and is not `null`.
fn tells(bytes: &[u8]) -> bool {
    let counts = |at: usize| {
        let mut behind = bytes[at + NAME.needle().len()..].iter();
        behind.find(|byte| !matches!(byte, b':' | b' ' | b'\t')).is_some_and(|byte| *byte != b'n')
    };
    NAME.find_iter(bytes).any(counts)
}

impl Opening {
    fn of(events: &[u8]) -> Self {
        if memmem::find(events, b"message_start").is_none() {
            return Self::Nothing;
        }
        let usage = sse::events(events).filter_map(|event| of(&event.data?)).last();
        usage.map_or(Self::Nothing, |usage| Self::Said(Box::new(usage)))
    }
}

/// What a stream says first of its usage and later, where the later word leaves out what has not changed.
fn later(first: &Usage, last: Usage) -> Usage {
    Usage {
        prompt_tokens: last.prompt_tokens.max(first.prompt_tokens),
        completion_tokens: last.completion_tokens.max(first.completion_tokens),
        total_tokens: last.total_tokens.max(first.total_tokens),
        prompt_tokens_details: last.prompt_tokens_details.or_else(|| first.prompt_tokens_details.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_usage_of_a_stream_counts_and_null_ones_do_not() {
        let mut tap = UsageTap::events();
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

    #[test]
    fn an_error_is_seen_however_its_answer_is_cut() {
        let error = br#"{"id":"x","error":{"message":"no"}}"#;
        let tap = |cuts: &[usize], body: &[u8]| {
            let mut tap = UsageTap::body();
            let ends = cuts.iter().copied().chain([body.len()]);
            ends.fold(0, |from, to| {
                tap.see(&Bytes::copy_from_slice(&body[from..to]), false);
                to
            });
            tap
        };
        for first in 0..error.len() {
            for second in first..error.len() {
                assert!(tap(&[first, second], error).is_error(), "{first} {second}");
            }
        }
        assert!(tap(&(0..error.len()).collect::<Vec<_>>(), error).is_error(), "byte by byte");
        assert!(!tap(&[9, 11], br#"{"id":"x","errors":{"message":"no"}}"#).is_error());
    }

    #[test]
    fn an_unstreamed_usage_is_read_across_parts() {
        let mut tap = UsageTap::body();
        for part in ["{\"id\":\"x\",\"usa", "ge\":{\"prompt_tokens\":3,\"completion_tokens\":2}}"] {
            tap.see(&Bytes::from(part), false);
        }
        assert_eq!(tap.finish().unwrap().completion_tokens, 2);
    }

    #[test]
    fn of_a_long_answer_the_end_is_held_and_read() {
        for (pieces, piece) in [(3, MAX_USAGE_BODY_BYTES / 2), (1, 3 * MAX_USAGE_BODY_BYTES), (3_000, 1_000)]
        {
            let mut tap = UsageTap::body();
            tap.see(&Bytes::from("{\"data\":\""), false);
            let content = Bytes::from("é".repeat(piece / 2));
            (0..pieces).for_each(|_| tap.see(&content, false));
            for part in ["\",\"usage\":{\"prompt_", "tokens\":70,\"total_tokens\":70}", "}"] {
                tap.see(&Bytes::from(part), false);
            }
            let UsageTap::Tail(parts, size) = &tap else { panic!("{tap:?}") };
            assert_eq!(*size, parts.iter().map(Bytes::len).sum::<usize>());
            assert!(*size < USAGE_TAIL_BYTES + content.len(), "{size}");
            assert_eq!(tap.usage().unwrap().prompt_tokens, 70, "{pieces}");
        }
    }

    #[test]
    fn anthropic_s_stream_says_its_prompt_first_and_its_answer_last() {
        let start = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":50,\"cache_read_input_tokens\":30,\"output_tokens\":1}}}\n\n";
        let delta = |n: u64| {
            format!(
                "event: message_delta\ndata: {{\"type\":\"message_delta\",\"delta\":{{}},\"usage\":{{\"output_tokens\":{n}}}}}\n\n"
            )
        };
        let read = |pieces: &[String]| {
            let mut tap = UsageTap::events();
            for piece in pieces {
                let piece = Bytes::from(piece.clone());
                tap.see(&piece, is_mentioned(&piece));
            }
            let usage = tap.usage().unwrap();
            (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens())
        };
        assert_eq!(read(&[start.into()]), (80, 1, Some(30)));
        assert_eq!(read(&[start.into(), delta(9)]), (80, 9, Some(30)));
        assert_eq!(read(&[start.into(), delta(4), delta(9)]), (80, 9, Some(30)));
        assert_eq!(read(&[start.to_owned() + &delta(9)]), (80, 9, Some(30)));
    }
}
