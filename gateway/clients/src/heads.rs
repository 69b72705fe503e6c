//! Follows a client's requests over HTTP/1.1 in the bytes of its connection, to find those whose head has
//! several lengths, or one beside a transfer coding: of these hyper says nothing, it drops a length unread.
//! Other readers may frame them in another way (RFC 9112, section 6.3), so they are spoiled before hyper sees
//! them, which answers them with 400 and closes.
//!
//! Nothing else is decided by what is found here. Bytes that cannot be followed hyper refuses itself.

use memchr::memchr_iter;

/// Bytes that are kept of a line that comes in pieces: its name, and a length.
const LINE_BYTES: usize = 32;

/// Where the bytes of one HTTP/1.1 connection stand among its requests, and what the head at hand says so
/// far.
#[derive(Debug)]
pub(crate) struct Heads {
    at: At,
    /// Whether the head at hand says a length, and a transfer coding.
    says: (bool, bool),
    length: u64,
    line: [u8; LINE_BYTES],
    /// Bytes of the line that have come before, those included that were not kept.
    came: usize,
}

/// Where in a request one is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// Before its first line, where empty ones may stand.
    Before,
    Head,
    /// So many bytes of a body or a chunk are to come, behind which there is this.
    Data(u64, After),
    /// In the line that begins a chunk: its size so far, and whether the line may say more of it.
    Size(u64, bool),
    /// Behind the last chunk: whether the line at hand has anything in it, and ends with CR so far.
    Trailers(bool, bool),
    /// What cannot be followed.
    Lost,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Request,
    Chunk,
}

impl Heads {
    pub(crate) fn new() -> Self {
        Self { at: At::Before, says: (false, false), length: 0, line: [0; LINE_BYTES], came: 0 }
    }

    /// Sees the bytes that came, and spoils the head that may be framed in two ways.
    pub(crate) fn see(&mut self, bytes: &mut [u8]) {
        let mut from = 0;
        while from < bytes.len() {
            from += match self.at {
                At::Before | At::Head => self.lines(&mut bytes[from..]),
                At::Data(left, after) => {
                    let now = left.min((bytes.len() - from) as u64);
                    self.at = match (left - now, after) {
                        (0, After::Request) => At::Before,
                        (0, After::Chunk) => At::Size(0, true),
                        (left, _) => At::Data(left, after),
                    };
                    now as usize
                }
                At::Size(size, open) => {
                    self.at = in_size(size, open, bytes[from]);
                    1
                }
                At::Trailers(filled, cr) => {
                    self.at = in_trailers(filled, cr, bytes[from]);
                    1
                }
                At::Lost => return,
            };
        }
    }

    /// Reads the lines of a head up to its end, and how many bytes that was.
    fn lines(&mut self, bytes: &mut [u8]) -> usize {
        match self.read_lines(bytes) {
            Ok(read) => read,
            Err((line, read)) => {
                // No name and no value has this. The line ends as it did: for the end of the head hyper waits
                // before it refuses one.
                bytes[line] = 0;
                self.at = At::Lost;
                read
            }
        }
    }

    /// [`Heads::lines`]; an error where the line that begins there must not be.
    fn read_lines(&mut self, bytes: &[u8]) -> Result<usize, (usize, usize)> {
        let mut from = 0;
        for end in memchr_iter(b'\n', bytes) {
            let may = if self.came == 0 {
                self.read(&bytes[from..end])
            } else {
                self.keep(&bytes[from..end]);
                let (line, came) = (self.line, std::mem::take(&mut self.came));
                // A length that is longer than any is none that could be followed.
                self.read(&line[..came.min(LINE_BYTES)]) && (came <= LINE_BYTES || !is_length(&line))
            };
            if !may {
                return Err((from, end + 1));
            }
            from = end + 1;
            if !matches!(self.at, At::Before | At::Head) {
                return Ok(from);
            }
        }
        self.keep(&bytes[from..]);
        Ok(bytes.len())
    }

    fn keep(&mut self, bytes: &[u8]) {
        let room = &mut self.line[self.came.min(LINE_BYTES)..];
        let kept = room.len().min(bytes.len());
        room[..kept].copy_from_slice(&bytes[..kept]);
        self.came = self.came.saturating_add(bytes.len());
    }

