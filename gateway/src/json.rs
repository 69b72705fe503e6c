//! Objects and lists of a JSON text as their parts, unread: finds where values begin and end, at the speed of `memchr`
//! and without a copy or `unsafe`. Reads no number and no nested value, and does not judge what it skips: of a text
//! that `serde_json` takes it says the same (a property test holds them together); of others, something or [`Malformed`].

mod outline;

use std::borrow::Cow;

use serde::Deserialize;

pub use self::outline::Outline;
use self::outline::Part;

/// Nesting that is followed, as deep as `serde_json`'s own limit.
const DEPTH_MAX: u32 = 128;

/// Bytes of a string that are looked at eight at a time before a search is set up for the rest: most strings are names.
const NEAR_BYTES: usize = 16;

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
    /// The fields of a document that is an object: as [`Value::fields`], and what follows it must be white space. Whoever wants
    /// what is nested in it too makes an [`Outline`].
    pub fn document(text: &'a str) -> Option<Fields<'a>> {
        Fields::of_document(text, &[])
    }

    /// The field of this name of a document that is an object, looked for from the end, as its last fields are mostly the
    /// shortest. What stands before it is not looked at. `None` also where the last field of the name is not the
    /// document's own but of something within it.
    pub fn last_of_document(text: &'a str, quoted_name: &str) -> Option<Self> {
        let mut cursor =
            Cursor { text, at: text.rfind(quoted_name)? + quoted_name.len(), base: 0, parts: &[] };
        cursor.skip_space();
        if cursor.peek() != Some(b':') {
            return None;
        }
        cursor.at += 1;
        let value = cursor.value().ok()?;
        let began = cursor.at;
        let mut rest = Fields(Parts { cursor, began, place: Place::Within, end: b'}', whole: true });
        rest.all(|field| field.is_ok()).then_some(value)
    }

    /// A value that was found before, by its text.
    pub fn found(text: &'a str) -> Self {
        Self { text, base: 0, parts: &[], plain: false }
    }

    /// As it is written.
    pub fn raw(self) -> &'a str {
        self.text
    }

    /// A string's text, borrowed unless it holds escapes; `None` for other values, and for escapes that are no text.
    pub fn text(self) -> Option<Cow<'a, str>> {
        #[derive(Deserialize)]
        struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
        let inner = self.text.strip_prefix('"')?.strip_suffix('"')?;
        if self.plain || memchr::memchr(b'\\', inner.as_bytes()).is_none() {
            return Some(Cow::Borrowed(inner));
        }
        serde_json::from_str::<Text<'_>>(self.text).ok().map(|text| text.0)
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

/// See [`Value::fields`].
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
        // The document's own part stands before those within it.
        cursor.parts = cursor.parts.get(1..).unwrap_or_default();
        cursor.at += 1;
        Some(Self(Parts { cursor, began: 0, place: Place::Begin, end: b'}', whole: true }))
    }

    /// The field that was returned last, name and value, as it is written.
    pub fn last_written(&self) -> &'a str {
        self.0.cursor.text.get(self.0.began..self.0.cursor.at).unwrap_or_default()
    }
}

/// See [`Value::items`].
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

/// A place in a text.
#[derive(Debug, Clone)]
struct Cursor<'a> {
    text: &'a str,
    at: usize,
    /// Where the text begins in its document.
    base: usize,
    /// What of the document's outline is to come.
    parts: &'a [Part],
}

impl<'a> Cursor<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    fn field(&mut self) -> Result<(Cow<'a, str>, Value<'a>), Malformed> {
        if self.peek() != Some(b'"') {
            return Err(Malformed);
        }
        let start = self.at;
        let name = if self.skip_string()? {
            self.text.get(start..self.at).and_then(|text| Value::found(text).text())
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
    fn value(&mut self) -> Result<Value<'a>, Malformed> {
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
        while let Some(b'0'..=b'9' | b'a'..=b'z' | b'+' | b'-' | b'.' | b'E') = self.peek() {
            self.at += 1;
        }
        if self.at == start { Err(Malformed) } else { Ok(()) }
    }
}

