//! Bodies in chunks (RFC 9112, section 7.1). Line ends are CRLF alone and sizes hexadecimal digits alone, so
//! that no other reader sees other chunks; extensions are passed over.

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};

use super::{Http1Error, body::Part};

/// The longest line that begins a chunk: some servers fill sizes up, and none need extensions.
const MAX_LINE_BYTES: usize = 1 << 10;
/// The most that follows the last chunk.
const MAX_TRAILER_BYTES: usize = 16 << 10;
const MAX_TRAILERS: usize = 32;

/// Where in a chunked body one is.
#[derive(Debug, Default)]
pub(super) enum Chunked {
    /// Before a chunk's size.
    #[default]
    Size,
    /// So many bytes of a chunk are to come, more than none.
    Data(u64),
    /// Behind a chunk's bytes.
    DataEnd,
    Trailers,
    Ended,
}

impl Chunked {
    pub(super) fn has_ended(&self) -> bool {
        matches!(self, Self::Ended)
    }

    /// The next piece of what was read.
    pub(super) fn take(&mut self, read: &mut BytesMut) -> Result<Part, Http1Error> {
        loop {
            match self {
                Self::Size | Self::DataEnd => {
                    if !self.step(read)? {
                        return Ok(Part::More);
                    }
                }
                Self::Data(_) if read.is_empty() => return Ok(Part::More),
                Self::Data(left) => {
                    let now = read.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= now as u64;
                    if *left == 0 {
                        *self = Self::DataEnd;
                    }
                    return Ok(Part::Data(read.split_to(now).freeze()));
                }
                Self::Trailers => {
                    let Some(trailers) = trailers(read)? else { return Ok(Part::More) };
                    *self = Self::Ended;
                    return Ok(if trailers.is_empty() { Part::End } else { Part::Trailers(trailers) });
                }
                Self::Ended => return Ok(Part::End),
            }
        }
    }

    /// Goes on up to the next chunk's bytes, or past the end. What is malformed is found by the next
    /// [`Self::take`].
    pub(super) fn skip(&mut self, read: &mut BytesMut) {
        while matches!(self, Self::Size | Self::DataEnd) && self.step(read).unwrap_or(false) {}
        if matches!(self, Self::Trailers) && read.starts_with(b"\r\n") {
            read.advance(2);
            *self = Self::Ended;
        }
    }

    /// Takes a line between chunks, if it is there.
    fn step(&mut self, read: &mut BytesMut) -> Result<bool, Http1Error> {
        if matches!(self, Self::DataEnd) {
            if read.starts_with(b"\r\n") {
                read.advance(2);
                *self = Self::Size;
                return Ok(true);
            }
            let begun = b"\r\n".starts_with(read);
            return if begun {
                Ok(false)
            } else {
                Err(Http1Error::Malformed("a chunk is longer than it said"))
            };
        }
        let Some(end) = memchr::memchr(b'\n', &read[..read.len().min(MAX_LINE_BYTES)]) else {
            return if read.len() < MAX_LINE_BYTES { Ok(false) } else { Err(BAD_SIZE) };
        };
        let size = size(&read[..end]).ok_or(BAD_SIZE)?;
        read.advance(end + 1);
        *self = if size == 0 { Self::Trailers } else { Self::Data(size) };
        Ok(true)
    }
}

const BAD_SIZE: Http1Error = Http1Error::Malformed("a chunk's size");

/// The size in a line without its LF: `1*HEXDIG`, white space, and extensions behind `;`.
fn size(line: &[u8]) -> Option<u64> {
    let line = line.strip_suffix(b"\r").filter(|line| !line.contains(&b'\r'))?;
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let rest = line[digits..].trim_ascii_start();
    if !(1..=16).contains(&digits) || !(rest.is_empty() || rest.starts_with(b";")) {
        return None;
    }
    line[..digits].iter().try_fold(0, |size: u64, digit| {
        let digit = char::from(*digit).to_digit(16)?;
        Some(size << 4 | u64::from(digit))
    })
}

/// The fields behind the last chunk, with the empty line that ends them, if it is there.
fn trailers(read: &mut BytesMut) -> Result<Option<HeaderMap>, Http1Error> {
    const MALFORMED: Http1Error = Http1Error::Malformed("its trailers");
    let mut room = [httparse::EMPTY_HEADER; MAX_TRAILERS];
    let parsed = httparse::parse_headers(read, &mut room).map_err(|_| MALFORMED)?;
    let httparse::Status::Complete((length, fields)) = parsed else {
        return if read.len() < MAX_TRAILER_BYTES { Ok(None) } else { Err(MALFORMED) };
    };
    // The parser takes a bare LF for a line's end as well.
    if memchr::memchr_iter(b'\n', &read[..length]).any(|at| at == 0 || read[at - 1] != b'\r') {
        return Err(MALFORMED);
    }
    let mut trailers = HeaderMap::with_capacity(fields.len());
    for field in fields {
        let name = HeaderName::from_bytes(field.name.as_bytes());
        let value = HeaderValue::from_maybe_shared(Bytes::copy_from_slice(field.value));
        let (Ok(name), Ok(value)) = (name, value) else { return Err(MALFORMED) };
        trailers.append(name, value);
    }
    read.advance(length);
    Ok(Some(trailers))
}
