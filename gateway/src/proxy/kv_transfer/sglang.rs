//! SGLang's contract (0.5.23; `io_struct.py`, its own router's `mini_lb.py` and `pd_router.rs`): both legs go
//! at once with the client's body and three more fields, by which the worker that answers finds the one that
//! computes. The latter answers too, with its first token; that answer is read to learn how it went.

use std::borrow::Cow;

use bytes::Bytes;
use keyway_wire::openai::Usage;
use serde::{
    Deserialize,
    de::{Deserializer, IgnoredAny},
};

use crate::{json::Value, proxy::named_body, sse};

/// Fields by which legs meet. A client's own are left out: a room that is taken twice ends both engines
/// (sglang issue 40125), and of two such fields they take the last.
const OWN: [&str; 5] =
    ["bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "disagg_prefill_dp_rank"];

/// What a request's body asks for, as far as it matters to both legs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proxy) struct LegsAsked {
    /// Rooms that it takes at the worker that answers: one for each answer.
    pub(in crate::proxy) rooms: u32,
    /// Whether it asks for the prompt's own probabilities, of which the worker that answers has none.
    pub(in crate::proxy) prompt_logprobs: bool,
}

impl LegsAsked {
    /// `None` where it is no object in JSON, to which nothing could be added.
    pub(in crate::proxy) fn of(body: &[u8]) -> Option<Self> {
        let (mut prompts, mut samples) = (1, 1);
        let (mut echo, mut logprobs, mut returned, mut from) = (false, false, false, false);
        for field in Value::document(std::str::from_utf8(body).ok()?)? {
            let (name, value) = field.ok()?;
            match name.as_ref() {
                "n" => samples = value.raw().parse().unwrap_or(1),
                "sampling_params" => {
                    let mut fields = value.fields().into_iter().flatten().filter_map(Result::ok);
                    let n = fields.find(|(name, _)| name == "n");
                    samples = n.map_or(1, |(_, n)| n.raw().parse().unwrap_or(1));
                }
                "prompt" | "text" | "input_ids" => prompts = prompts_in(value),
                "echo" => echo = value.raw() == "true",
                "logprobs" => logprobs = !["null", "false"].contains(&value.raw()),
                "return_logprob" => returned = value.raw() != "null" && value.raw() != "false",
                "logprob_start_len" => from = !["null", "-1"].contains(&value.raw()),
                _ => {}
            }
        }
        let prompt_logprobs = (echo && logprobs) || (returned && from);
        Some(Self { rooms: prompts.saturating_mul(samples).max(1), prompt_logprobs })
    }
}

/// One, or as many as a list has that is not of token ids.
fn prompts_in(value: Value<'_>) -> u32 {
    let is_id = |item: &Value<'_>| item.raw().starts_with(|c: char| c.is_ascii_digit());
    let Some(mut items) = value.items() else { return 1 };
    match items.next().and_then(Result::ok) {
        Some(first) if !is_id(&first) => 1 + u32::try_from(items.count()).unwrap_or(u32::MAX - 1),
        _ => 1,
    }
}

/// Where two legs meet.
#[derive(Debug, Clone, Copy)]
pub(in crate::proxy) struct Meeting<'a> {
    /// Host of the worker that computes, as a URL has it.
    pub(in crate::proxy) host: &'a str,
    /// Its bootstrap port.
    pub(in crate::proxy) port: u16,
    /// The transfer's number, and those behind it where there are several answers.
    pub(in crate::proxy) room: u64,
    /// Which data-parallel engine computes, where the gateway chooses one.
    pub(in crate::proxy) prefill_rank: Option<u32>,
}

/// A number for a transfer of so many rooms: engines take those below 2^63, and count on from it.
pub(in crate::proxy) fn new_room(rooms: u32) -> u64 {
    fastrand::u64(..(1 << 63) - u64::from(rooms))
}