/// Behind the quote that ends a string which goes on at `at`, and whether escapes stand before it; `None` where it does not end.
#[inline]
fn string_end(bytes: &[u8], at: usize) -> Option<(usize, bool)> {
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

/// The highest bit of each byte that is `byte`; bytes behind the first such one may have it too (Mycroft, 1987).
fn bytes_equal(word: u64, byte: u8) -> u64 {
    const ONES: u64 = u64::MAX / 255;
    let zeros = word ^ (ONES * u64::from(byte));
    zeros.wrapping_sub(ONES) & !zeros & (ONES << 7)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Any JSON, with escapes, white space, repeated keys.
    fn json() -> impl Strategy<Value = String> {
        let space = || prop::sample::select(vec!["", " ", "\n\t", "\r "]);
        let string = prop::collection::vec(
            prop::sample::select(vec![
                "a",
                "é",
                "\\\"",
                "\\\\",
                "\\u00e9",
                "{",
                "]",
                ",",
                ":",
                "\\n",
                "\\ud83d\\ude00",
            ]),
            0..6,
        );
        // Some are long enough to be part of an outline, and so that escapes stand far from their beginning.
        let string = (string, prop::sample::select(vec![1, 1, 3, 40]))
            .prop_map(|(parts, times)| format!("\"{}\"", parts.concat().repeat(times)));
        let scalar = prop::sample::select(vec!["0", "-1.5e+3", "true", "false", "null", "1E9"]);
        let leaf = prop_oneof![string.clone(), scalar.prop_map(str::to_owned)];
        leaf.prop_recursive(4, 24, 5, move |inner| {
            let list =
                (prop::collection::vec((space(), inner.clone()), 0..5), space()).prop_map(|(items, end)| {
                    let items: Vec<String> =
                        items.into_iter().map(|(s, item)| format!("{s}{item}{s}")).collect();
                    format!("[{}{end}]", items.join(","))
                });
            let field = (space(), string.clone(), space(), inner);
            let object = (prop::collection::vec(field, 0..5), space()).prop_map(|(fields, end)| {
                let fields: Vec<String> = fields
                    .into_iter()
                    .map(|(s, name, t, value)| format!("{s}{name}{t}:{s}{value}{t}"))
                    .collect();
                format!("{{{}{end}}}", fields.join(","))
            });
            prop_oneof![list, object]
        })
    }

    /// Builds what the parts say, all the way down, with the last of repeated keys.
    fn rebuilt(value: Value<'_>) -> serde_json::Value {
        if let Some(fields) = value.fields() {
            let fields = fields.map(|field| field.map(|(name, value)| (name.into_owned(), rebuilt(value))));
            return serde_json::Value::Object(fields.collect::<Result<_, _>>().unwrap());
        }
        if let Some(items) = value.items() {
            return items.map(|item| rebuilt(item.unwrap())).collect();
        }
        match value.text() {
            Some(text) => serde_json::Value::String(text.into_owned()),
            None => serde_json::from_str(value.raw()).unwrap(),
        }
    }

    fn document(text: &str) -> Result<serde_json::Value, Malformed> {
        let whole = |fields: Option<Fields<'_>>| {
            let fields = fields.ok_or(Malformed)?;
            let fields = fields.map(|field| field.map(|(name, value)| (name.into_owned(), rebuilt(value))));
            fields.collect::<Result<_, _>>().map(serde_json::Value::Object)
        };
        let read = whole(Value::document(text));
        assert_eq!(whole(Outline::of(text).document()), read, "its outline says something else");
        read
    }

    proptest! {
        #[test]
        fn what_serde_takes_is_taken_apart_alike(inner in json(), before in "[ \n]{0,2}", after in "[ \n]{0,2}") {
            let text = format!("{before}{{\"x\":{inner}}}{after}");
            let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(document(&text).unwrap(), expected);
        }

        #[test]
        fn what_is_called_malformed_is_refused_by_serde_too(text in "\\{[\"\\\\{}\\[\\],: a1é]{0,40}") {
            let fields = Value::document(&text).unwrap();
            prop_assert!(fields.size_hint().0 <= text.len());
            if Value::document(&text).unwrap().any(|field| field.is_err()) {
                prop_assert!(serde_json::from_str::<serde_json::Value>(&text).is_err(), "{}", text);
            }
            // Neither with an outline does it take what it refuses without, nor the other way round.
            let refused = |fields: Option<Fields<'_>>| fields.unwrap().any(|field| field.is_err());
            let outline = Outline::of(&text);
            prop_assert_eq!(refused(outline.document()), refused(Value::document(&text)));
        }

        #[test]
        fn a_string_ends_at_its_first_quote_that_is_not_escaped(text in "[a\"\\\\\u{22}\u{23}\u{5b}-\u{5d}é]{0,40}", at in 0_usize..3) {
            let mut expected = None;
            let mut escaped = false;
            let mut bytes = text.bytes().enumerate().skip(at);
            while let Some((i, byte)) = bytes.next() {
                match byte {
                    b'"' => {
                        expected = Some((i + 1, escaped));
                        break;
                    }
                    b'\\' => {
                        escaped = true;
                        bytes.next();
                    }
                    _ => {}
                }
            }
            prop_assert_eq!(string_end(text.as_bytes(), at), expected);
        }

        #[test]
        fn the_last_field_of_a_document_is_its_own_or_none(inner in json(), last in json(), more in json()) {
            let text = format!("{{\"z\":{inner},\"it\":{last},\"y\":{more}}}");
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            let found = Value::last_of_document(&text, "\"it\"").map(rebuilt);
            prop_assert!(found.as_ref().is_none_or(|found| *found == value["it"]), "{found:?}");
            let nested = format!("{{\"z\":{{\"it\":{last}}},\"y\":1}}");
            prop_assert_eq!(Value::last_of_document(&nested, "\"it\""), None);
        }
    }

    #[test]
    fn what_is_broken_off_or_too_deep_is_malformed() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(200), "]".repeat(200));
        for text in [
            "",
            " ",
            "[]",
            "{",
            "{\"a\":1",
            "{\"a",
            "{\"a\\\"",
            "{\"a\":[1,2",
            "{} {}",
            "{}x",
            "{\"a\":1,,\"b\":2}",
            "{\"a\" 1}",
            "{\"a\":}",
            "{a:1}",
            &deep,
        ] {
            assert!(document(text).is_err(), "{text:?}");
        }
    }
}
