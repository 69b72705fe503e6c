//! The fields of a form that routing reads: `multipart/form-data`, as audio and images come, and
//! `application/x-www-form-urlencoded`. A file of any size is passed over by a search for the boundary, and
//! nothing is copied: the libraries for it read streams, part by part. More is taken for a form than engines
//! take; whether it is well made is theirs to say.

use std::{borrow::Cow, ops::Range};

use memchr::memmem::Finder;

use super::{is_in_pairs, is_multipart};

/// The fields that routing reads; a repeated one counts as its last value, as in the engines' own readers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Form {
    /// The value of the field `model`; `None` where there is none.
    pub model: Option<String>,
    /// Whether `stream` is true.
    pub stream: bool,
}

impl Form {
    /// The fields of a body that comes as a form, as its `Content-Type` says; `None`: it comes as something
    /// else.
    pub fn of(kind: Option<&[u8]>, body: &[u8]) -> Option<Self> {
        let kind = kind?;
        if is_multipart(kind) {
            let boundary = parameter(kind, b"boundary").filter(|boundary| !boundary.is_empty())?;
            return Some(Self::from_parts(Multipart::new(body, &boundary)));
        }
        is_in_pairs(kind, body).then(|| Self::urlencoded(body))
    }

    /// The bytes of a form that say its model, and whether they are escaped; `None` where nothing says it, or
    /// the body is no form.
    pub fn place_of_model(kind: Option<&[u8]>, body: &[u8]) -> Option<(Range<usize>, bool)> {
        let kind = kind?;
        let place = |value: &[u8]| {
            let start = value.as_ptr() as usize - body.as_ptr() as usize;
            start..start + value.len()
        };
        if is_multipart(kind) {
            let boundary = parameter(kind, b"boundary").filter(|boundary| !boundary.is_empty())?;
            let models = Multipart::new(body, &boundary).filter(|(name, _)| **name == *b"model");
            return models.last().map(|(_, value)| (place(value), false));
        }
        let mut pairs = body.split(|byte| *byte == b'&').rev().filter(|_| is_in_pairs(kind, body));
        pairs.find_map(|pair| {
            let (name, value) = pair.split_at_checked(memchr::memchr(b'=', pair)? + 1)?;
            let is_model = form_urlencoded::parse(name).next().is_some_and(|(name, _)| name == "model");
            is_model.then(|| (place(value), true))
        })
    }

    fn from_parts(parts: Multipart<'_>) -> Self {
        let mut form = Self::default();
        for (name, value) in parts {
            form.take(&name, std::str::from_utf8(value).map(Cow::Borrowed).unwrap_or_default());
        }
        form
    }

    fn urlencoded(body: &[u8]) -> Self {
        let mut form = Self::default();
        for (name, value) in form_urlencoded::parse(body) {
            form.take(name.as_bytes(), value);
        }
        form
    }

    fn take(&mut self, name: &[u8], value: Cow<'_, str>) {
        match name {
            b"model" => self.model = Some(value.into_owned()),
            // What pydantic takes for true.
            b"stream" => {
                let value = value.to_ascii_lowercase();
                self.stream = matches!(value.as_str(), "true" | "1" | "on" | "yes" | "y" | "t");
            }
            _ => {}
        }
    }
}

/// The parts of a body that are no files: each one's name and value.
#[derive(Debug)]
pub struct Multipart<'a> {
    body: &'a [u8],
    delimiter: Finder<'static>,
    /// Where the next part begins; `None`: there is none.
    next: Option<usize>,
}

impl<'a> Multipart<'a> {
    /// The parts between lines of this boundary.
    pub fn new(body: &'a [u8], boundary: &[u8]) -> Self {
        let delimiter = Finder::new(&[b"--", boundary].concat()).into_owned();
        let mut parts = Self { body, delimiter, next: None };
        parts.next = parts.delimiter_from(0).and_then(|(_, begin)| begin);
        parts
    }

