//! A request's JSON fields, taken out one by one with their types and ranges. What is left at the end is
//! accounted for as well: no field is ignored in silence unless ignoring it changes nothing.

use serde_json::{Map, Value};

use super::error::ApiError;

/// Fields that do not change what is generated.
const HARMLESS: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "request_id",
    // Without a tool that could be called.
    "parallel_tool_calls",
];

/// Fields this worker does not act on, with the value that asks for nothing.
const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("suffix", Neutral::Empty),
    ("length_penalty", Neutral::Number(1.0)),
    ("use_beam_search", Neutral::False),
    ("spaces_between_special_tokens", Neutral::True),
    ("bad_words", Neutral::Empty),
    ("functions", Neutral::Empty),
    ("function_call", Neutral::Text("none")),
    ("modalities", Neutral::TextOnly),
    ("allowed_token_ids", Neutral::Null),
    ("truncate_prompt_tokens", Neutral::Null),
    ("reasoning_effort", Neutral::Null),
    ("verbosity", Neutral::Null),
    ("prediction", Neutral::Null),
    ("audio", Neutral::Null),
    ("web_search_options", Neutral::Null),
    ("moderation", Neutral::Null),
    ("kv_transfer_params", Neutral::Null),
    // Where the endpoint has them not.
    ("echo", Neutral::False),
    ("logprobs", Neutral::False),
    ("top_logprobs", Neutral::Number(0.0)),
    ("best_of", Neutral::Number(1.0)),
    ("tools", Neutral::Empty),
    ("tool_choice", Neutral::Text("none")),
];

/// Fields of agents' requests without which the answer would be to something else.
const INDISPENSABLE: &[(&str, Neutral)] = &[
    ("background", Neutral::False),
    ("compaction", Neutral::Null),
    ("container", Neutral::Null),
    ("conversation", Neutral::Null),
    ("keyway", Neutral::Null),
    ("mcp_servers", Neutral::Empty),
    ("previous_input_messages", Neutral::Empty),
    ("prompt", Neutral::Null),
];

/// Of [`UNSUPPORTED`], what agents' requests may have: a wish that the answer is none the worse without.
const WISHES: &[&str] = &["verbosity", "reasoning_effort", "moderation", "kv_transfer_params"];

/// Names of ignored fields that are told, at most, and bytes of each: they are a client's text.
const IGNORED_MAX: usize = 32;
const IGNORED_BYTES_MAX: usize = 64;

