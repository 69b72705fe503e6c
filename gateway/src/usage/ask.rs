//! Asks a worker for the usage of a stream whose client did not: `stream_options.include_usage` goes into the
//! body, and [`super::hide`] takes out of the answer what it causes. Nothing is asked where the client has
//! asked itself, nor where that would change more than the usage.
//!
//! What a worker's streams look like unasked differs between engines and requests (SGLang writes
//! `"usage":null` into some chunks where tools may be called, vLLM nothing), so a worker's first stream of
//! each kind passes unasked and shows it. Of the others the first chunk does.

use std::{borrow::Cow, ops::Range, sync::Arc};

use bytes::{BufMut, Bytes, BytesMut};

use super::hide::UsageFilter;
use crate::{
    fleet::{self, Habit, StreamKind, Worker},
    json::Value,
    prompt::request::StreamOptions,
};

/// The part of `stream_options` that asks.
const ASK: &str = "include_usage";
/// Its part that asks for the usage so far in each chunk (vLLM, SGLang).
const ASK_ALWAYS: &str = "continuous_usage_stats";
const QUESTION: &str = r#""include_usage":true"#;
const QUESTION_ALWAYS: &str = r#""include_usage":true,"continuous_usage_stats":true"#;
/// The field with the question, before others.
const FIELD: &str = r#""stream_options":{"include_usage":true},"#;
const FIELD_ALWAYS: &str = r#""stream_options":{"include_usage":true,"continuous_usage_stats":true},"#;

/// The body to send to this worker for a request that streams, and what is to be done with its answer; `kind`
/// is `None` where streams are not asked. `always`: whether the tokens so far are wanted with each chunk.
pub fn ask(
    kind: Option<StreamKind>,
    (body, said): (Bytes, &StreamOptions),
    worker: &Arc<Worker>,
    always: bool,
) -> (Bytes, UsageFilter) {
    let Some((kind, place)) = kind.zip(place(&body, said, always)) else {
        return (body, UsageFilter::pass_all());
    };
    match worker.habits.of(kind) {
        Habit::Tells => (body, UsageFilter::pass_all()),
        _ if worker.habits.question(kind) == fleet::Question::Refused => (body, UsageFilter::pass_all()),
        Habit::Unknown => (body, UsageFilter::learn(Arc::clone(worker), kind)),
        habit => (place.put_into(&body), UsageFilter::hide(kind, habit == Habit::Nulls, always)),
    }
}

/// Where in a body the question goes.
#[derive(Debug, PartialEq, Eq)]
struct Question {
    replaces: Range<usize>,
    text: Cow<'static, str>,
}

impl Question {
    fn put_into(&self, body: &Bytes) -> Bytes {
        let mut out = BytesMut::with_capacity(body.len() + self.text.len());
        out.put_slice(&body[..self.replaces.start]);
        out.put_slice(self.text.as_bytes());
        out.put_slice(&body[self.replaces.end..]);
        out.freeze()
    }
}

/// `None` where the client asks itself, or where the body is not understood.
fn place(body: &[u8], said: &StreamOptions, always: bool) -> Option<Question> {
    match said {
        StreamOptions::Unclear | StreamOptions::Twice => None,
        StreamOptions::Nowhere(first) => {
            let text = if always { FIELD_ALWAYS } else { FIELD };
            Some(Question { replaces: *first..*first, text: text.into() })
        }
        StreamOptions::At(place) => {
            let options = std::str::from_utf8(body.get(place.clone())?).ok()?;
            let text = asking(Value::found(options), always)?.into();
            Some(Question { replaces: place.clone(), text })
        }
    }
}

/// Whether every reader takes these options for the same: no question stands there twice, or as what is no
/// truth value.
pub(crate) fn is_clear(options: Value<'_>) -> bool {
    if options.raw() == "null" {
        return true;
    }
    let Some(mut fields) = options.fields() else { return false };
    let mut said = [false; 2];
    fields.all(|field| {
        let Ok((name, value)) = field else { return false };
        let said = match &*name {
            ASK => &mut said[0],
            ASK_ALWAYS => &mut said[1],
            _ => return true,
        };
        !std::mem::replace(said, true) && matches!(value.raw(), "true" | "false" | "null")
    })
}

fn question(always: bool) -> &'static str {
    if always { QUESTION_ALWAYS } else { QUESTION }
}

/// The options with the question among them.
fn asking(options: Value<'_>, always: bool) -> Option<String> {
    if options.raw() == "null" {
        return Some(format!("{{{}}}", question(always)));
    }
    let mut fields = options.fields()?;
    let mut out = format!("{{{}", question(always));
    while let Some(field) = fields.next() {
        let (name, value) = field.ok()?;
        match (&*name, value.raw()) {
            (ASK, "false" | "null") => {}
            (ASK_ALWAYS, "false" | "null") if always => {}
            // It asks, or would say the usage in every chunk once asked.
            (ASK | ASK_ALWAYS, "true") => return None,
            _ => {
                out.push(',');
                out.push_str(fields.last_written());
            }
        }
    }
    out.push('}');
    Some(out)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use keyway_wire::block_hash::HashKey;

    use super::*;
    use crate::prompt::request::{self, KeyerConfig};

    fn said(body: &[u8]) -> StreamOptions {
        let config = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(16).unwrap() };
        request::read(body, config).stream_options
    }

    fn asked(body: &str) -> Option<String> {
        let bytes = Bytes::copy_from_slice(body.as_bytes());
        let out = place(&bytes, &said(&bytes), false)?.put_into(&bytes);
        Some(String::from_utf8(out.to_vec()).unwrap())
    }

    #[test]
    fn the_question_is_all_that_changes() {
        for (body, want) in [
            (
                r#" { "stream":true, "x":"é"} "#,
                r#" {"stream_options":{"include_usage":true}, "stream":true, "x":"é"} "#,
            ),
            (r#"{"stream_options" : null ,"n":1}"#, r#"{"stream_options" : {"include_usage":true} ,"n":1}"#),
            (r#"{"stream_options":{}}"#, r#"{"stream_options":{"include_usage":true}}"#),
            (
                r#"{"n":1,"stream_options":{"include_usage": false, "include_obfuscation" : false}}"#,
                r#"{"n":1,"stream_options":{"include_usage":true,"include_obfuscation" : false}}"#,
            ),
        ] {
            assert_eq!(asked(body).as_deref(), Some(want));
        }
    }

    #[test]
    fn the_tokens_so_far_are_asked_for_where_they_are_of_use() {
        for (body, want) in [
            (
                r#"{"n":1}"#,
                r#"{"stream_options":{"include_usage":true,"continuous_usage_stats":true},"n":1}"#,
            ),
            (
                r#"{"stream_options":{"continuous_usage_stats":false}}"#,
                r#"{"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#,
            ),
        ] {
            let bytes = Bytes::copy_from_slice(body.as_bytes());
            assert_eq!(place(&bytes, &said(&bytes), true).unwrap().put_into(&bytes), want);
        }
    }

    #[test]
    fn who_asks_is_not_asked_for_and_what_is_not_understood_passes() {
        for body in [
            r#"{"stream_options":{"include_usage":true}}"#,
            r#"{"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#,
            r#"{"stream_options":{"continuous_usage_stats":true}}"#,
            r#"{"stream_options":3}"#,
            r#"{"stream_options":{},"stream_options":{}}"#,
            r#"{"stream_options":{"include_usage":7"#,
            "[]",
            "",
        ] {
            assert_eq!(asked(body), None, "{body}");
        }
    }
}