    /// Reads a line without its LF; whether its head may go on.
    fn read(&mut self, line: &[u8]) -> bool {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            if self.at == At::Head {
                self.at = self.behind_head();
                self.says = (false, false);
            }
            return true;
        }
        self.at = At::Head;
        // Few names begin so.
        match line[0] {
            b'c' | b'C' if is_length(line) => {
                if std::mem::replace(&mut self.says.0, true) {
                    return false;
                }
                self.length = digits(&line[LENGTH.len()..]);
            }
            b't' | b'T' if is_named(line, CODING) => self.says.1 = true,
            _ => {}
        }
        self.says != (true, true)
    }

    fn behind_head(&self) -> At {
        match self.says {
            (_, true) => At::Size(0, true),
            (true, _) if self.length > 0 => At::Data(self.length, After::Request),
            _ => At::Before,
        }
    }
}

const LENGTH: &[u8; 15] = b"content-length:";
const CODING: &[u8; 18] = b"transfer-encoding:";

/// Whether a line begins with this name, in letters of any case: their bit is set in both, eight bytes at a
/// time. It may take a control character for a mark, of which hyper takes neither.
fn is_named<const BYTES: usize>(line: &[u8], name: &[u8; BYTES]) -> bool {
    const LOWER: u64 = u64::from_ne_bytes([0x20; 8]);
    let word = |bytes: &[u8; BYTES], at: usize| {
        bytes[at..].first_chunk::<8>().map(|word| u64::from_ne_bytes(*word) | LOWER)
    };
    // The last eight overlap those before.
    let is_same = |line, at| word(line, at) == word(name, at);
    let all = |line| {
        is_same(line, 0) && (8..BYTES - 8).step_by(8).all(|at| is_same(line, at)) && is_same(line, BYTES - 8)
    };
    line.first_chunk::<BYTES>().is_some_and(all)
}

fn is_length(line: &[u8]) -> bool {
    is_named(line, LENGTH)
}

/// A length; of what is none, hyper says so.
fn digits(value: &[u8]) -> u64 {
    let digit = |value: u64, byte: &u8| {
        let digit = char::from(*byte).to_digit(10)?;
        value.checked_mul(10)?.checked_add(digit.into())
    };
    value.trim_ascii().iter().try_fold(0, digit).unwrap_or(0)
}

/// What one byte of the line that begins a chunk makes of its size.
fn in_size(size: u64, open: bool, byte: u8) -> At {
    match (byte, char::from(byte).to_digit(16)) {
        (b'\n', _) if size == 0 => At::Trailers(false, false),
        // With the line end behind it.
        (b'\n', _) => At::Data(size.saturating_add(2), After::Chunk),
        (_, Some(digit)) if open => {
            size.checked_mul(16).map_or(At::Lost, |size| At::Size(size | u64::from(digit), true))
        }
        _ => At::Size(size, false),
    }
}