/// The value of a field that asks for nothing; `null` always does.
#[derive(Debug, Clone, Copy)]
enum Neutral {
    Null,
    True,
    False,
    Number(f64),
    Empty,
    Text(&'static str),
    TextOnly,
}

impl Neutral {
    fn is(self, value: &Value) -> bool {
        match self {
            Self::Null => false,
            Self::True => *value == true,
            Self::False => *value == false,
            Self::Number(number) => value.as_f64() == Some(number),
            Self::Empty => *value == "" || *value == serde_json::json!([]) || *value == serde_json::json!({}),
            Self::Text(text) => *value == text,
            Self::TextOnly => *value == serde_json::json!(["text"]),
        }
    }
}

/// The fields of a request that have not been taken yet.
#[derive(Debug)]
pub(crate) struct Params {
    fields: Map<String, Value>,
    /// Parts of taken fields that are not acted on.
    ignored: Vec<String>,
}

impl Params {
    /// Reads a request's body, which must be a JSON object; a field that is `null` counts as absent.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self::new(fields)),
            Ok(_) => Err(ApiError::malformed("it is not an object")),
            Err(error) => Err(ApiError::malformed(error)),
        }
    }

    /// The fields of an object; `null` counts as absent.
    pub(crate) fn new(mut fields: Map<String, Value>) -> Self {
        fields.retain(|_, value| !value.is_null());
        Self { fields, ignored: Vec::new() }
    }

    /// Whether the field is there.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(name)
    }

    /// All fields that are left.
    pub(crate) fn into_fields(self) -> Map<String, Value> {
        self.fields
    }

    /// Has a field in this form, instead of the one that was taken.
    pub(crate) fn put(&mut self, name: &str, value: Value) {
        self.fields.insert(name.to_owned(), value);
    }

    /// Notes a part of a field that is not acted on.
    pub(crate) fn ignore(&mut self, path: String) {
        self.ignored.push(path);
    }

    pub(crate) fn take_bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        let wrong = |v: Value| {
            ApiError::invalid_value(name, format!("'{name}' must be true or false, not {}.", kind(&v)))
        };
        self.take(name).map(|v| v.as_bool().ok_or_else(|| wrong(v))).transpose()
    }

    pub(crate) fn take_string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(v) => {
                Err(ApiError::invalid_value(name, format!("'{name}' must be a string, not {}.", kind(&v))))
            }
        }
    }

    pub(crate) fn take_object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(fields)) => Ok(Some(fields)),
            Some(v) => {
                Err(ApiError::invalid_value(name, format!("'{name}' must be an object, not {}.", kind(&v))))
            }
        }
    }

    pub(crate) fn take_array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(v) => {
                Err(ApiError::invalid_value(name, format!("'{name}' must be an array, not {}.", kind(&v))))
            }
        }
    }

    /// A number in `min..=max`.
    pub(crate) fn take_number(&mut self, name: &str, min: f64, max: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if (min..=max).contains(&number) => Ok(Some(number)),
            _ => Err(ApiError::invalid_value(
                name,
                format!("'{name}' must be a number between {min} and {max}, not {}.", shown(&value)),
            )),
        }
    }

    /// An integer of at least `min`.
    pub(crate) fn take_integer(&mut self, name: &str, min: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_i64().or_else(|| value.as_u64().map(|v| v as i64)) {
            Some(integer) if integer >= min => Ok(Some(integer)),
            _ => {
                let range = if min == i64::MIN {
                    "a 64-bit integer".to_owned()
                } else {
                    format!("an integer of at least {min}")
                };
                Err(ApiError::invalid_value(
                    name,
                    format!("'{name}' must be {range}, not {}.", shown(&value)),
                ))
            }
        }
    }

    /// An integer in `min..=max`.
    pub(crate) fn take_bounded(
        &mut self,
        name: &str,
        min: usize,
        max: usize,
    ) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_u64().map(|integer| integer as usize) {
            Some(integer) if (min..=max).contains(&integer) => Ok(Some(integer)),
            _ => Err(ApiError::invalid_value(
                name,
                format!("'{name}' must be an integer between {min} and {max}, not {}.", shown(&value)),
            )),
        }
    }

    /// An array of token ids of a vocabulary.
    pub(crate) fn take_ids(
        &mut self,
        name: &str,
        path: &str,
        vocab_size: usize,
    ) -> Result<Option<Vec<u32>>, ApiError> {
        let id = |value: &Value| value.as_u64().filter(|id| *id < vocab_size as u64).map(|id| id as u32);
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(ids)) => {
                let ids = ids.iter().map(id).collect::<Option<Vec<u32>>>().ok_or_else(|| {
                    let last = vocab_size - 1;
                    let what =
                        format!("'{path}' holds something that is not a token id between 0 and {last}.");
                    ApiError::invalid_value(path, what)
                })?;
                Ok(Some(ids))
            }
            Some(other) => {
                let what = format!("'{path}' must be an array of token ids, not {}.", kind(&other));
                Err(ApiError::invalid_value(path, what))
            }
        }
    }

    /// An integer of at least 0, up to 2^64 - 1. `path` names the field in messages.
    pub(crate) fn take_unsigned(&mut self, name: &str, path: &str) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        value.as_u64().map(Some).ok_or_else(|| {
            let what = format!("'{path}' must be an unsigned 64-bit integer, not {}.", shown(&value));
            ApiError::invalid_value(path, what)
        })
    }

    /// Ends the parsing of an agent's request: names the fields that are not acted on. Agents send what the
    /// newest models know, and none of it may keep them from their answer, unless it decides what is asked.
    pub(crate) fn finish_agents(self) -> Result<Vec<String>, ApiError> {
        let Self { fields, mut ignored } = self;
        for (name, value) in fields {
            let name = name.as_str();
            if HARMLESS.contains(&name) {
                continue;
            }
            let known = UNSUPPORTED.iter().filter(|(known, _)| !WISHES.contains(known));
            let refused = known.chain(INDISPENSABLE).find(|(known, _)| *known == name);
            if refused.is_some_and(|(_, neutral)| !neutral.is(&value)) {
                return Err(refusal(name));
            }
            ignored.push(name.to_owned());
        }
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        ignored.retain(|name| name.len() <= IGNORED_BYTES_MAX && name.bytes().all(is_word));
        ignored.truncate(IGNORED_MAX);
        Ok(ignored)
    }

    /// Ends the parsing: every field left must be harmless or ask for nothing. Names parts of taken fields
    /// that are not acted on.
    pub(crate) fn finish(self) -> Result<Vec<String>, ApiError> {
        for (name, value) in &self.fields {
            if HARMLESS.contains(&name.as_str()) {
                continue;
            }
            match UNSUPPORTED.iter().find(|(known, _)| known == name) {
                Some((_, neutral)) if neutral.is(value) => {}
                // Without functions, letting the model choose is choosing none.
                Some(("function_call", _)) if *value == "auto" => {}
                Some(_) => return Err(refusal(name)),
                None => {
                    return Err(ApiError::unsupported(
                        name,
                        format!("Unrecognized request argument supplied: {name}."),
                    ));
                }
            }
        }
        Ok(self.ignored)
    }
}

fn refusal(name: &str) -> ApiError {
    let message = format!("This worker does not support '{name}' with this value. Leave it out.");
    ApiError::unsupported(name, message)
}

/// A value's type, for error messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A number as it is, anything else by its type: a message must not repeat a client's text.
fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        other => kind(other).to_owned(),
    }
}
