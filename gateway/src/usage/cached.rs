//! The cached tokens in an answer whose prompt another worker computed: the worker that answers counts what
//! it found itself, which is nothing; the client is told what was found where the prompt was computed. An
//! answer that does not say how much was cached stays as it is.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::{json::Value, sse};

/// A JSON answer or chunk with so many cached tokens in its usage; `None` where it tells of none.
pub fn in_json(text: &str, cached_tokens: u64) -> Option<String> {
    let Range { start, end } = place(text)?;
    Some([&text[..start], &cached_tokens.to_string(), &text[end..]].concat())
}

/// Whole events of a stream, likewise.
pub fn in_events(events: Bytes, cached_tokens: u64) -> Bytes {
    let mut out = BytesMut::new();
    let mut copied = 0;
    for event in sse::events(&events) {
        let Some(data) = event.text() else { continue };
        if let Some(told) = in_json(data, cached_tokens) {
            // An event's text is a part of the bytes that it came in.
            let start = data.as_ptr() as usize - events.as_ptr() as usize;
            out.extend_from_slice(&events[copied..start]);
            out.extend_from_slice(told.as_bytes());
            copied = start + data.len();
        }
    }
    if copied == 0 {
        return events;
    }
    out.extend_from_slice(&events[copied..]);
    out.freeze()
}

/// Where the number stands.
fn place(text: &str) -> Option<Range<usize>> {
    let usage = last(Value::document(text)?, "usage")?;
    let details = last(usage.fields()?, "prompt_tokens_details")?;
    let number = last(details.fields()?, "cached_tokens")?.raw();
    let start = number.as_ptr() as usize - text.as_ptr() as usize;
    number.starts_with(|c: char| c.is_ascii_digit()).then_some(start..start + number.len())
}

/// The value of the last field of a name, which is the one that counts.
fn last<'a>(fields: crate::json::Fields<'a>, name: &str) -> Option<Value<'a>> {
    fields.filter_map(Result::ok).filter(|(own, _)| own == name).last().map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_all_that_changes() {
        for (text, want) in [
            (
                r#"{"id":"a","usage":{"prompt_tokens":90, "prompt_tokens_details":{"cached_tokens":0}}} "#,
                Some(
                    r#"{"id":"a","usage":{"prompt_tokens":90, "prompt_tokens_details":{"cached_tokens":64}}} "#,
                ),
            ),
            (r#"{"usage":{"prompt_tokens_details":null}}"#, None),
            (r#"{"usage":{"prompt_tokens_details":{"cached_tokens":null}}}"#, None),
            (r#"{"usage":null}"#, None),
            (r#"{"text":"\"cached_tokens\":0"}"#, None),
            ("{", None),
        ] {
            assert_eq!(in_json(text, 64).as_deref(), want, "{text}");
        }
    }

    #[test]
    fn events_without_it_stay_as_they_are() {
        let with = |tokens: u32| {
            format!("data: {{\"usage\":{{\"prompt_tokens_details\":{{\"cached_tokens\":{tokens}}}}}}}\n\n")
        };
        let around = "data: {\"choices\":[]}\n\n";
        let events = Bytes::from([around, &with(0), ": c\n\n", &with(1), "data: [DONE]\n\n"].concat());
        let want = [around, &with(128), ": c\n\n", &with(128), "data: [DONE]\n\n"].concat();
        assert_eq!(in_events(events, 128), want);
        let plain = Bytes::from(around);
        assert_eq!(in_events(plain.clone(), 128).as_ptr(), plain.as_ptr(), "nothing is copied");
    }
}
