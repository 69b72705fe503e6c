//! Splits the bytes of a `text/event-stream` into its events, whatever pieces they arrive in. The load
//! tester's own parser on purpose: a fault shared with the gateway's would hide itself. Interprets no data.
//!
//! Format: WHATWG HTML, "Server-sent events", 9.2.6. Ids and retry times are skipped: nothing here uses them.

/// One event of a stream; its bytes last only for the callback of [`Parser::push`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<'a> {
    /// Its name; empty where it has none.
    pub name: &'a [u8],
    /// Its data: the lines of it, a newline between two.
    pub data: &'a [u8],
}

/// An event is larger than the parser's bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event is larger than {0} bytes")]
pub struct TooLarge(pub usize);

/// State between two pieces of a stream.
#[derive(Debug)]
pub struct Parser {
    /// The line that has not ended yet.
    line: Vec<u8>,
    /// Data of the event that has not ended yet: its lines, each with a newline behind it.
    data: Vec<u8>,
    /// Name of the event that has not ended yet.
    name: Vec<u8>,
    bytes_max: usize,
    after_cr: bool,
    at_start: bool,
}

impl Parser {
    /// A parser that holds at most `bytes_max` bytes of one event.
    pub fn new(bytes_max: usize) -> Self {
        Self {
            line: Vec::new(),
            data: Vec::new(),
            name: Vec::new(),
            bytes_max,
            after_cr: false,
            at_start: true,
        }
    }

    /// Takes the next piece and hands each event that ends in it and has data to `event`.
    pub fn push(&mut self, mut piece: &[u8], mut event: impl FnMut(Event<'_>)) -> Result<(), TooLarge> {
        while !piece.is_empty() {
            if std::mem::take(&mut self.after_cr) && piece[0] == b'\n' {
                piece = &piece[1..];
                continue;
            }
            let end = memchr::memchr2(b'\n', b'\r', piece);
            let text = &piece[..end.unwrap_or(piece.len())];
            if self.line.len() + self.data.len() + self.name.len() + text.len() > self.bytes_max {
                return Err(TooLarge(self.bytes_max));
            }
            let Some(end) = end else {
                self.line.extend_from_slice(text);
                break;
            };
            self.after_cr = piece[end] == b'\r';
            piece = &piece[end + 1..];
            if !self.line.is_empty() {
                self.line.extend_from_slice(text);
                let line = std::mem::take(&mut self.line);
                self.end_line(&line, &mut event);
                self.line = line;
                self.line.clear();
            } else if let Some(data) = self.whole(text, piece) {
                event(Event { name: &self.name, data });
                self.name.clear();
                piece = &piece[1..];
            } else {
                self.end_line(text, &mut event);
            }
        }
        Ok(())
    }

    /// The data of an event of which `line` is the only line of data and an empty line in front of `rest` the
    /// end. As a rule an event is such, and need not be copied.
    fn whole<'a>(&self, line: &'a [u8], rest: &[u8]) -> Option<&'a [u8]> {
        let is_whole =
            !self.after_cr && !self.at_start && self.data.is_empty() && rest.first() == Some(&b'\n');
        if is_whole { value_of(line, b"data") } else { None }
    }

    fn end_line(&mut self, mut line: &[u8], event: &mut impl FnMut(Event<'_>)) {
        if std::mem::take(&mut self.at_start) {
            line = line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(line);
        }
        if line.is_empty() {
            if let Some((_, data)) = self.data.split_last() {
                event(Event { name: &self.name, data });
            }
            self.data.clear();
            self.name.clear();
        } else if let Some(value) = value_of(line, b"data") {
            self.data.extend_from_slice(value);
            self.data.push(b'\n');
        } else if let Some(value) = value_of(line, b"event") {
            self.name.clear();
            self.name.extend_from_slice(value);
        }
    }
}

