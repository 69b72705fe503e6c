//! Objects and lists of a JSON text as their parts, unread: finds where values begin and end, at the speed of
//! `memchr` and without a copy or `unsafe`. Reads no number and no nested value, and does not judge what it
//! skips: of a text that `serde_json` takes it says the same (a property test holds them together); of
//! others, something or [`Malformed`].

mod cursor;
mod outline;

use std::{borrow::Cow, fmt};

use memchr::memmem::Finder;
use serde::{Deserialize, Deserializer, de::Visitor};

pub use self::outline::Outline;
use self::{cursor::Cursor, outline::Part};

/// Nesting that is followed, as deep as `serde_json`'s own limit.
const DEPTH_MAX: u32 = 128;

/// The text is not JSON, or nested too deeply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// One value, as it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value<'a> {
    text: &'a str,
    /// Where it begins in its document, and what of the document's outline is within it.
    base: usize,
    parts: &'a [Part],
    /// Whether it is known to be a string without escapes.
    plain: bool,
}

impl<'a> Value<'a> {
    /// The fields of a document that is an object: as [`Value::fields`], and what follows it must be white
    /// space. A caller that wants what is nested in it too makes an [`Outline`].
    pub fn document(text: &'a str) -> Option<Fields<'a>> {
        Fields::of_document(text, &[])
    }

    /// What `read` makes of the fields of an object that is the field of this name of a document that is an
    /// object, looked for from the end, as a document's last fields are mostly the shortest. What stands
    /// before it is not looked at. `None` also where the last field of the name is not the document's own but
    /// of something within it.
    pub fn last_object_of_document<T>(
        text: &'a str,
        quoted_name: &Finder<'_>,
        read: impl FnOnce(&mut Fields<'a>) -> Option<T>,
    ) -> Option<T> {
        let at = last_name(text.as_bytes(), quoted_name)?;
        let mut cursor = Cursor { text, at: at + quoted_name.needle().len(), base: 0, parts: &[] };
        cursor.skip_space();
        if cursor.peek() != Some(b':') {
            return None;
        }
        cursor.at += 1;
        cursor.skip_space();
        if cursor.peek() != Some(b'{') {
            return None;
        }
        cursor.at += 1;
        let fields = |cursor, place, whole| Fields(Parts { cursor, began: 0, place, end: b'}', whole });
        let mut within = fields(cursor, Place::Begin, false);
        let value = read(&mut within)?;
        if !within.by_ref().all(|field| field.is_ok()) {
            return None;
        }
        fields(within.0.cursor, Place::Within, true).all(|field| field.is_ok()).then_some(value)
    }

    /// A value that was found before, by its text.
    pub fn found(text: &'a str) -> Self {
        Self { text, base: 0, parts: &[], plain: false }
    }

    /// As it is written.
    pub fn raw(self) -> &'a str {
        self.text
    }

    /// A string's text, borrowed unless it holds escapes; `None` for other values, and for escapes that are
    /// no text.
    pub fn text(self) -> Option<Cow<'a, str>> {
        #[derive(Deserialize)]
        struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
        let inner = self.text.strip_prefix('"')?.strip_suffix('"')?;
        if self.plain || memchr::memchr(b'\\', inner.as_bytes()).is_none() {
            return Some(Cow::Borrowed(inner));
        }
        serde_json::from_str::<Text<'_>>(self.text).ok().map(|text| text.0)
    }

    /// As [`Value::text`]; where that holds surrogates without their partners, which Python takes, marks
    /// stand for them.
    pub fn text_or_marks(self) -> Option<Cow<'a, str>> {
        self.text().or_else(|| {
            if !self.text.starts_with('"') {
                return None;
            }
            serde_json::from_str::<Marked>(self.text).ok().map(|marked| Cow::Owned(marked.0))
        })
    }

    /// An object's fields in order, repeated ones too; `None` for other values.
    pub fn fields(self) -> Option<Fields<'a>> {
        self.text.starts_with('{').then(|| Fields(Parts::of(self, b'}')))
    }

    /// A list's items; `None` for other values.
    pub fn items(self) -> Option<Items<'a>> {
        self.text.starts_with('[').then(|| Items(Parts::of(self, b']')))
    }
}