impl Meeting<'_> {
    /// What the worker that computes is sent, and the one that answers.
    pub(in crate::proxy) fn bodies(self, body: &Bytes) -> (Bytes, Bytes) {
        let Self { host, port, room, prefill_rank } = self;
        let body = named_body::without(body, &OWN);
        // A URL's host has nothing that a string in JSON would not.
        let fields = format!(r#""bootstrap_host":"{host}","bootstrap_port":{port},"bootstrap_room":{room}"#);
        let prefill = named_body::with_fields(&body, &fields);
        let decode = match prefill_rank {
            None => prefill.clone(),
            Some(rank) => {
                named_body::with_fields(&body, &format!(r#"{fields},"disagg_prefill_dp_rank":{rank}"#))
            }
        };
        (prefill, decode)
    }
}

/// In its own words, why a worker did not compute a prompt, and the status that they name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proxy) struct NotComputed {
    /// None where it names none, or one that is no failure.
    pub(in crate::proxy) status: Option<u16>,
    pub(in crate::proxy) said: String,
}

/// What the answer of the worker that computes says, whole or as events: the prompt's usage, if it says one.
pub(in crate::proxy) fn read_prefill(is_stream: bool, body: &[u8]) -> Result<Option<Usage>, NotComputed> {
    let unreadable = || NotComputed { status: None, said: "its answer cannot be read".to_owned() };
    if !is_stream {
        // Of several prompts at `/generate`: a list of answers.
        if body.trim_ascii_start().starts_with(b"[") {
            return serde_json::from_slice::<IgnoredAny>(body).map(|_| None).map_err(|_| unreadable());
        }
        let said: Said = serde_json::from_slice(body).map_err(|_| unreadable())?;
        return said.usage_or_failure();
    }
    let (mut usage, mut any) = (None, false);
    for event in sse::events(&Bytes::copy_from_slice(body)) {
        let Some(data) = event.text().filter(|data| data.trim() != "[DONE]") else { continue };
        let said: Said = serde_json::from_str(data).map_err(|_| unreadable())?;
        usage = said.usage_or_failure()?.or(usage);
        any = true;
    }
    if any { Ok(usage) } else { Err(unreadable()) }
}

/// Whether the beginning of an answer's body says that it failed, rather than to be one.
pub(in crate::proxy) fn says_failure(piece: &[u8]) -> bool {
    let has = |word: &str| memchr::memmem::find(piece, word.as_bytes()).is_some();
    has("\"error\"") && !has("\"choices\"") && !has("\"text\"")
}

/// An answer or an event, as far as it says how the prompt went.
#[derive(Deserialize)]
struct Said {
    error: Option<Failure>,
    /// Older ones say it beside these.
    object: Option<String>,
    message: Option<String>,
    code: Option<serde_json::Value>,
    usage: Option<Usage>,
    #[serde(default, deserialize_with = "choices")]
    choices: Vec<Ended>,
    /// Of `/generate`.
    meta_info: Option<Ended>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Failure {
    Object { message: Option<String>, code: Option<serde_json::Value> },
    Text(String),
    Other(IgnoredAny),
}

#[derive(Deserialize)]
struct Ended {
    finish_reason: Option<Reason>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Reason {
    Word(String),
    Object {
        #[serde(rename = "type")]
        kind: String,
        message: Option<String>,
        status_code: Option<serde_json::Value>,
    },
    Other(IgnoredAny),
}

/// Absent, `null` and a list.
fn choices<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Ended>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl Said {
    fn usage_or_failure(self) -> Result<Option<Usage>, NotComputed> {
        let failed = |message: Option<String>, code: Option<&serde_json::Value>| {
            let status = code.and_then(serde_json::Value::as_u64).and_then(|code| u16::try_from(code).ok());
            let said = message.unwrap_or_else(|| "it does not say why".to_owned());
            Err(NotComputed { status: status.filter(|status| (400..600).contains(status)), said })
        };
        match self.error {
            Some(Failure::Object { message, code }) => return failed(message, code.as_ref()),
            Some(Failure::Text(text)) => return failed(Some(text), None),
            Some(Failure::Other(_)) => return failed(None, None),
            None => {}
        }
        if self.object.as_deref() == Some("error") {
            return failed(self.message, self.code.as_ref());
        }
        for Ended { finish_reason } in self.choices.into_iter().chain(self.meta_info) {
            match finish_reason {
                Some(Reason::Word(word)) if word == "abort" => return failed(None, None),
                Some(Reason::Object { kind, message, status_code }) if kind == "abort" => {
                    return failed(message, status_code.as_ref());
                }
                _ => {}
            }
        }
        Ok(self.usage)
    }
}

/// Words that a client may be told: not all of a long text.
pub(in crate::proxy) fn shortened(words: &str, bytes: usize) -> Cow<'_, str> {
    match words.char_indices().map(|(at, _)| at).take_while(|at| *at <= bytes).last() {
        Some(end) if words.len() > bytes => Cow::Owned(format!("{}…", &words[..end])),
        _ => Cow::Borrowed(words),
    }
}

#[cfg(test)]
mod tests;
