//! A place in a JSON text, and the steps from it: behind a string, a container, a number. Steps over what an
//! outline knows are jumps. What the parts mean is `json.rs`' business.

use std::borrow::Cow;

use super::{DEPTH_MAX, Malformed, Value, outline::Part};

/// Bytes of a string that are looked at eight at a time before a search is set up for the rest: most strings
/// are names.
const NEAR_BYTES: usize = 16;

/// A place in a text.
#[derive(Debug, Clone)]
pub(super) struct Cursor<'a> {
    pub(super) text: &'a str,
    pub(super) at: usize,
    /// Where the text begins in its document.
    pub(super) base: usize,
    /// What of the document's outline is to come.
    pub(super) parts: &'a [Part],
}

impl<'a> Cursor<'a> {
    pub(super) fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    pub(super) fn skip_space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    pub(super) fn field(&mut self) -> Result<(Cow<'a, str>, Value<'a>), Malformed> {
        if self.peek() != Some(b'"') {
            return Err(Malformed);
        }
        let start = self.at;
        let name = if self.skip_string()? {
            self.text.get(start..self.at).and_then(|text| Value::found(text).text_or_marks())
        } else {
            self.text.get(start + 1..self.at - 1).map(Cow::Borrowed)
        };
        self.skip_space();
        if self.peek() != Some(b':') {
            return Err(Malformed);
        }
        self.at += 1;
        Ok((name.ok_or(Malformed)?, self.value()?))
    }

    #[inline]
    pub(super) fn value(&mut self) -> Result<Value<'a>, Malformed> {
        self.skip_space();
        let (start, base) = (self.at, self.base + self.at);
        let (mut parts, mut plain): (&[Part], _) = (&[], false);
        match self.peek() {
            Some(b'"') => plain = !self.skip_string()?,
            Some(b'{' | b'[') => parts = self.skip_container()?,
            _ => self.skip_scalar()?,
        }
        self.text.get(start..self.at).map(|text| Value { text, base, parts, plain }).ok_or(Malformed)
    }

    /// Goes behind the part that begins here, if one does; returns it, and those within it.
    fn skip_part(&mut self) -> Option<(Part, &'a [Part])> {
        let (part, rest) = self.parts.split_first()?;
        if part.start as usize != self.base + self.at {
            return None;
        }
        let within;
        (within, self.parts) = rest.split_at(part.within as usize);
        self.at = part.end as usize - self.base;
        Some((*part, within))
    }

    /// Returns whether it holds escapes.
    fn skip_string(&mut self) -> Result<bool, Malformed> {
        if let Some((part, _)) = self.skip_part() {
            return Ok(part.escaped);
        }
        let (end, escaped) = string_end(self.text.as_bytes(), self.at + 1).ok_or(Malformed)?;
        self.at = end;
        Ok(escaped)
    }

    /// Returns the parts within it.
    fn skip_container(&mut self) -> Result<&'a [Part], Malformed> {
        if let Some((_, within)) = self.skip_part() {
            return Ok(within);
        }
        let mut depth = 0;
        while let Some(byte) = self.peek() {
            match byte {
                b'"' => {
                    self.skip_string()?;
                    continue;
                }
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth -= 1,
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return Ok(&[]);
            }
            if depth > DEPTH_MAX {
                break;
            }
        }
        Err(Malformed)
    }

    fn skip_scalar(&mut self) -> Result<(), Malformed> {
        let start = self.at;
        while let Some(b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'+' | b'-' | b'.') = self.peek() {
            self.at += 1;
        }
        if self.at == start { Err(Malformed) } else { Ok(()) }
    }
}

/// Behind the quote that ends a string which goes on at `at`, and whether escapes stand before it; `None`
/// where it does not end.
#[inline]
pub(super) fn string_end(bytes: &[u8], at: usize) -> Option<(usize, bool)> {
    let mut near = at;
    while near < at + NEAR_BYTES
        && let Some(word) = bytes.get(near..).and_then(|rest| rest.first_chunk())
    {
        let word = u64::from_le_bytes(*word);
        let marks = bytes_equal(word, b'"') | bytes_equal(word, b'\\');
        if marks != 0 {
            near += marks.trailing_zeros() as usize / 8;
            if bytes[near] == b'"' {
                return Some((near + 1, false));
            }
            break;
        }
        near += size_of::<u64>();
    }
    search_string_end(bytes, near)
}

/// [`string_end`], as fast as memory however long the string is.
fn search_string_end(bytes: &[u8], mut at: usize) -> Option<(usize, bool)> {
    let mut escaped = false;
    loop {
        let rest = bytes.get(at..)?;
        let step = memchr::memchr2(b'"', b'\\', rest)?;
        if rest[step] == b'"' {
            return Some((at + step + 1, escaped));
        }
        // What an escape escapes may be a quote or a backslash; both are one byte.
        (at, escaped) = (at + step + 2, true);
    }
}

/// The highest bit of each byte that is `byte`; bytes behind the first such one may have it too (Mycroft,
/// 1987).
fn bytes_equal(word: u64, byte: u8) -> u64 {
    const ONES: u64 = u64::MAX / 255;
    let zeros = word ^ (ONES * u64::from(byte));
    zeros.wrapping_sub(ONES) & !zeros & (ONES << 7)
}