/// The value of a line of this field.
fn value_of<'a>(line: &'a [u8], field: &[u8]) -> Option<&'a [u8]> {
    match line.strip_prefix(field)? {
        [] => Some(b""),
        [b':', b' ', value @ ..] | [b':', value @ ..] => Some(value),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds `stream` in pieces that end at `cuts`.
    fn parse(stream: &[u8], cuts: &[usize]) -> Vec<String> {
        let (mut parser, mut events, mut from) = (Parser::new(1000), Vec::new(), 0);
        let mut cuts: Vec<_> =
            cuts.iter().map(|cut| cut % (stream.len() + 1)).chain([stream.len()]).collect();
        cuts.sort_unstable();
        for to in cuts {
            let add = |event: Event<'_>| {
                let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
                let name = if event.name.is_empty() { String::new() } else { text(event.name) + "|" };
                events.push(name + &text(event.data));
            };
            parser.push(&stream[from..to], add).unwrap();
            from = to;
        }
        events
    }

    #[test]
    fn events_by_the_standard() {
        for (stream, want) in [
            ("data: a\n\n", &["a"] as &[&str]),
            ("data:a\r\n\r\ndata:  b\r\rdata: c\n\n", &["a", " b", "c"]),
            ("\u{feff}data: a\n\ndata: \u{feff}b\n\n", &["a", "\u{feff}b"]),
            (": note\nevent: x\nid: 7\ndata: a\ndata: b\n\ndata: c\n\n", &["x|a\nb", "c"]),
            ("data\n\ndata:\n\n", &["", ""]),
            ("event: only\n\nretry: 3\n\n\n\n", &[]),
            ("event: only\n\ndata: a\n\n", &["a"]),
            ("data: a\nevent:y\nevent: z\n\nevents: no\nevent\ndata: b\n\n", &["z|a", "b"]),
            ("database: no\n\n data: no\n\ndata: cut", &[]),
            ("data: whole\n\ndata: cut\n", &["whole"]),
        ] {
            assert_eq!(parse(stream.as_bytes(), &[]), want, "{stream:?}");
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        for filler in ["data: x\n", "data: x", ": comment ", "event: x"] {
            let mut parser = Parser::new(64);
            let mut grow = || (0..100).try_for_each(|_| parser.push(filler.as_bytes(), |_| ()));
            assert_eq!(grow(), Err(TooLarge(64)), "{filler:?}");
        }
        let mut parser = Parser::new(16);
        for _ in 0..100 {
            parser.push(b"data: 0123456789\n\n", |event| assert_eq!(event.data, b"0123456789")).unwrap();
        }
    }

    /// What the standard says, on the whole text at once.
    fn whole(stream: &str) -> Vec<String> {
        let text = stream.replace("\r\n", "\n").replace('\r', "\n");
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let (mut events, mut lines, mut name) = (Vec::new(), Vec::<String>::new(), String::new());
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            match line.split_once(':').unwrap_or((line, "")) {
                ("", "") if line.is_empty() => {
                    let (name, lines) = (std::mem::take(&mut name), std::mem::take(&mut lines));
                    let name = if name.is_empty() { name } else { name + "|" };
                    events.extend((!lines.is_empty()).then(|| name + &lines.join("\n")));
                }
                ("event", value) => name = value.strip_prefix(' ').unwrap_or(value).to_owned(),
                ("data", value) => lines.push(value.strip_prefix(' ').unwrap_or(value).to_owned()),
                _ => {}
            }
        }
        events
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_events(
            parts in prop::collection::vec(
                prop::sample::select(vec!["data", "event", ":", " ", "\n", "\r", "\r\n", "\n\n", "x", "é", "\u{feff}", "data: {}\n\n"]),
                0..40,
            ),
            cuts in prop::collection::vec(any::<usize>(), 0..12),
        ) {
            let stream = parts.concat();
            prop_assert_eq!(parse(stream.as_bytes(), &cuts), whole(&stream));
        }
    }
}
