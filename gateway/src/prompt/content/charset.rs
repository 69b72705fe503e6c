//! JSON in UTF-16 or UTF-32, with a byte order mark or without, and with surrogates that have no partner:
//! Python's `json.loads` takes all of these, and with it vLLM and SGLang. Told apart as there, by the first
//! bytes.

use std::fmt::Write;

use bytes::Bytes;

use crate::error::Error;

/// How a text is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Charset {
    Utf8,
    Utf16 { big: bool },
    Utf32 { big: bool },
}

/// A text in UTF-8 without a byte order mark: the very body, if it is to be that, which who reads it will
/// see; what is not is [`mended`]. A surrogate without a partner becomes its escape, which in JSON is the
/// same. `None` for what is no text; an error for a text that is longer than the limit in UTF-8.
pub fn utf8(body: &Bytes, limit_bytes: usize) -> Result<Option<Bytes>, Error> {
    let (charset, mark) = charset_of(body);
    let rest = &body[mark..];
    let text = match charset {
        Charset::Utf8 => return Ok(Some(body.slice(mark..))),
        Charset::Utf16 { big } => from_utf16(rest, big),
        Charset::Utf32 { big } => from_utf32(rest, big),
    };
    bounded(text, limit_bytes)
}

/// What is almost UTF-8, as UTF-8: it has surrogates that are encoded as if they were characters. `None` for
/// what is UTF-8 already, and for what is no text.
pub fn mended(text: &[u8], limit_bytes: usize) -> Result<Option<Bytes>, Error> {
    if simdutf8::basic::from_utf8(text).is_ok() {
        return Ok(None);
    }
    bounded(from_utf8(text), limit_bytes)
}

fn bounded(text: Option<String>, limit_bytes: usize) -> Result<Option<Bytes>, Error> {
    match text {
        Some(text) if text.len() > limit_bytes => Err(Error::BodyTooLarge { limit_bytes }),
        text => Ok(text.map(Bytes::from)),
    }
}

/// The encoding, and the bytes of its mark. A JSON text begins with two characters of ASCII, if it has two.
fn charset_of(body: &[u8]) -> (Charset, usize) {
    match body {
        [0, 0, 0xfe, 0xff, ..] => (Charset::Utf32 { big: true }, 4),
        [0xff, 0xfe, 0, 0, ..] => (Charset::Utf32 { big: false }, 4),
        [0xfe, 0xff, ..] => (Charset::Utf16 { big: true }, 2),
        [0xff, 0xfe, ..] => (Charset::Utf16 { big: false }, 2),
        [0xef, 0xbb, 0xbf, ..] => (Charset::Utf8, 3),
        [0, 0, _, _, ..] => (Charset::Utf32 { big: true }, 0),
        [0, _, _, _, ..] | [0, _] => (Charset::Utf16 { big: true }, 0),
        [_, 0, 0, 0, ..] => (Charset::Utf32 { big: false }, 0),
        [_, 0, _, _, ..] | [_, 0] => (Charset::Utf16 { big: false }, 0),
        _ => (Charset::Utf8, 0),
    }
}

/// UTF-8 in which surrogates are encoded as if they were characters.
fn from_utf8(mut bytes: &[u8]) -> Option<String> {
    let mut text = String::with_capacity(bytes.len());
    loop {
        let error = match std::str::from_utf8(bytes) {
            Ok(rest) => {
                text.push_str(rest);
                return Some(text);
            }
            Err(error) => error,
        };
        let (valid, rest) = bytes.split_at(error.valid_up_to());
        text.push_str(std::str::from_utf8(valid).ok()?);
        let [0xed, second @ 0xa0..=0xbf, third @ 0x80..=0xbf, after @ ..] = rest else { return None };
        escape(&mut text, 0xd000 | u32::from(second & 0x3f) << 6 | u32::from(third & 0x3f));
        bytes = after;
    }
}

fn from_utf16(bytes: &[u8], big: bool) -> Option<String> {
    let (units, rest) = bytes.as_chunks::<2>();
    let unit = |unit: &[u8; 2]| if big { u16::from_be_bytes(*unit) } else { u16::from_le_bytes(*unit) };
    let mut text = String::with_capacity(bytes.len());
    for char in char::decode_utf16(units.iter().map(unit)) {
        match char {
            Ok(char) => text.push(char),
            Err(alone) => escape(&mut text, alone.unpaired_surrogate().into()),
        }
    }
    rest.is_empty().then_some(text)
}

fn from_utf32(bytes: &[u8], big: bool) -> Option<String> {
    let (units, rest) = bytes.as_chunks::<4>();
    let mut text = String::with_capacity(bytes.len() / 2);
    for unit in units {
        let unit = if big { u32::from_be_bytes(*unit) } else { u32::from_le_bytes(*unit) };
        match char::from_u32(unit) {
            Some(char) => text.push(char),
            None if (0xd800..0xe000).contains(&unit) => escape(&mut text, unit),
            None => return None,
        }
    }
    rest.is_empty().then_some(text)
}

fn escape(text: &mut String, surrogate: u32) {
    // To write into memory does not fail.
    let _ = write!(text, "\\u{surrogate:04x}");
}