    /// Where the next line that is the boundary's begins, and the part behind it; no part behind the last
    /// one.
    fn delimiter_from(&self, from: usize) -> Option<(usize, Option<usize>)> {
        let mut from = from;
        loop {
            let at = from + self.delimiter.find(&self.body[from..])?;
            let after = at + self.delimiter.needle().len();
            if at == 0 || self.body[at - 1] == b'\n' {
                let rest = &self.body[after..];
                if rest.starts_with(b"--") {
                    return Some((at, None));
                }
                // A sender may pad the line; a longer line is another's.
                let blanks = rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
                match &rest[blanks..] {
                    [b'\r', b'\n', ..] => return Some((at, Some(after + blanks + 2))),
                    [b'\n', ..] => return Some((at, Some(after + blanks + 1))),
                    _ => {}
                }
            }
            from = at + 1;
        }
    }
}

impl<'a> Iterator for Multipart<'a> {
    type Item = (Cow<'a, [u8]>, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(begin) = self.next {
            // A body that ends within a part has lost the rest of it.
            let (end, next) = self.delimiter_from(begin)?;
            self.next = next;
            if let Some(part) = field(&self.body[begin..end]) {
                return Some(part);
            }
        }
        None
    }
}

/// The name and the value of a part, with the line's end behind it; `None` for a file, and for what has no
/// name.
fn field(part: &[u8]) -> Option<(Cow<'_, [u8]>, &[u8])> {
    let mut rest = part;
    let mut name = None;
    loop {
        let end = memchr::memchr(b'\n', rest)?;
        let line = rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]);
        rest = &rest[end + 1..];
        if line.is_empty() {
            break;
        }
        if let Some(disposition) = header(line, b"content-disposition") {
            if parameter(disposition, b"filename").or(parameter(disposition, b"filename*")).is_some() {
                return None;
            }
            name = parameter(disposition, b"name");
        }
    }
    let value = rest.strip_suffix(b"\n").unwrap_or(rest);
    Some((name?, value.strip_suffix(b"\r").unwrap_or(value)))
}

fn header<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (given, value) = line.split_at_checked(name.len())?;
    let value = value.trim_ascii_start().strip_prefix(b":")?;
    given.eq_ignore_ascii_case(name).then_some(value)
}

/// A parameter of a header's value: `; name=token` or `; name="text"`, in which a backslash stands before a
/// quote or another one.
fn parameter<'a>(value: &'a [u8], name: &[u8]) -> Option<Cow<'a, [u8]>> {
    let mut rest = value;
    loop {
        rest = &rest[memchr::memchr(b';', rest)? + 1..];
        let equals = rest.iter().position(|byte| matches!(byte, b'=' | b';'))?;
        let given = rest[..equals].trim_ascii();
        if rest[equals] == b';' {
            rest = &rest[equals..];
            continue;
        }
        let (text, after) = text(rest[equals + 1..].trim_ascii_start());
        if given.eq_ignore_ascii_case(name) {
            return Some(text);
        }
        rest = after;
    }
}

/// A token or a quoted text, and what follows it.
fn text(rest: &[u8]) -> (Cow<'_, [u8]>, &[u8]) {
    let Some(quoted) = rest.strip_prefix(b"\"") else {
        let end = memchr::memchr(b';', rest).unwrap_or(rest.len());
        return (rest[..end].trim_ascii_end().into(), &rest[end..]);
    };
    let mut text = Vec::new();
    let mut at = 0;
    while let Some(step) = memchr::memchr2(b'"', b'\\', &quoted[at..]) {
        match (quoted[at + step], quoted.get(at + step + 1)) {
            (b'\\', Some(escaped @ (b'"' | b'\\'))) => {
                text.extend_from_slice(&quoted[at..at + step]);
                text.push(*escaped);
                at += step + 2;
            }
            // A path of an old browser.
            (b'\\', _) => {
                text.extend_from_slice(&quoted[at..=at + step]);
                at += step + 1;
            }
            _ if text.is_empty() => return (quoted[..at + step].into(), &quoted[at + step + 1..]),
            _ => {
                text.extend_from_slice(&quoted[at..at + step]);
                return (text.into(), &quoted[at + step + 1..]);
            }
        }
    }
    text.extend_from_slice(&quoted[at..]);
    (text.into(), &[])
}

#[cfg(test)]
mod tests;
