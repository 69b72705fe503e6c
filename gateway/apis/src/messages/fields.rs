//! A request's JSON, read field by field: a value stays as the client wrote it until it is asked for, so that
//! what goes on unread goes on unchanged. Faults are told by the field's path, such as `messages.0.role`.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::Refusal;

/// The fields of one object that have not been taken yet. Of equal names the last one counts.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    path: String,
    fields: BTreeMap<String, &'a RawValue>,
}

impl<'a> Fields<'a> {
    /// Of a whole body.
    pub(super) fn of_body(json: &'a [u8]) -> Result<Self, Refusal> {
        let fields = serde_json::from_slice(json).map_err(|error| {
            // What is said of a wrong value would repeat it, of whatever length.
            let message = if error.is_data() {
                "The body of a request must be a JSON object.".to_owned()
            } else {
                format!("We could not parse the JSON body of your request: {error}.")
            };
            Refusal { message, param: None }
        })?;
        Ok(Self { path: String::new(), fields })
    }

    /// Of a value that must be an object.
    pub(super) fn of(value: &'a RawValue, path: String) -> Result<Self, Refusal> {
        match serde_json::from_str(value.get()) {
            Ok(fields) => Ok(Self { path, fields }),
            Err(_) => Err(wrong(&path, "an object", value)),
        }
    }

    /// A field's path from the body on.
    pub(super) fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// Whether there is a field of this name, be it `null`.
    pub(super) fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// A field, if it is there and not `null`.
    pub(super) fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        self.fields.remove(name).filter(|value| value.get() != "null")
    }

    pub(super) fn text(&mut self, name: &str) -> Result<Option<Cow<'a, str>>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        read_text(value).map(Some).ok_or_else(|| no_text(value, &self.path(name)))
    }

    /// A text that must be there.
    pub(super) fn needed_text(&mut self, name: &str) -> Result<Cow<'a, str>, Refusal> {
        self.text(name)?.ok_or_else(|| self.missing(name))
    }

    pub(super) fn list(&mut self, name: &str) -> Result<Option<Vec<&'a RawValue>>, Refusal> {
        self.take(name).map(|value| list(value, &self.path(name))).transpose()
    }

    pub(super) fn object(&mut self, name: &str) -> Result<Option<Self>, Refusal> {
        self.take(name).map(|value| Self::of(value, self.path(name))).transpose()
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<Option<bool>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.get() {
            "true" => Ok(Some(true)),
            "false" => Ok(Some(false)),
            _ => Err(wrong(&self.path(name), "true or false", value)),
        }
    }

    /// A number, as the client wrote it.
    pub(super) fn number(&mut self, name: &str) -> Result<Option<&'a RawValue>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        if kind(value) == "a number" {
            Ok(Some(value))
        } else {
            Err(wrong(&self.path(name), "a number", value))
        }
    }

    /// An integer of at least `min`.
    pub(super) fn integer(&mut self, name: &str, min: u64) -> Result<Option<u64>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.get().parse::<u64>() {
            Ok(integer) if integer >= min => Ok(Some(integer)),
            _ => {
                let path = self.path(name);
                Err(refused(&path, &format!("'{path}' must be an integer of at least {min}.")))
            }
        }
    }

    /// That a field must be there.
    pub(super) fn missing(&self, name: &str) -> Refusal {
        let path = self.path(name);
        refused(&path, &format!("'{path}' is missing: a request must have it."))
    }

    /// Names of what is left.
    pub(super) fn names(self) -> impl Iterator<Item = String> {
        self.left().map(|(name, _)| name)
    }

    /// What is left that is not `null`.
    pub(super) fn left(self) -> impl Iterator<Item = (String, &'a RawValue)> {
        self.fields.into_iter().filter(|(_, value)| value.get() != "null")
    }
}

/// A refusal because of the field at a path.
pub(super) fn refused(path: &str, message: &str) -> Refusal {
    Refusal { message: message.to_owned(), param: Some(path.to_owned()) }
}

/// That a value is not what it must be.
pub(super) fn wrong(path: &str, what: &str, value: &RawValue) -> Refusal {
    refused(path, &format!("'{path}' must be {what}, not {}.", kind(value)))
}

/// A value that must be a text.
pub(super) fn text<'a>(value: &'a RawValue, path: &str) -> Result<Cow<'a, str>, Refusal> {
    read_text(value).ok_or_else(|| no_text(value, path))
}

fn read_text(value: &RawValue) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
    serde_json::from_str(value.get()).ok().map(|Text(text)| text)
}

fn no_text(value: &RawValue, path: &str) -> Refusal {
    if kind(value) == "a string" {
        return refused(path, &format!("'{path}' must be text: it holds half of a surrogate pair."));
    }
    wrong(path, "a string", value)
}

/// The elements of a value that must be an array.
pub(super) fn list<'a>(value: &'a RawValue, path: &str) -> Result<Vec<&'a RawValue>, Refusal> {
    serde_json::from_str(value.get()).map_err(|_| wrong(path, "an array", value))
}

/// A value's type in words: a message must not repeat a client's text.
pub(super) fn kind(value: &RawValue) -> &'static str {
    match value.get().as_bytes().first() {
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    }
}

/// That a block is of a type that stands not here.
pub(super) fn wrong_type(block: &Fields<'_>, what: &str) -> Refusal {
    let path = block.path("type");
    refused(&path, &format!("'{path}' must be that of {what}."))
}

/// What a message or a tool's result holds.
#[derive(Debug)]
pub(super) enum TextOrBlocks<'a> {
    Text(Cow<'a, str>),
    Blocks(Vec<&'a RawValue>),
}

impl<'a> TextOrBlocks<'a> {
    pub(super) fn of(content: &'a RawValue, path: &str) -> Result<Self, Refusal> {
        match kind(content) {
            "a string" => text(content, path).map(Self::Text),
            "an array" => list(content, path).map(Self::Blocks),
            _ => Err(wrong(path, "a string or an array of blocks", content)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_wrong_is_told_by_its_path() {
        let body = br#"{"a": {"b": 1, "c": "x\u0041", "d": null, "e": "\ud800"}, "f": [1]}"#;
        let fields = || Fields::of_body(body).unwrap().object("a").unwrap().unwrap();
        let message = |refusal: Refusal| (refusal.param.unwrap(), refusal.message);
        let (param, text) = message(fields().text("b").unwrap_err());
        assert_eq!((&*param, &*text), ("a.b", "'a.b' must be a string, not a number."));
        assert_eq!(fields().text("c").unwrap().unwrap(), "xA");
        assert_eq!((fields().text("d").unwrap(), fields().has("d")), (None, true));
        assert!(fields().text("e").unwrap_err().message.contains("surrogate"));
        assert_eq!(message(fields().needed_text("d").unwrap_err()).0, "a.d");
        assert_eq!(
            message(fields().integer("b", 2).unwrap_err()).1,
            "'a.b' must be an integer of at least 2."
        );
        let mut read = fields();
        assert!(read.text("c").unwrap().is_some() && !read.has("c"));
        assert_eq!(read.left().map(|(name, _)| name).collect::<Vec<_>>(), ["b", "e"]);
        assert!(Fields::of_body(b"[]").unwrap_err().message.contains("object"));
        assert!(Fields::of_body(b"{\"a\": ").unwrap_err().message.contains("EOF"));
    }
}
