//! Splits a byte stream of server-sent events at event boundaries, so that only whole events are forwarded.
//! Never decodes: a UTF-8 character split across chunks stays intact. Line ends may be LF, CRLF or CR (WHATWG
//! HTML §9.2). Code that reads what is in the events goes through [`events`].

mod events;

pub use self::events::{Event, events};

use bytes::{Bytes, BytesMut};

/// An event grew past the splitter's cap without a blank line.
#[derive(Debug, thiserror::Error)]
#[error("the worker sent an event of more than {cap_bytes} bytes")]
pub struct EventTooLong {
    /// The splitter's cap, which the configuration sets (`limits.max_event_bytes`).
    pub cap_bytes: usize,
}

/// Holds the unfinished event at the end of what has come so far.
#[derive(Debug)]
pub struct EventSplitter {
    tail: BytesMut,
    cap_bytes: usize,
}

impl EventSplitter {
    /// A splitter that refuses events longer than `cap_bytes`.
    pub fn new(cap_bytes: usize) -> Self {
        Self { tail: BytesMut::new(), cap_bytes }
    }

    /// Takes the next bytes and returns every event that is now whole (maybe none). A chunk that ends with an
    /// event, the usual case, is returned as it is, without a copy.
    pub fn push(&mut self, mut chunk: Bytes) -> Result<Bytes, EventTooLong> {
        if !self.tail.is_empty() {
            // No event ended in what was here, so only its last bytes are looked at again, and none is
            // copied: an event may come in very many pieces.
            let from = self.tail.len().saturating_sub(LINE_ENDS_MAX - 1);
            self.tail.extend_from_slice(&chunk);
            let whole = match last_boundary(&self.tail[from..]) {
                0 => Bytes::new(),
                end => self.tail.split_to(from + end).freeze(),
            };
            return self.capped().map(|()| whole);
        }
        let end = last_boundary(&chunk);
        let rest = chunk.split_off(end);
        self.tail.extend_from_slice(&rest);
        self.capped().map(|()| chunk)
    }

    fn capped(&self) -> Result<(), EventTooLong> {
        let cap_bytes = self.cap_bytes;
        if self.tail.len() > cap_bytes { Err(EventTooLong { cap_bytes }) } else { Ok(()) }
    }

    /// Whether no event is unfinished.
    pub fn is_empty(&self) -> bool {
        self.tail.is_empty()
    }

    /// The unfinished rest, when the stream has ended.
    pub fn take_tail(&mut self) -> Bytes {
        self.tail.split().freeze()
    }
}

/// Bytes of the longest end of an event, and the one behind it that may decide: `\r\n\r` and what is no `\n`.
const LINE_ENDS_MAX: usize = 4;

