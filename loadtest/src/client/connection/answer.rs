//! Reads answers of HTTP/1.1: the head, and where the body ends, in whatever pieces they arrive. Knows no
//! socket.
//!
//! Format: RFC 9112, 6 and 7. As strict as hyper, beside which it is tested.

use std::mem::MaybeUninit;

use httparse::{Header, ParserConfig, Response, Status};
use keyway_wire::headers;

use crate::limits::ANSWER_HEADERS_MAX;

/// What is read of an answer's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// HTTP status, three digits.
    pub status: u16,
    /// `content-type` as it was sent; empty without one.
    pub kind: Vec<u8>,
    /// Who answered, where a gateway says so.
    pub worker: Option<String>,
}

/// Bytes that are no answer of HTTP/1.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The head is none.
    #[error("the answer's head is not HTTP/1.1: {0}")]
    Head(#[from] httparse::Error),
    /// Its lengths contradict each other, or are none.
    #[error("the answer's head tells no length that can be")]
    Length,
    /// The chunks are none.
    #[error("the answer's chunks are not those of HTTP/1.1")]
    Chunk,
}

/// What is still to come of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Body {
    rest: Rest,
    /// Whether another request may follow on the connection once it is over.
    keeps: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    Nothing,
    Bytes(u64),
    Chunks(Part),
    /// It ends with the connection.
    Everything,
}

/// A place in a chunked body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Digits of a chunk's size; `None` before the first.
    Size(Option<u64>),
    /// White space behind them.
    Space(u64),
    /// An extension, which says nothing here.
    Extension(u64),
    /// The size's line ends.
    SizeEnd(u64),
    Data(u64),
    DataCr,
    DataLf,
    /// The beginning of a line behind the last chunk: an empty one is the body's last.
    Last,
    Trailer,
    TrailerLf,
    LastLf,
}

// === impl Head ===