/// Bytes at a document's end in which a name among its last fields mostly stands.
const TAIL_BYTES: usize = 256;

/// Where a name in its quotes stands last.
fn last_name(text: &[u8], quoted_name: &Finder<'_>) -> Option<usize> {
    let tail = text.len().saturating_sub(TAIL_BYTES);
    if let Some(at) = quoted_name.find_iter(&text[tail..]).last() {
        return Some(tail + at);
    }
    let mut quotes = memchr::memrchr_iter(b'"', text);
    quotes.find(|&at| text[at..].starts_with(quoted_name.needle()))
}

/// A string with marks (U+FFFD) for what of it is no text.
struct Marked(String);

impl<'de> Deserialize<'de> for Marked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Marked;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Marked, E> {
                Ok(Marked(String::from_utf8_lossy(bytes).into_owned()))
            }
        }
        // As bytes, so that they need not be text.
        deserializer.deserialize_bytes(Bytes)
    }
}

/// An object's fields in order ([`Value::fields`]); [`Malformed`], if it comes, is the last.
#[derive(Debug)]
pub struct Fields<'a>(Parts<'a>);

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(Cow<'a, str>, Value<'a>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next_with(Cursor::field)
    }
}

impl<'a> Fields<'a> {
    fn of_document(text: &'a str, parts: &'a [Part]) -> Option<Self> {
        let mut cursor = Cursor { text, at: 0, base: 0, parts };
        cursor.skip_space();
        if cursor.peek() != Some(b'{') {
            return None;
        }
        // The document's own part, where it has one, stands before those within it.
        if let Some((own, within)) = parts.split_first()
            && own.start as usize == cursor.at
        {
            cursor.parts = within;
        }
        cursor.at += 1;
        Some(Self(Parts { cursor, began: 0, place: Place::Begin, end: b'}', whole: true }))
    }

    /// The field that was returned last, name and value, as it is written.
    pub fn last_written(&self) -> &'a str {
        self.0.cursor.text.get(self.0.began..self.0.cursor.at).unwrap_or_default()
    }
}

/// A list's items in order ([`Value::items`]); [`Malformed`], if it comes, is the last.
#[derive(Debug)]
pub struct Items<'a>(Parts<'a>);

impl<'a> Iterator for Items<'a> {
    type Item = Result<Value<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next_with(Cursor::value)
    }
}

/// Walks over what commas separate.
#[derive(Debug)]
struct Parts<'a> {
    cursor: Cursor<'a>,
    /// Where the last part begins.
    began: usize,
    place: Place,
    end: u8,
    /// Whether nothing may follow.
    whole: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Begin,
    Within,
    /// At the end, or at a mistake: nothing after it is looked at.
    Over,
}

impl<'a> Parts<'a> {
    fn of(Value { text, base, parts, .. }: Value<'a>, end: u8) -> Self {
        let cursor = Cursor { text, at: 1, base, parts };
        Self { cursor, began: 1, place: Place::Begin, end, whole: false }
    }

    fn next_with<T>(
        &mut self,
        part: impl FnOnce(&mut Cursor<'a>) -> Result<T, Malformed>,
    ) -> Option<Result<T, Malformed>> {
        let result = self.advance(part).transpose();
        if !matches!(result, Some(Ok(_))) {
            self.place = Place::Over;
        }
        result
    }

    fn advance<T>(
        &mut self,
        part: impl FnOnce(&mut Cursor<'a>) -> Result<T, Malformed>,
    ) -> Result<Option<T>, Malformed> {
        let cursor = &mut self.cursor;
        if self.place == Place::Over {
            return Ok(None);
        }
        cursor.skip_space();
        match (self.place, cursor.peek()) {
            (_, Some(byte)) if byte == self.end => {
                cursor.at += 1;
                cursor.skip_space();
                return if self.whole && cursor.peek().is_some() { Err(Malformed) } else { Ok(None) };
            }
            (Place::Within, Some(b',')) => cursor.at += 1,
            (Place::Within, _) => return Err(Malformed),
            _ => {}
        }
        self.place = Place::Within;
        cursor.skip_space();
        self.began = cursor.at;
        part(cursor).map(Some)
    }
}

#[cfg(test)]
mod tests;
