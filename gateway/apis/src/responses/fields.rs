//! The fields of a request, or of an object in it, taken one by one: each has its type or is refused by its
//! place, such as `input[2].call_id`. A field that is `null` is none.

use serde_json::{Map, Value};

use crate::Refusal;

/// The fields of an object that have not been taken yet.
#[derive(Debug)]
pub(super) struct Fields {
    /// Where the object is; empty for the request itself.
    at: String,
    fields: Map<String, Value>,
}

impl Fields {
    /// Of a request's body.
    pub(super) fn of_body(body: &[u8]) -> Result<Self, Refusal> {
        let refusal = |what: String| Refusal { message: what, param: None };
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self { at: String::new(), fields }),
            Ok(other) => Err(refusal(format!("The body must be a JSON object, not {}.", kind(&other)))),
            Err(error) => Err(refusal(format!("The body must be JSON: {error}."))),
        }
    }

    /// Of an object at a place.
    pub(super) fn of(at: String, value: Value) -> Result<Self, Refusal> {
        match value {
            Value::Object(fields) => Ok(Self { at, fields }),
            other => Err(wrong(&at, "an object", &other)),
        }
    }

    /// Where a field is.
    pub(super) fn place(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    pub(super) fn take_text(&mut self, name: &str) -> Result<Option<String>, Refusal> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.place(name), "a string", &other)),
        }
    }

    /// A text that must be there.
    pub(super) fn need_text(&mut self, name: &str) -> Result<String, Refusal> {
        self.take_text(name)?.ok_or_else(|| self.missing(name))
    }

    pub(super) fn take_bool(&mut self, name: &str) -> Result<Option<bool>, Refusal> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong(&self.place(name), "true or false", &other)),
        }
    }

    /// An integer that is at least `min`.
    pub(super) fn take_integer(&mut self, name: &str, min: u64) -> Result<Option<u64>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_u64().filter(|integer| *integer >= min) {
            Some(integer) => Ok(Some(integer)),
            None => Err(self.refusal(name, &format!("must be an integer of at least {min}."))),
        }
    }

    pub(super) fn take_list(&mut self, name: &str) -> Result<Option<Vec<Value>>, Refusal> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(wrong(&self.place(name), "an array", &other)),
        }
    }

    pub(super) fn take_object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, Refusal> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(other) => Err(wrong(&self.place(name), "an object", &other)),
        }
    }

    /// Of a field: its place, and what is wrong with it.
    pub(super) fn refusal(&self, name: &str, what: &str) -> Refusal {
        let place = self.place(name);
        Refusal { message: format!("'{place}' {what}"), param: Some(place) }
    }

    pub(super) fn missing(&self, name: &str) -> Refusal {
        self.refusal(name, "is missing.")
    }

    /// Names of those that were not taken.
    pub(super) fn names(self) -> impl Iterator<Item = String> {
        self.rest().map(|(name, _)| name)
    }

    /// The fields that were not taken.
    pub(super) fn rest(self) -> impl Iterator<Item = (String, Value)> {
        self.fields.into_iter().filter(|(_, value)| !value.is_null())
    }
}

/// A value that is not what it must be.
pub(super) fn wrong(place: &str, must: &str, value: &Value) -> Refusal {
    let message = format!("'{place}' must be {must}, not {}.", kind(value));
    Refusal { message, param: Some(place.to_owned()) }
}

/// A value's kind, for a message.
const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
