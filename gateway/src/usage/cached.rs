//! The cached tokens in an answer whose prompt another worker computed: the worker that answers counts what
//! it found itself, which is nothing; the client is told what was found where the prompt was computed. An
//! answer that does not say how much was cached stays as it is. Anthropic's say so beside the rest of the
//! prompt, which grows by as much as what was cached shrinks.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::{json::Value, sse};

/// A JSON answer or chunk with so many cached tokens in its usage; `None` where it tells of none.
pub fn in_json(text: &str, cached_tokens: u64) -> Option<String> {
    let mut numbers = numbers(text, cached_tokens)?;
    numbers.sort_unstable_by_key(|(place, _)| place.start);
    let (mut out, mut copied) = (String::with_capacity(text.len() + 16), 0);
    for (place, number) in numbers {
        out += &text[copied..place.start];
        out += &number.to_string();
        copied = place.end;
    }
    Some(out + &text[copied..])
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

/// The numbers to be written, and where.
fn numbers(text: &str, cached_tokens: u64) -> Option<Vec<(Range<usize>, u64)>> {
    let place = |number: &str| {
        let start = number.as_ptr() as usize - text.as_ptr() as usize;
        start..start + number.len()
    };
    let usage = usage(text)?;
    let of = |name| last(usage.fields()?, name).and_then(count);
    if let Some(read) = of("cache_read_input_tokens") {
        let (rest, created) = (of("input_tokens")?, of("cache_creation_input_tokens"));
        let prompt = [Some(read), Some(rest), created].into_iter().flatten();
        let whole = prompt.fold(0, |sum: u64, (_, tokens)| sum.saturating_add(tokens));
        let cached_tokens = cached_tokens.min(whole);
        let mut numbers = vec![(place(read.0), cached_tokens)];
        // What was cached was not put into the cache by this request, and the other way round.
        let created = created.map_or(0, |(number, tokens)| {
            let tokens = tokens.saturating_add(read.1).saturating_sub(cached_tokens);
            numbers.push((place(number), tokens));
            tokens
        });
        numbers.push((place(rest.0), (whole - cached_tokens).saturating_sub(created)));
        return Some(numbers);
    }
    let details = ["prompt_tokens_details", "input_tokens_details"].into_iter();
    let details = details.filter_map(|name| last(usage.fields()?, name)).find_map(Value::fields)?;
    let (number, _) = last(details, "cached_tokens").and_then(count)?;
    Some(vec![(place(number), cached_tokens)])
}

/// The usage of an answer, or of the answer that an event of a stream tells of.
fn usage(text: &str) -> Option<Value<'_>> {
    let own = last(Value::document(text)?, "usage").filter(|usage| usage.raw() != "null");
    own.or_else(|| {
        let within = ["response", "message"].into_iter();
        within
            .filter_map(|name| last(Value::document(text)?, name))
            .find_map(|of| last(of.fields()?, "usage"))
    })
}

/// A count as it is written, and read.
fn count(value: Value<'_>) -> Option<(&str, u64)> {
    Some((value.raw(), value.raw().parse().ok()?))
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
            (
                r#"{"type":"response.completed","response":{"usage":{"input_tokens":90,"input_tokens_details":{"cached_tokens":3}}}}"#,
                Some(
                    r#"{"type":"response.completed","response":{"usage":{"input_tokens":90,"input_tokens_details":{"cached_tokens":64}}}}"#,
                ),
            ),
            (
                r#"{"type":"message","usage":{"input_tokens":80,"output_tokens":2,"cache_read_input_tokens":10}}"#,
                Some(
                    r#"{"type":"message","usage":{"input_tokens":26,"output_tokens":2,"cache_read_input_tokens":64}}"#,
                ),
            ),
            (
                r#"{"type":"message_start","message":{"usage":{"cache_read_input_tokens":0,"input_tokens":90}}}"#,
                Some(
                    r#"{"type":"message_start","message":{"usage":{"cache_read_input_tokens":64,"input_tokens":26}}}"#,
                ),
            ),
            (
                r#"{"usage":{"input_tokens":4,"cache_creation_input_tokens":96,"cache_read_input_tokens":0}}"#,
                Some(
                    r#"{"usage":{"input_tokens":4,"cache_creation_input_tokens":32,"cache_read_input_tokens":64}}"#,
                ),
            ),
            (
                r#"{"usage":{"input_tokens":30,"cache_creation_input_tokens":16,"cache_read_input_tokens":32}}"#,
                Some(
                    r#"{"usage":{"input_tokens":14,"cache_creation_input_tokens":0,"cache_read_input_tokens":64}}"#,
                ),
            ),
            (
                r#"{"usage":{"input_tokens":4,"cache_creation_input_tokens":null,"cache_read_input_tokens":96}}"#,
                Some(
                    r#"{"usage":{"input_tokens":36,"cache_creation_input_tokens":null,"cache_read_input_tokens":64}}"#,
                ),
            ),
            (
                r#"{"usage":{"input_tokens":20,"cache_read_input_tokens":0}}"#,
                Some(r#"{"usage":{"input_tokens":0,"cache_read_input_tokens":20}}"#),
            ),
            (r#"{"type":"message_start","message":{"usage":{"input_tokens":90}}}"#, None),
            (r#"{"type":"message_delta","usage":{"output_tokens":9,"cache_read_input_tokens":0}}"#, None),
            (r#"{"type":"response.created","response":{"usage":null}}"#, None),
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
