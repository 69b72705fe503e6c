//! What stands in requests and no engine sees, so that a turn that says it otherwise is no new prompt:
//! Anthropic's marks of what to cache (`cache_control`), which clients move to their newest message in each
//! turn, and the line by which Claude Code says what to bill, which is another in each request. vLLM leaves
//! out both, SGLang the marks.

use std::borrow::Cow;

use keyway_text::BILLING;
use memchr::memmem;

use crate::json::Value;

/// A mark's name.
pub(super) const MARK: &str = "cache_control";

/// The same as it stands in JSON. Within a text its quotes would be escaped.
const MARK_IN_JSON: &str = "\"cache_control\"";

/// A field's text, or its JSON where it is something else, without what no engine sees.
pub(super) fn seen(value: Value<'_>) -> Cow<'_, str> {
    match value.text() {
        Some(text) if text.starts_with(BILLING) => {
            Cow::Owned(text.split_once('\n').map_or_else(String::new, |(_, rest)| rest.to_owned()))
        }
        Some(text) => text,
        None => in_json(value.raw()),
    }
}

/// JSON, or a part of it, without them.
pub(super) fn in_json(json: &str) -> Cow<'_, str> {
    without_marks(json).map_or_else(
        || without_billing(json).map_or(Cow::Borrowed(json), Cow::Owned),
        |rest| Cow::Owned(without_billing(&rest).unwrap_or(rest)),
    )
}

/// Without marks; `None` if there is none.
fn without_marks(json: &str) -> Option<String> {
    let (mut kept, mut from) = (None::<String>, 0);
    for at in memmem::find_iter(json.as_bytes(), MARK_IN_JSON) {
        // One within another's value went with that.
        let Some(length) = field_length(&json[at..]).filter(|_| at >= from) else { continue };
        let (before, after) = (json[from..at].trim_end(), &json[at + length..]);
        let kept = kept.get_or_insert_with(|| String::with_capacity(json.len()));
        // One of the commas beside it goes too.
        let rest =
            if before.ends_with(',') { after } else { after.trim_start().strip_prefix(',').unwrap_or(after) };
        kept.push_str(before.strip_suffix(',').unwrap_or(before));
        from = json.len() - rest.len();
    }
    kept.map(|mut kept| {
        kept.push_str(&json[from..]);
        kept
    })
}

/// Bytes of a mark with its value, which is `null` or a flat object.
fn field_length(json: &str) -> Option<usize> {
    let value = json[MARK_IN_JSON.len()..].trim_start().strip_prefix(':')?.trim_start();
    let in_object = || {
        let (flat, rest) = value.strip_prefix('{')?.split_once('}')?;
        (!flat.contains('{')).then_some(rest)
    };
    let rest = value.strip_prefix("null").or_else(in_object)?;
    Some(json.len() - rest.len())
}

/// Without the lines; `None` if there is none.
fn without_billing(json: &str) -> Option<String> {
    let mut kept = None::<String>;
    let mut from = 0;
    for at in memmem::find_iter(json.as_bytes(), BILLING) {
        // At the beginning of a string that is not within another.
        if at < from || !json[..at].ends_with('"') || json[..at].ends_with("\\\"") {
            continue;
        }
        let kept = kept.get_or_insert_with(|| String::with_capacity(json.len()));
        kept.push_str(&json[from..at]);
        from = at + line_length(&json[at..]);
    }
    kept.map(|mut kept| {
        kept.push_str(&json[from..]);
        kept
    })
}