/// Where the last blank line of `bytes` ends, or 0.
fn last_boundary(bytes: &[u8]) -> usize {
    let mut end = bytes.len();
    while let Some(at) = memchr::memrchr2(b'\n', b'\r', &bytes[..end]) {
        let before = &bytes[..at];
        let blank = match bytes[at] {
            b'\n' => before.ends_with(b"\n") || before.ends_with(b"\n\r") || before.ends_with(b"\r\r"),
            // A CR that an LF may yet follow is not taken for a line end of its own.
            _ => {
                before.ends_with(b"\r")
                    || (before.ends_with(b"\n") && bytes.get(at + 1).is_some_and(|b| *b != b'\n'))
            }
        };
        if blank {
            return at + 1;
        }
        end = at;
    }
    0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn events(ending: &str) -> Vec<u8> {
        ["data: {\"a\":1}", "event: x\ndata: ü€😀", ": comment", "data: [DONE]"]
            .iter()
            .map(|event| event.replace('\n', ending) + ending + ending)
            .collect::<String>()
            .into_bytes()
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_bytes_and_only_whole_events(
            ending in prop::sample::select(vec!["\n", "\r\n", "\r"]),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let whole = events(ending);
            let mut at: Vec<usize> = cuts.iter().map(|c| c.index(whole.len())).collect();
            at.push(0);
            at.push(whole.len());
            at.sort_unstable();
            let mut splitter = EventSplitter::new(1 << 20);
            let mut out = Vec::new();
            for pair in at.windows(2) {
                let part = splitter.push(Bytes::copy_from_slice(&whole[pair[0]..pair[1]])).unwrap();
                out.extend_from_slice(&part);
                // What was let through so far ends a line: no event is cut in the middle of its text.
                prop_assert!(out.is_empty() || matches!(out.last(), Some(b'\n' | b'\r')));
            }
            out.extend_from_slice(&splitter.take_tail());
            prop_assert_eq!(out, whole);
        }
    }

    /// Ends of events in `bytes`, read line by line: all places where one may be cut, and the end of the last
    /// event that has text and is whole, whatever may follow.
    fn read_lines(bytes: &[u8]) -> (Vec<usize>, usize) {
        let (mut ends, mut whole, mut line, mut text, mut at) = (vec![0], 0, 0, false, 0);
        while at < bytes.len() {
            let next = bytes.get(at + 1);
            if !matches!(bytes[at], b'\n' | b'\r') {
                (line, text, at) = (line + 1, true, at + 1);
                continue;
            }
            let crlf = bytes[at] == b'\r' && next == Some(&b'\n');
            if line == 0 {
                // Whoever cuts behind the CR leaves an LF that ends nothing more.
                ends.push(at + 1);
                let sure = bytes[at] == b'\n' || next.is_some() || bytes[..at].ends_with(b"\r");
                if text && sure {
                    whole = at + 1;
                }
                text &= !sure;
            }
            at += 1 + usize::from(crlf);
            if crlf && line == 0 {
                ends.push(at);
            }
            line = 0;
        }
        (ends, whole)
    }

    proptest! {
        #[test]
        fn any_stream_in_any_pieces_is_cut_between_events_and_never_held_back(
            bytes in prop::collection::vec(prop::sample::select(b"\n\n\r\rab".to_vec()), 0..60),
            pieces in prop::collection::vec(1_usize..8, 60),
        ) {
            let mut splitter = EventSplitter::new(1 << 20);
            let (mut out, mut at) = (Vec::new(), 0);
            for piece in pieces {
                let to = (at + piece).min(bytes.len());
                out.extend_from_slice(&splitter.push(Bytes::copy_from_slice(&bytes[at..to])).unwrap());
                at = to;
                // What follows a CR decides whether it was a line's end of its own.
                let ends = read_lines(&bytes).0;
                prop_assert!(ends.contains(&out.len()), "{:?} of {bytes:?}", out.len());
                let whole = read_lines(&bytes[..at]).1;
                prop_assert!(out.len() >= whole, "{} of {whole} of {:?}", out.len(), &bytes[..at]);
            }
            out.extend_from_slice(&splitter.take_tail());
            prop_assert_eq!(out, bytes);
        }

        #[test]
        fn no_more_than_the_cap_is_ever_held(
            cap in 1_usize..64,
            pieces in prop::collection::vec("[a\n]{1,40}", 0..40),
        ) {
            let mut splitter = EventSplitter::new(cap);
            for piece in pieces {
                let held = splitter.tail.len();
                match splitter.push(Bytes::from(piece.clone())) {
                    Ok(_) => prop_assert!(splitter.tail.len() <= cap),
                    Err(EventTooLong { cap_bytes }) => {
                        prop_assert_eq!(cap_bytes, cap);
                        prop_assert!(held + piece.len() > cap);
                        break;
                    }
                }
            }
        }
    }

    #[test]
    fn a_half_event_waits_for_its_blank_line() {
        let mut splitter = EventSplitter::new(64);
        assert_eq!(splitter.push(Bytes::from_static(b"data: 1\n\ndata: 2\n")).unwrap(), "data: 1\n\n");
        assert_eq!(splitter.push(Bytes::from_static(b"\n")).unwrap(), "data: 2\n\n");
        assert_eq!(splitter.push(Bytes::from_static(b"data: 3")).unwrap(), "");
        assert_eq!(splitter.take_tail(), "data: 3");
    }

    #[test]
    fn an_event_without_an_end_is_refused_at_the_cap() {
        let mut splitter = EventSplitter::new(16);
        assert!(splitter.push(Bytes::from_static(b"data: 12345")).is_ok());
        assert!(splitter.push(Bytes::from_static(b"67890abcdef")).is_err());
    }

    #[test]
    fn a_chunk_of_whole_events_is_not_copied() {
        let chunk = Bytes::from_static(b"data: 1\n\n");
        let out = EventSplitter::new(64).push(chunk.clone()).unwrap();
        assert_eq!(out.as_ptr(), chunk.as_ptr());
    }
}