/// The head at the beginning of `bytes` with its length and the body that follows; `None` if there is more of
/// it to come.
pub(super) fn read_head(bytes: &[u8]) -> Result<Option<(usize, Head, Body)>, Malformed> {
    let mut space = [const { MaybeUninit::<Header<'_>>::uninit() }; ANSWER_HEADERS_MAX];
    let mut response = Response::new(&mut []);
    let config = ParserConfig::default();
    let length = match config.parse_response_with_uninit_headers(&mut response, bytes, &mut space)? {
        Status::Complete(length) => length,
        Status::Partial => return Ok(None),
    };
    let mut head = Head { status: response.code.unwrap_or_default(), kind: Vec::new(), worker: None };
    let is_1_1 = response.version == Some(1);
    // Of the length: `Some(None)` if it is none, or two that differ.
    let (mut keeps, mut chunked, mut bytes) = (is_1_1, None, None);
    for header in &*response.headers {
        let is = |name: &str| header.name.eq_ignore_ascii_case(name);
        // By their lengths first: most headers are none of these.
        match header.name.len() {
            10 if is("connection") => {
                let says = |word: &[u8]| tokens(header.value).any(|token| token.eq_ignore_ascii_case(word));
                keeps = if is_1_1 { keeps && !says(b"close") } else { says(b"keep-alive") };
            }
            12 if is("content-type") => header.value.clone_into(&mut head.kind),
            14 if is("content-length") => {
                for told in tokens(header.value).map(length_in) {
                    bytes = Some(told.filter(|_| bytes.is_none_or(|before| before == told)));
                }
            }
            17 if is("transfer-encoding") => {
                let last = tokens(header.value).last().unwrap_or_default();
                chunked = Some(last.eq_ignore_ascii_case(b"chunked"));
            }
            _ if is(headers::WORKER) => {
                head.worker = std::str::from_utf8(header.value).ok().map(str::to_owned);
            }
            _ => {}
        }
    }
    // Nobody asked for another protocol.
    keeps &= head.status != 101;
    let rest = match (head.status, chunked, bytes) {
        (100..=199 | 204 | 304, ..) | (_, None, Some(Some(0))) => Rest::Nothing,
        (_, Some(_), _) if !is_1_1 => return Err(Malformed::Length),
        (_, Some(true), _) => Rest::Chunks(Part::Size(None)),
        (_, Some(false), _) | (_, None, None) => Rest::Everything,
        (_, None, Some(None)) => return Err(Malformed::Length),
        (_, None, Some(Some(bytes))) => Rest::Bytes(bytes),
    };
    Ok(Some((length, head, Body { rest, keeps })))
}

/// The parts of a list with commas.
fn tokens(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|&byte| byte == b',').map(<[u8]>::trim_ascii)
}

/// A length as `content-length` writes it: digits alone.
fn length_in(digits: &[u8]) -> Option<u64> {
    let digit = |&digit: &u8| digit.is_ascii_digit().then(|| u64::from(digit - b'0'));
    let add = |sum: u64, byte| sum.checked_mul(10)?.checked_add(digit(byte)?);
    if digits.is_empty() { None } else { digits.iter().try_fold(0, add) }
}

// === impl Body ===

impl Body {
    /// Whether there is nothing more of it.
    pub(super) fn is_over(&self) -> bool {
        self.rest == Rest::Nothing
    }

    /// Whether it may end with the connection.
    pub(super) fn ends_with_connection(&self) -> bool {
        matches!(self.rest, Rest::Nothing | Rest::Everything)
    }

    /// Whether another request may follow on the connection.
    pub(super) fn keeps_connection(&self) -> bool {
        self.keeps && self.is_over()
    }

    /// Takes what belongs to the body off the front of `bytes`, and hands what it carries to `piece`. What it
    /// leaves comes behind the body.
    pub(super) fn take(&mut self, bytes: &mut &[u8], mut piece: impl FnMut(&[u8])) -> Result<(), Malformed> {
        while !bytes.is_empty() {
            match &mut self.rest {
                Rest::Nothing => break,
                Rest::Everything => piece(std::mem::take(bytes)),
                Rest::Bytes(left) => {
                    piece(split(bytes, left));
                    if *left == 0 {
                        self.rest = Rest::Nothing;
                    }
                }
                Rest::Chunks(Part::Data(left)) => {
                    piece(split(bytes, left));
                    if *left == 0 {
                        self.rest = Rest::Chunks(Part::DataCr);
                    }
                }
                Rest::Chunks(part) => {
                    let next = part.after(bytes[0]).ok_or(Malformed::Chunk)?;
                    *bytes = &bytes[1..];
                    self.rest = next;
                }
            }
        }
        Ok(())
    }
}

/// Takes up to `left` bytes off the front of `bytes`.
fn split<'a>(bytes: &mut &'a [u8], left: &mut u64) -> &'a [u8] {
    let most = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
    let (taken, rest) = bytes.split_at(most);
    *bytes = rest;
    *left -= taken.len() as u64;
    taken
}

// === impl Part ===

impl Part {
    /// What comes behind `byte`; `None` if it cannot be here.
    fn after(self, byte: u8) -> Option<Rest> {
        let part = match (self, byte) {
            (Self::Size(size), b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                let digit = char::from(byte).to_digit(16).map(u64::from)?;
                Self::Size(Some(size.unwrap_or(0).checked_mul(16)?.checked_add(digit)?))
            }
            (Self::Size(Some(size)) | Self::Space(size), b' ' | b'\t') => Self::Space(size),
            (Self::Size(Some(size)) | Self::Space(size), b';') => Self::Extension(size),
            (Self::Size(Some(size)) | Self::Space(size) | Self::Extension(size), b'\r') => {
                Self::SizeEnd(size)
            }
            (Self::Extension(size), _) if byte != b'\n' => Self::Extension(size),
            (Self::SizeEnd(0) | Self::TrailerLf, b'\n') => Self::Last,
            (Self::SizeEnd(size), b'\n') => Self::Data(size),
            (Self::DataCr, b'\r') => Self::DataLf,
            (Self::DataLf, b'\n') => Self::Size(None),
            (Self::Last, b'\r') => Self::LastLf,
            (Self::LastLf, b'\n') => return Some(Rest::Nothing),
            (Self::Trailer, b'\r') => Self::TrailerLf,
            (Self::Last | Self::Trailer, _) => Self::Trailer,
            _ => return None,
        };
        Some(Rest::Chunks(part))
    }
}

#[cfg(test)]
mod tests;