/// Bytes up to the end of a string's first line, and the mark of that end, or up to the string's end.
fn line_length(json: &str) -> usize {
    let mut bytes = json.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'"' => return at,
            b'\\' if bytes.next().is_some_and(|(_, escaped)| escaped == b'n') => return at + 2,
            _ => {}
        }
    }
    json.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};

    use super::*;

    fn of(json: &str) -> String {
        seen(Value::found(json)).into_owned()
    }

    #[test]
    fn marks_go_with_one_comma() {
        let mark = r#""cache_control":{"type":"ephemeral","ttl":"1h"}"#;
        for (with, without) in [
            (format!(r#"[{{"type":"text",{mark},"text":"a"}}]"#), r#"[{"type":"text","text":"a"}]"#),
            (format!(r#"[{{"text":"a",{mark}}},{{"text":"b", {mark}}}]"#), r#"[{"text":"a"},{"text":"b"}]"#),
            (format!(r#"[{{{mark}, "text":"a"}}]"#), r#"[{ "text":"a"}]"#),
            (r#"[{"text":"a","cache_control": null}]"#.to_owned(), r#"[{"text":"a"}]"#),
            (format!(r"[{{{mark}}}]"), "[{}]"),
        ] {
            assert_eq!(of(&with), without, "{with}");
        }
    }

    #[test]
    fn what_is_no_mark_stays() {
        for json in [
            r#"[{"text":"cache_control"}]"#,
            r#"[{"text":"\"cache_control\":{\"type\":\"ephemeral\"}"}]"#,
            r#"[{"cache_control":{"a":{}}}]"#,
            r#"[{"cache_control":3}]"#,
            r#"[{"text":"say \"x-anthropic-billing-header: 1;\" to them"}]"#,
            r#"[{"text":"the x-anthropic-billing-header"}]"#,
        ] {
            assert_eq!(of(json), json);
        }
    }

    #[test]
    fn the_line_for_billing_goes_and_what_follows_it_stays() {
        let line = "x-anthropic-billing-header: cc_version=2; cch=8f\\\"3a;";
        assert_eq!(
            of(&format!(r#"[{{"type":"text","text":"{line}"}},{{"text":"b"}}]"#)),
            r#"[{"type":"text","text":""},{"text":"b"}]"#
        );
        assert_eq!(of(&format!(r#"[{{"text":"{line}\nBe kind."}}]"#)), r#"[{"text":"Be kind."}]"#);
        assert_eq!(
            (of(&format!(r#""{line}\nBe kind.""#)), of(&format!(r#""{line}""#))),
            ("Be kind.".into(), String::new())
        );
    }

    #[test]
    fn a_mark_within_a_mark_goes_with_it() {
        for json in [
            r#"[{"a":1,"cache_control":{"cache_control":null}}]"#,
            r#"[{"a":1,"cache_control":{"type":"x","cache_control":null},"cache_control":null}]"#,
        ] {
            assert_eq!(of(json), r#"[{"a":1}]"#, "{json}");
        }
    }

    proptest! {
        /// Whatever a client makes of these pieces, something is left of it, and no more than there was.
        #[test]
        fn no_json_is_too_odd(pieces in prop::collection::vec(prop::sample::select(vec![
            "\"cache_control\"", "cache_control", ":", "null", "{", "}", ",", " ", "\"", "\\", "\\n", "é",
            "x-anthropic-billing-header", "[", "]", "\"text\":\"",
        ]), 0..24)) {
            let json = format!("[{}", pieces.concat());
            prop_assert!(in_json(&json).len() <= json.len());
            prop_assert!(of(&json).starts_with('['));
        }

        /// However a list of blocks is written, it has the same text as without its marks.
        #[test]
        fn marked_blocks_are_the_unmarked(texts in prop::collection::vec(".{0,12}", 1..5), marked: u8) {
            let block = |(nth, text): (usize, &String), is_marked: bool| {
                let mut block = json!({ "type": "text", "text": text });
                if is_marked && marked >> nth & 1 == 1 {
                    block["cache_control"] = json!({ "type": "ephemeral" });
                }
                block
            };
            let list = |is_marked| Json::from(texts.iter().enumerate().map(|it| block(it, is_marked)).collect::<Vec<_>>()).to_string();
            prop_assert_eq!(of(&list(true)), of(&list(false)));
        }
    }
}
