//! The events in whole pieces of a stream, as every reader of one sees them: LF, CRLF or CR ends a line, a
//! colon in front makes a comment, one space behind the colon is no part of a value, several `data` lines are
//! one text.
//!
//! Format: WHATWG HTML, "Server-sent events", 9.2.6
//! (<https://html.spec.whatwg.org/multipage/server-sent-events.html>).

use std::borrow::Cow;

/// A mark that may stand before the first event of a stream, and is no part of it.
const BOM: &[u8] = b"\xEF\xBB\xBF";

/// One event of a stream: its bytes, its name and its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event<'a> {
    /// Its bytes as they came, comments and line ends included.
    pub raw: &'a [u8],
    /// What its `event` line says; empty where it has none.
    pub name: &'a [u8],
    /// Its data, lines joined by LF; `None` where it has no `data` line: no reader of the stream hears of it.
    pub data: Option<Cow<'a, [u8]>>,
}

/// The events in some bytes, in order; all bytes are part of one of them. What has no blank line behind it at
/// the end is an event too.
pub fn events(bytes: &[u8]) -> Events<'_> {
    Events { rest: bytes }
}

/// Goes through events one by one ([`events`] makes it); copies only data of several lines.
#[derive(Debug, Clone)]
pub struct Events<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Events<'a> {
    type Item = Event<'a>;

    fn next(&mut self) -> Option<Event<'a>> {
        let all = self.rest;
        let mut event = Event { raw: all, name: b"", data: None };
        for line in lines(all) {
            self.rest = line.behind;
            if line.text.is_empty() {
                event.raw = &all[..all.len() - line.behind.len()];
                return Some(event);
            }
            event.take(line.text);
        }
        (!all.is_empty()).then_some(event)
    }
}

impl<'a> Event<'a> {
    fn take(&mut self, line: &'a [u8]) {
        let (name, value) = field(line);
        match name {
            b"event" => self.name = value,
            b"data" => match &mut self.data {
                None => self.data = Some(Cow::Borrowed(value)),
                Some(data) => {
                    let data = data.to_mut();
                    data.push(b'\n');
                    data.extend_from_slice(value);
                }
            },
            _ => {}
        }
    }

    /// Its data, where that is text.
    pub fn text(&self) -> Option<&str> {
        std::str::from_utf8(self.data.as_deref()?).ok()
    }

    /// Writes it with other data; `None`: with none, and nothing at all where nothing else is left of it. Its
    /// other lines stay as they came. New data has no line ends: JSON's are spaces as well.
    pub fn write_with(&self, data: Option<&[u8]>, out: &mut Vec<u8>) {
        let (begin, mut data) = (out.len(), data);
        let mut kept = false;
        for line in lines(self.raw) {
            let whole = &self.raw[self.raw.len() - line.behind.len() - line.len..][..line.len];
            if line.text.is_empty() {
                if kept {
                    out.extend_from_slice(whole);
                }
            } else if field(line.text).0 != b"data" {
                // An event's name is nothing without its data.
                kept |= line.text.starts_with(b":") || data.is_some();
                out.extend_from_slice(whole);
            } else if let Some(data) = data.take() {
                out.extend_from_slice(&line.text[..line.text.len() - field(line.text).1.len()]);
                out.extend(data.iter().map(|byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { *byte }));
                out.extend_from_slice(&whole[line.text.len()..]);
                kept = true;
            }
        }
        if !kept {
            out.truncate(begin);
        }
    }
}

/// One line: without its end, its bytes with that, and what follows.
struct Line<'a> {
    text: &'a [u8],
    len: usize,
    behind: &'a [u8],
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = Line<'_>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let at = memchr::memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
        let end = match &rest[at..] {
            [b'\r', b'\n', ..] => at + 2,
            [] => at,
            _ => at + 1,
        };
        let (line, behind) = rest.split_at(end);
        rest = behind;
        Some(Line { text: &line[..at], len: end, behind })
    })
}

