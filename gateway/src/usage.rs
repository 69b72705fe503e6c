//! Reads the `usage` of an answer as it passes, without holding it back: in a stream the last event that carries
//! one, in an unstreamed answer the body's own field. Below it: asking for the usage of a stream where the client did
//! not (`ask`), and hiding what that brings (`hide`).

pub mod ask;
pub mod hide;

use std::sync::LazyLock;

use bytes::Bytes;
use keyway_wire::openai::Usage;
use memchr::memmem::{self, Finder};
use serde::Deserialize;

use crate::limits::MAX_USAGE_BODY_BYTES;

/// Made once: to set a search up takes as long as to look through an event.
static NAME: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));

/// Whether the name of a usage stands in some events; almost none of a stream mentions it.
pub fn is_mentioned(bytes: &[u8]) -> bool {
    NAME.find(bytes).is_some()
}

#[derive(Deserialize)]
struct Carrier {
    usage: Option<Usage>,
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
                if mentioned
                    && memmem::find(bytes, b"\"usage\":{")
                        .or_else(|| memmem::find(bytes, b"\"usage\": {"))
                        .is_some()
                {
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
            Self::Events(last) => last?
                .split(|byte| matches!(byte, b'\n' | b'\r'))
                .rev()
                .filter_map(|line| line.strip_prefix(b"data:"))
                .find_map(|data| serde_json::from_slice::<Carrier>(data).ok()?.usage),
            Self::Body(parts, size) => {
                let mut whole = Vec::with_capacity(size);
                for part in &parts {
                    whole.extend_from_slice(part);
                }
                serde_json::from_slice::<Carrier>(&whole).ok()?.usage
            }
            Self::Blind => None,
        }
    }
}

#[cfg(test)]
mod tests {
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