/// What one byte behind the last chunk means: hyper has lines end by CRLF alone there.
fn in_trailers(filled: bool, cr: bool, byte: u8) -> At {
    match (byte, cr) {
        (b'\n', true) if filled => At::Trailers(false, false),
        (b'\n', true) => At::Before,
        (b'\r', _) => At::Trailers(filled || cr, true),
        _ => At::Trailers(true, false),
    }
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, sample::Index};

    use super::*;

    /// What is left of these bytes, which come in pieces that end at these places.
    fn seen(bytes: &[u8], cuts: &[Index]) -> Vec<u8> {
        let mut at: Vec<_> =
            cuts.iter().map(|cut| cut.index(bytes.len() + 1)).chain([0, bytes.len()]).collect();
        at.sort_unstable();
        let (mut heads, mut left) = (Heads::new(), bytes.to_vec());
        for pair in at.windows(2) {
            heads.see(&mut left[pair[0]..pair[1]]);
        }
        left
    }

    fn clear() -> impl Strategy<Value = Vec<u8>> {
        let body = || prop::collection::vec(prop_oneof![any::<u8>(), Just(b'\n'), Just(b'\r')], 0..60);
        let named = |name: &'static str| prop::sample::select(vec![name.to_owned(), name.to_uppercase()]);
        let with_length = (named("content-length"), body(), prop::sample::select(vec!["", " ", "\t "]))
            .prop_map(|(name, body, blank)| {
                [
                    format!("POST /a HTTP/1.1\r\nHost: k\r\n{name}:{blank}{}\r\nx: y\r\n\r\n", body.len())
                        .as_bytes(),
                    &body,
                ]
                .concat()
            });
        let chunked = (
            named("transfer-encoding"),
            prop::collection::vec(body(), 0..4),
            prop::sample::select(vec!["", ";a=b", " ;c"]),
            prop::sample::select(vec![
                "",
                "x: y\r\n",
                "content-length: 5\r\ntransfer-encoding: chunked\r\n",
                "a: \rb\r\n",
            ]),
        )
            .prop_map(|(name, chunks, extension, trailers)| {
                let mut bytes = format!("POST /b HTTP/1.1\r\n{name}: chunked\r\n\r\n").into_bytes();
                for chunk in chunks.iter().filter(|chunk| !chunk.is_empty()) {
                    bytes.extend_from_slice(format!("{:x}{extension}\r\n", chunk.len()).as_bytes());
                    bytes.extend_from_slice(chunk);
                    bytes.extend_from_slice(b"\r\n");
                }
                bytes.extend_from_slice(format!("0{extension}\r\n{trailers}\r\n").as_bytes());
                bytes
            });
        let without = prop::sample::select(vec![
            "GET /c HTTP/1.1\r\nHost: k\r\n\r\n",
            "\r\n\n\r\nGET /c HTTP/1.1\r\nx-content-length: 3\r\nx: transfer-encoding: chunked\r\n\r\n",
            "GET /c HTTP/1.1\nhost: k\ncontent-length: 0\n\n",
            "GET /c HTTP/1.1\r\nx: content-length: 3\r\ncontent_length: 4\r\n\r\n",
        ]);
        prop_oneof![with_length, chunked, without.prop_map(|text| text.as_bytes().to_vec())]
    }

    proptest! {
        /// However many requests and in whatever pieces, what is clear stays as it is, and what is not is
        /// spoiled where it is.
        #[test]
        fn what_frames_a_body_twice_is_spoiled_and_nothing_else(
            before in prop::collection::vec(clear(), 0..5),
            between in prop::sample::select(vec!["", "x: y\r\n", "cookie: a\r\nte: trailers\r\n"]),
            coding in prop::sample::select(vec!["transfer-encoding: chunked", "Transfer-Encoding:chunked", "TRANSFER-ENCODING: x", "transfer-encoding:"]),
            length in prop::sample::select(vec!["content-length: 5", "Content-Length:5", "CONTENT-LENGTH: x", "content-length:", "content-length: 0"]),
            pair in 0..3,
            end in prop::sample::select(vec!["\r\n", "\n"]),
            cuts in prop::collection::vec(any::<Index>(), 0..30),
        ) {
            let before = before.concat();
            prop_assert_eq!(&seen(&before, &cuts), &before);
            let (first, second) = match pair {
                0 => (length, coding),
                1 => (coding, length),
                _ => (length, "content-length: 5"),
            };
            let begun = format!("POST /v1/x HTTP/1.1\r\n{first}{end}{between}{second}{}", &end[..end.len() - 1]);
            let bytes = [&before[..], begun.as_bytes(), b"\n\r\n0\r\n\r\n"].concat();
            let left = seen(&bytes, &cuts);
            let changed: Vec<usize> = (0..bytes.len()).filter(|at| left[*at] != bytes[*at]).collect();
            let line_end = before.len() + begun.len();
            let line = line_end + 1 - second.len() - end.len()..=line_end;
            prop_assert!(matches!(changed[..], [at] if line.contains(&at) && left[at] == 0), "{changed:?} of {bytes:?}");
            let is_whole = cuts.iter().all(|cut| !line.contains(&cut.index(bytes.len() + 1)));
            prop_assert!(!is_whole || changed[0] == *line.start(), "the head would have no end");
        }

        #[test]
        fn no_bytes_whatever_are_too_much(bytes in prop::collection::vec(any::<u8>(), 0..200), cuts in prop::collection::vec(any::<Index>(), 0..8)) {
            let left = seen(&bytes, &cuts);
            prop_assert_eq!(left.len(), bytes.len());
        }
    }

    #[test]
    fn a_length_that_comes_in_pieces_and_is_longer_than_any_is_spoiled() {
        let long = format!("POST / HTTP/1.1\r\ncontent-length: {}5\r\n\r\nhello", "0".repeat(60));
        let (mut heads, mut bytes) = (Heads::new(), long.into_bytes());
        let (first, second) = bytes.split_at_mut(40);
        heads.see(first);
        heads.see(second);
        assert!(bytes.contains(&0));
    }

    #[test]
    fn a_connection_s_place_is_small() {
        assert!(size_of::<Heads>() <= 88, "{}", size_of::<Heads>());
    }
}