/// A line's name and value; of a comment the name is empty.
fn field(line: &[u8]) -> (&[u8], &[u8]) {
    let line = line.strip_prefix(BOM).unwrap_or(line);
    let Some(colon) = memchr::memchr(b':', line) else { return (line, b"") };
    let value = &line[colon + 1..];
    (&line[..colon], value.strip_prefix(b" ").unwrap_or(value))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(stream: &str) -> Vec<(String, String)> {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let heard = events(stream.as_bytes()).filter(|event| event.data.is_some());
        heard.map(|event| (text(event.name), text(event.data.as_deref().unwrap()))).collect()
    }

    #[test]
    fn events_are_read_as_the_standard_says() {
        for (stream, want) in [
            ("data: a\n\n", &[("", "a")] as &[(&str, &str)]),
            ("data:a\r\n\r\ndata:  b\r\rdata: c\n\n", &[("", "a"), ("", " b"), ("", "c")]),
            ("\u{feff}data: a\n\n", &[("", "a")]),
            (": note\nevent: x\nid: 7\ndata: a\ndata: b\n\n", &[("x", "a\nb")]),
            ("data\n\ndata:\n\n", &[("", ""), ("", "")]),
            ("event: only\n\nretry: 3\n\n\n\n", &[]),
            ("database: no\n\n data: no\n\ndata: cut", &[("", "cut")]),
            ("event:error\r\ndata:{}\r\n\r\n", &[("error", "{}")]),
        ] {
            let want: Vec<_> = want.iter().map(|(name, data)| ((*name).into(), (*data).into())).collect();
            assert_eq!(read(stream), want, "{stream:?}");
        }
    }

    #[test]
    fn other_data_leaves_the_other_lines_as_they_are() {
        let with = |stream: &str, data: Option<&str>| {
            let mut out = Vec::new();
            events(stream.as_bytes()).for_each(|event| event.write_with(data.map(str::as_bytes), &mut out));
            String::from_utf8(out).unwrap()
        };
        for (stream, new, none) in [
            ("data: a\n\n", "data: X\n\n", ""),
            ("data:a\r\n\r\n", "data:X\r\n\r\n", ""),
            (": ping\ndata: a\ndata: b\n\n", ": ping\ndata: X\n\n", ": ping\n\n"),
            ("event: e\ndata: a\rid: 3\n\n", "event: e\ndata: X\rid: 3\n\n", ""),
            (": only\n\n", ": only\n\n", ": only\n\n"),
            ("data: cut", "data: X", ""),
        ] {
            assert_eq!(with(stream, Some("X")), new, "{stream:?}");
            assert_eq!(with(stream, None), none, "{stream:?}");
        }
        assert_eq!(with("data: a\n\n", Some("{\n}")), "data: { }\n\n");
    }

    proptest! {
        /// Lines of any kind. LF and CRLF may take turns; CR alone may not meet LF.
        #[test]
        fn no_byte_is_lost_and_line_ends_make_no_difference(
            lines in prop::collection::vec(prop::sample::select(vec![
                "", "data: {\"a\":1}", "data:b", "data", ": c", "event: x", "id: 1", "what", "data:  é",
            ]), 0..20),
            cr in any::<bool>(),
            crlf in prop::collection::vec(any::<bool>(), 20),
        ) {
            let end = |crlf: &bool| if cr { "\r" } else if *crlf { "\r\n" } else { "\n" };
            let stream: String = lines.iter().zip(&crlf).flat_map(|(line, crlf)| [*line, end(crlf)]).collect();
            let raw: Vec<u8> = events(stream.as_bytes()).flat_map(|event| event.raw.to_vec()).collect();
            prop_assert_eq!(&raw[..], stream.as_bytes());
            let plain: String = lines.iter().flat_map(|line| [*line, "\n"]).collect();
            prop_assert_eq!(read(&stream), read(&plain));
        }
    }
}
