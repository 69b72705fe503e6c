//! Looks at an answer on its way to the client for the ids that it hands out: at a stream's first event, and
//! at all of another answer, before its last byte is passed on, so that they are known when the client asks
//! for what they name.

use std::sync::Arc;

use bytes::Bytes;

use super::{Owner, StoredState};
use crate::{limits::MAX_USAGE_BODY_BYTES, prompt::stored_ids::handed_out};

/// What of an answer was seen.
#[derive(Debug)]
pub struct Tap {
    state: Arc<StoredState>,
    owner: Owner,
    seen: Vec<u8>,
    over: bool,
}

impl Tap {
    pub(super) fn new(state: Arc<StoredState>, owner: Owner) -> Self {
        Self { state, owner, seen: Vec::new(), over: false }
    }

    /// Takes a piece of the answer.
    pub fn see(&mut self, bytes: &Bytes) {
        if self.over {
            return;
        }
        let room = MAX_USAGE_BODY_BYTES - self.seen.len();
        self.seen.extend_from_slice(&bytes[..bytes.len().min(room)]);
        // JSON begins with a brace, a stream with a field's name or a comment.
        let is_json = self.seen.trim_ascii_start().first().is_none_or(|first| *first == b'{');
        if !is_json && let Some(event) = first_event(&self.seen) {
            self.learn(event);
        } else if bytes.len() >= room {
            self.end();
        }
    }

    /// The answer has ended.
    pub fn end(&mut self) {
        if !self.over {
            self.learn(0..self.seen.len());
        }
    }

    fn learn(&mut self, part: std::ops::Range<usize>) {
        self.over = true;
        let seen = std::mem::take(&mut self.seen);
        let text = match std::str::from_utf8(&seen[part.clone()]) {
            Ok(text) => text,
            // Its end is cut within a character.
            Err(error) => std::str::from_utf8(&seen[part][..error.valid_up_to()]).unwrap_or_default(),
        };
        handed_out(text, |id| self.state.learn(id, self.owner));
    }
}

/// The data of a stream's first event that has some.
fn first_event(seen: &[u8]) -> Option<std::ops::Range<usize>> {
    let mut begin = 0;
    while let Some(length) = memchr::memchr2(b'\n', b'\r', &seen[begin..]) {
        let line = &seen[begin..begin + length];
        if let Some(data) = line.strip_prefix(b"data:") {
            return Some(begin + length - data.len()..begin + length);
        }
        begin += length + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use keyway_core::index::WorkerId;
    use keyway_wire::block_hash::HashKey;

    use super::*;
    use crate::{clock::Clock, config::StoredStateConfig, metrics::Metrics};

    const OWNER: Owner = Owner { worker: WorkerId(3), tenant: 5 };

    fn state() -> Arc<StoredState> {
        let config = StoredStateConfig { memory_bytes: 1 << 16, keep: Duration::from_secs(9) };
        let metrics = Metrics::new().unwrap().stored_state;
        StoredState::new(config, HashKey::new(1), Clock::start(), metrics).unwrap()
    }

    /// Whether the id is known after an answer that comes in pieces of so many bytes, and whether before its
    /// end.
    fn known(answer: &[u8], piece: usize, id: &str) -> (bool, bool) {
        let state = state();
        let mut tap = Tap::new(Arc::clone(&state), OWNER);
        answer.chunks(piece).for_each(|piece| tap.see(&Bytes::copy_from_slice(piece)));
        let early = state.worker_of(id) == Some(OWNER);
        tap.end();
        (early, state.worker_of(id) == Some(OWNER))
    }

    #[test]
    fn an_answer_s_id_is_known_at_its_end_however_it_comes() {
        let long = format!(r#" {{"output":["{}é"],"id":"resp_1"}}"#, "x".repeat(5_000));
        for answer in [r#"{"id":"resp_1","output":[]}"#, &long] {
            for piece in [1, 7, 10_000] {
                assert_eq!(known(answer.as_bytes(), piece, "resp_1"), (false, true), "{piece}");
            }
        }
    }

    #[test]
    fn a_stream_s_id_is_known_from_its_first_event_on() {
        for stream in [
            "event: response.created\ndata: {\"response\":{\"id\":\"resp_1\"}}\n\n",
            "data:{\"id\":\"resp_1\"}\r\n\r\ndata: {\"id\":\"other\"}\n\n",
            ": ping\n\nid: 4\r\ndata: {\"id\":\"resp_1\"}\r\r",
        ] {
            for piece in [1, 5, 1_000] {
                assert_eq!(known(stream.as_bytes(), piece, "resp_1"), (true, true), "{stream:?} by {piece}");
                assert_eq!(known(stream.as_bytes(), piece, "other"), (false, false));
            }
        }
    }

    #[test]
    fn of_a_large_answer_its_beginning_is_looked_at() {
        let filling = "é".repeat(MAX_USAGE_BODY_BYTES);
        let answer = format!(r#"{{"id":"first","output":"{filling}","file":{{"id":"last"}}}}"#);
        assert_eq!(known(answer.as_bytes(), 100_000, "first"), (true, true));
        assert_eq!(known(answer.as_bytes(), 100_000, "last"), (false, false));
    }

    #[test]
    fn what_is_no_json_hands_out_nothing() {
        for answer in ["", "not json", "[{\"id\":\"resp_1\"}]", "\u{0}\u{1}", "\"resp_1\""] {
            assert_eq!(known(answer.as_bytes(), 3, "resp_1"), (false, false), "{answer:?}");
        }
    }
}
