//! Objects and lists of a JSON text as their parts, unread: finds where values begin and end, at the speed of `memchr`
//! and without a copy or `unsafe`. Reads no number and no nested value, and does not judge what it skips: of a text
//! that `serde_json` takes it says the same (a property test holds them together); of others, something or [`Malformed`].

use std::borrow::Cow;

use serde::Deserialize;

/// Nesting that is followed, as deep as `serde_json`'s own limit.
const DEPTH_MAX: u32 = 128;

/// The text is not JSON, or nested too deeply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// One value, as it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value<'a>(&'a str);

impl<'a> Value<'a> {
    /// The fields of a document that is an object: as [`Value::fields`], and what follows it must be white space.
    pub fn document(text: &'a str) -> Option<Fields<'a>> {
        let mut cursor = Cursor { text, at: 0 };
        cursor.skip_space();
        let object = cursor.peek() == Some(b'{');
        cursor.at += 1;
        object.then_some(Fields(Parts { cursor, began: 0, place: Place::Begin, end: b'}', whole: true }))
    }

    /// A value that was found before, by its text.
    pub fn found(text: &'a str) -> Self {
        Self(text)
    }

    /// As it is written.
    pub fn raw(self) -> &'a str {
        self.0
    }

    /// A string's text, borrowed unless it holds escapes; `None` for other values, and for escapes that are no text.
    pub fn text(self) -> Option<Cow<'a, str>> {
        #[derive(Deserialize)]
        struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
        let inner = self.0.strip_prefix('"')?.strip_suffix('"')?;
        if memchr::memchr(b'\\', inner.as_bytes()).is_none() {
            return Some(Cow::Borrowed(inner));
        }
        serde_json::from_str::<Text<'_>>(self.0).ok().map(|text| text.0)
    }

    /// An object's fields in order, repeated ones too; `None` for other values.
    pub fn fields(self) -> Option<Fields<'a>> {
        self.0.starts_with('{').then(|| Fields(Parts::of(self.0, b'}')))
    }

    /// A list's items; `None` for other values.
    pub fn items(self) -> Option<Items<'a>> {
        self.0.starts_with('[').then(|| Items(Parts::of(self.0, b']')))
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
    fn of(text: &'a str, end: u8) -> Self {
        Self { cursor: Cursor { text, at: 1 }, began: 1, place: Place::Begin, end, whole: false }
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
        let name = self.value()?.text().ok_or(Malformed)?;
        self.skip_space();
        if self.peek() != Some(b':') {
            return Err(Malformed);
        }
        self.at += 1;
        Ok((name, self.value()?))
    }

    fn value(&mut self) -> Result<Value<'a>, Malformed> {
        self.skip_space();
        let start = self.at;
        match self.peek() {
            Some(b'"') => self.skip_string()?,
            Some(b'{' | b'[') => self.skip_container()?,
            _ => self.skip_scalar()?,
        }
        self.text.get(start..self.at).map(Value).ok_or(Malformed)
    }

    fn skip_string(&mut self) -> Result<(), Malformed> {
        let bytes = self.text.as_bytes();
        self.at += 1;
        loop {
            let rest = bytes.get(self.at..).unwrap_or_default();
            match memchr::memchr2(b'"', b'\\', rest) {
                Some(step) if rest[step] == b'"' => {
                    self.at += step + 1;
                    return Ok(());
                }
                // What an escape escapes may be a quote or a backslash; both are one byte.
                Some(step) => self.at += step + 2,
                None => return Err(Malformed),
            }
        }
    }

    fn skip_container(&mut self) -> Result<(), Malformed> {
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
                return Ok(());
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
        let string = string.prop_map(|parts| format!("\"{}\"", parts.concat()));
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
        let fields = Value::document(text).ok_or(Malformed)?;
        let fields = fields.map(|field| field.map(|(name, value)| (name.into_owned(), rebuilt(value))));
        fields.collect::<Result<_, _>>().map(serde_json::Value::Object)
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
