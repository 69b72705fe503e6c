//! A small server-sent-events reader of the tests' own, so that a mistake in the gateway's splitter cannot
//! hide behind the same mistake here. Bytes in, the payloads of whole events out; no limits, no `id` or
//! `retry`.

use crate::http1::End;

/// What a client sees next on a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// The `data` of one whole event; several data lines are joined by newlines.
    Event(String),
    /// The body is over. `torn` says that bytes of an unfinished event came before the end.
    End {
        /// How the body ended on the wire.
        end: End,
        /// Whether an event was left unfinished.
        torn: bool,
    },
}

impl Next {
    /// The event's data.
    ///
    /// # Panics
    /// When the stream had ended instead.
    pub fn event(self) -> String {
        match self {
            Next::Event(data) => data,
            Next::End { end, torn } => panic!("wanted an event, the stream ended: {end:?}, torn: {torn}"),
        }
    }
}

/// Collects bytes and splits off whole events. Lines end with LF or CRLF.
#[derive(Debug, Default)]
pub struct SseReader {
    buffer: Vec<u8>,
}

impl SseReader {
    /// Adds bytes as they came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Takes the next whole event that has data; comments alone are skipped.
    pub fn next_event(&mut self) -> Option<String> {
        loop {
            let end = self.end_of_event()?;
            let event: Vec<u8> = self.buffer.drain(..end).collect();
            let text = String::from_utf8(event).expect("events are UTF-8");
            let data: Vec<&str> =
                text.lines().filter_map(|l| l.strip_prefix("data:")).map(without_space).collect();
            if !data.is_empty() {
                return Some(data.join("\n"));
            }
        }
    }

    /// Whether bytes of an unfinished event are waiting.
    pub fn torn(&self) -> bool {
        !self.buffer.is_empty()
    }

    fn end_of_event(&self) -> Option<usize> {
        let mut line_start = 0;
        for (i, byte) in self.buffer.iter().enumerate() {
            if *byte == b'\n' {
                if matches!(&self.buffer[line_start..i], b"" | b"\r") {
                    return Some(i + 1);
                }
                line_start = i + 1;
            }
        }
        None
    }
}

fn without_space(value: &str) -> &str {
    value.strip_prefix(' ').unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_split_gives_the_same_events() {
        let stream =
            ": hello\n\ndata: {\"a\":\"ü\"}\n\nevent: x\r\ndata:one\r\ndata: two\r\n\r\ndata: [DONE]\n\n";
        for cut in 0..stream.len() {
            let mut reader = SseReader::default();
            let mut events = Vec::new();
            for part in [&stream.as_bytes()[..cut], &stream.as_bytes()[cut..]] {
                reader.push(part);
                events.extend(std::iter::from_fn(|| reader.next_event()));
            }
            assert_eq!(events, ["{\"a\":\"ü\"}", "one\ntwo", "[DONE]"]);
            assert!(!reader.torn());
        }
    }

    #[test]
    fn an_unfinished_event_is_torn_not_delivered() {
        let mut reader = SseReader::default();
        reader.push(b"data: {\"half\":\n");
        assert_eq!(reader.next_event(), None);
        assert!(reader.torn());
    }
}
