//! Reads the events of one stream. Those of tokens are alike but for their text: what an event says is known
//! without parsing it again where it is the one before with another text.

use std::borrow::Cow;

use keyway_wire::openai::Usage;
use serde::Deserialize;

use super::{Bad, Chunk, EventContent, Str, quick};
use crate::client::sse;

/// What is kept between the events of a stream.
#[derive(Debug, Default)]
pub struct Reader {
    /// Of the last event with a text: its name, and its data up to the text and behind it. No tail: there was
    /// none.
    name: Vec<u8>,
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl Reader {
    /// Reads one event; `so_far` are the counts that events before it told.
    pub fn read(&mut self, event: sse::Event<'_>, so_far: Option<&Usage>) -> Result<EventContent, Bad> {
        if self.is_alike(event) {
            return Ok(EventContent { generated: true, ..EventContent::default() });
        }
        let quick = if event.name.is_empty() { quick::read(event.data, so_far) } else { None };
        let (said, text) = quick.map_or_else(|| EventContent::read_with_text(event, so_far), Ok)?;
        let is_token = said == EventContent { generated: true, ..EventContent::default() };
        if let (true, Some(text)) = (is_token, text) {
            self.keep(event, text);
        }
        Ok(said)
    }

    /// Whether an event is the one before with another text, neither empty nor written with escapes: JSON of
    /// the same shape, in which that one string differs.
    fn is_alike(&self, event: sse::Event<'_>) -> bool {
        let between = |data: &[u8]| {
            let text = data.strip_prefix(&*self.head)?.strip_suffix(&*self.tail)?;
            Some(!text.is_empty() && is_plain(text))
        };
        !self.tail.is_empty() && event.name == self.name && between(event.data) == Some(true)
    }

    /// Keeps what stands around `text`, which is a part of the event's data.
    fn keep(&mut self, event: sse::Event<'_>, text: &str) {
        let at = (text.as_ptr() as usize).wrapping_sub(event.data.as_ptr() as usize);
        let parts = event.data.get(..at).zip(event.data.get(at.wrapping_add(text.len())..));
        let Some((head, tail)) = parts else { return };
        for (kept, new) in [(&mut self.name, event.name), (&mut self.head, head), (&mut self.tail, tail)] {
            kept.clear();
            kept.extend_from_slice(new);
        }
    }
}

/// Whether these bytes may stand between the quotes of a JSON string as they are.
fn is_plain(text: &[u8]) -> bool {
    let stands = |&byte: &u8| byte >= b' ' && byte != b'"' && byte != b'\\';
    text.iter().all(stands) && std::str::from_utf8(text).is_ok()
}

impl<'a> Chunk<'a> {
    /// The text of an event's one choice, delta or block, where it is written without escapes.
    pub(super) fn plain_text(&self) -> Option<&'a str> {
        #[derive(Deserialize)]
        struct Block<'a> {
            #[serde(borrow)]
            text: Option<Str<'a>>,
        }
        let borrowed = |text: Str<'a>| if let Cow::Borrowed(text) = text.0 { Some(text) } else { None };
        match (self.choices.as_deref(), self.delta) {
            (Some([choice]), _) => choice.plain_text(),
            (None, Some(delta)) => match serde_json::from_str(delta.get()) {
                Ok(text) => borrowed(text),
                Err(_) => borrowed(serde_json::from_str::<Block<'a>>(delta.get()).ok()?.text?),
            },
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn event(data: &[u8]) -> sse::Event<'_> {
        sse::Event { name: b"", data }
    }

    /// Events of tokens, as the four APIs write them.
    fn shapes() -> impl Strategy<Value = (&'static str, &'static str)> {
        prop::sample::select(vec![
            (r#"{"id":"a","choices":[{"index":0,"delta":{"content":""#, r#""},"finish_reason":null}]}"#),
            (r#"{"choices":[{"text":""#, r#"","token_ids":[7]}],"usage":null}"#),
            (r#"{"choices":[{"delta":{"role":"assistant","content":""#, r#"","refusal":"no"}}]}"#),
            (r#"{"choices":[{"delta":{"content":""#, r#""}},{"delta":{"content":"b"}}]}"#),
            (r#"{"choices":[{"delta":{"content":""#, r#""},"finish_reason":"stop"}]}"#),
            (r#"{"choices":[{"delta":{"content":""#, r#""}}],"usage":{"prompt_tokens":9}}"#),
            (r#"{"choices":[{"delta":{"content":""#, r#""}}],"error":"dead"}"#),
            (r#"{"type":"response.output_text.delta","delta":""#, r#""}"#),
            (r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":""#, r#""}}"#),
            (r#"{"type":"content_block_delta","delta":{"type":""#, r#"","text":"x"}}"#),
            (r#"{"type":"message_delta","delta":{"stop_reason":""#, r#""}}"#),
        ])
    }

    fn texts() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            ".{0,6}".prop_map(String::into_bytes),
            "[a-z ]{0,6}".prop_map(String::into_bytes),
            prop::collection::vec(any::<u8>(), 0..4),
            prop::sample::select(vec!["\"", "\\", "\\\"", "\\n", "a\",\"error\":\"b", "\n", "\u{7f}", "é"])
                .prop_map(|text| text.as_bytes().to_vec()),
        ]
    }

    proptest! {
        /// Whatever came before, an event says what it says by itself.
        #[test]
        fn events_in_a_row_say_what_each_says(
            events in prop::collection::vec((shapes(), texts(), 0u8..6), 1..12),
        ) {
            let mut reader = Reader::default();
            for ((head, tail), text, other) in events {
                let data = [head.as_bytes(), &text, tail.as_bytes()].concat();
                // As a rule the same event follows with another text.
                for text in [&text[..], b"x", b"", b"\xc3\xa9", b"\\u0041"].into_iter().skip(usize::from(other % 3)) {
                    let data = if other == 5 { data.clone() } else { [head.as_bytes(), text, tail.as_bytes()].concat() };
                    let got = reader.read(event(&data), None);
                    prop_assert_eq!(got, EventContent::read(event(&data), None));
                }
            }
        }
    }

    #[test]
    fn an_event_like_the_one_before_is_not_parsed() {
        let data = |text: &str| json!({"choices": [{"delta": {"content": text}}]}).to_string();
        let mut reader = Reader::default();
        let mut is_alike = |text: &str| {
            let data = data(text);
            let is_alike = reader.is_alike(event(data.as_bytes()));
            reader.read(event(data.as_bytes()), None).unwrap();
            is_alike
        };
        let got = ["a", "b", "", "c", "a \"quote\"", "d", "é"].map(&mut is_alike);
        assert_eq!(got, [false, true, false, true, false, true, true]);
        assert!(!reader.is_alike(sse::Event { name: b"error", data: data("a").as_bytes() }));
    }
}
