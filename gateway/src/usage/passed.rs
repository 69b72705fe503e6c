//! What of an answer has passed, in tokens, where it does not say its usage: each event with content is a
//! token at least, and as many bytes of text as tokens mostly have are one. An event may hold many, and a
//! token may take several bytes or none of its own.

use crate::{
    api::{Api, Said},
    json::Value,
    limits::BYTES_PER_TOKEN,
    sse,
};

/// How deep content lies in an answer: within choices, deltas, calls, functions, and their lists.
const DEPTH_MAX: u32 = 8;

/// Fields of content that are no generated text, whatever they hold.
const NO_CONTENT: [&str; 13] = [
    "role",
    "type",
    "id",
    "call_id",
    "item_id",
    "object",
    "status",
    "index",
    "finish_reason",
    "stop_reason",
    "logprobs",
    "token_ids",
    "annotations",
];

/// Counts what of a stream has passed: events with content, and their bytes of text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamCount {
    events: u64,
    bytes: u64,
}

impl StreamCount {
    /// Takes whole events of an answer of this API.
    pub fn see(&mut self, api: Api, events: &[u8]) {
        for event in sse::events(events) {
            if Said::of(api, &event).generated {
                self.events += 1;
                self.bytes += event.text().map_or(0, |text| of_fields(text, false));
            }
        }
    }

    /// Tokens so far: one for each event, or the text's bytes as tokens, whichever is more.
    pub fn tokens(&self) -> u64 {
        self.events.max(self.bytes.div_ceil(BYTES_PER_TOKEN))
    }
}

/// Tokens of what an unstreamed answer says.
pub fn tokens_of_body(json: &[u8]) -> u64 {
    std::str::from_utf8(json).map_or(0, |text| of_fields(text, true)).div_ceil(BYTES_PER_TOKEN)
}

/// Bytes of text in an answer's fields that hold content.
fn of_fields(json: &str, whole: bool) -> u64 {
    let fields = Value::document(json).into_iter().flatten().map_while(Result::ok);
    let content = fields.filter(|(name, _)| match &**name {
        "choices" | "delta" | "content" | "output" => true,
        // In a stream that is all text so far, or once more.
        "text" => whole,
        _ => false,
    });
    content.map(|(_, value)| text_bytes(value, DEPTH_MAX)).sum()
}

fn text_bytes(value: Value<'_>, depth: u32) -> u64 {
    if depth == 0 {
        return 0;
    }
    if let Some(fields) = value.fields() {
        let content = fields.map_while(Result::ok).filter(|(name, _)| !NO_CONTENT.contains(&&**name));
        return content.map(|(_, value)| text_bytes(value, depth - 1)).sum();
    }
    match value.items() {
        Some(items) => items.map_while(Result::ok).map(|item| text_bytes(item, depth - 1)).sum(),
        None => value.text_or_marks().map_or(0, |text| text.len() as u64),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn passed(api: Api, events: &[serde_json::Value]) -> u64 {
        let mut passed = StreamCount::default();
        for event in events {
            passed.see(api, format!("data: {event}\n\n").as_bytes());
        }
        passed.tokens()
    }

    /// An event of each API that carries this text.
    fn shapes(text: &str) -> [(Api, serde_json::Value); 10] {
        let chat = |delta: serde_json::Value| json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]});
        [
            (Api::Chat, chat(json!({"content": text}))),
            (Api::Chat, chat(json!({"reasoning_content": text}))),
            (
                Api::Chat,
                chat(json!({"tool_calls": [{"index": 0, "id": "call_1", "function": {"arguments": text}}]})),
            ),
            (Api::Completions, json!({"choices": [{"index": 0, "text": text}]})),
            (Api::Responses, json!({"type": "response.output_text.delta", "item_id": "item", "delta": text})),
            (Api::Responses, json!({"type": "response.function_call_arguments.delta", "delta": text})),
            (
                Api::Messages,
                json!({"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}),
            ),
            (
                Api::Messages,
                json!({"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": text}}),
            ),
            (Api::Other, chat(json!({"content": text}))),
            (Api::Other, json!({"type": "transcript.text.delta", "delta": text})),
        ]
    }

    #[test]
    fn what_is_no_content_is_no_token() {
        for (api, event) in [
            (Api::Chat, json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]})),
            (Api::Chat, json!({"choices": [], "usage": {"prompt_tokens": 5}})),
            (Api::Chat, json!({"choices": [{"delta": {}, "finish_reason": "stop"}]})),
            (
                Api::Responses,
                json!({"type": "response.created", "response": {"instructions": "a long word"}}),
            ),
            (Api::Responses, json!({"type": "response.output_text.done", "text": "all once more"})),
            (Api::Messages, json!({"type": "message_start", "message": {"content": []}})),
            (Api::Messages, json!({"type": "ping"})),
        ] {
            assert_eq!(passed(api, std::slice::from_ref(&event)), 0, "{event}");
        }
        assert_eq!(passed(Api::Other, &[json!({"of": "another shape"})]), 1);
    }

    #[test]
    fn an_unstreamed_answer_is_counted_by_what_it_says() {
        let text = "four".repeat(50);
        for body in [
            json!({"id": "x", "choices": [{"message": {"role": "assistant", "content": text}, "logprobs": {"content": [{"token": text}]}}]}),
            json!({"choices": [{"text": text}]}),
            json!({"output": [{"type": "message", "id": "i", "content": [{"type": "output_text", "text": text, "annotations": []}]}]}),
            json!({"type": "message", "content": [{"type": "text", "text": text}]}),
            json!({"text": text}),
        ] {
            assert_eq!(tokens_of_body(body.to_string().as_bytes()), 50, "{body}");
        }
        for body in
            [json!({"data": [{"embedding": [0.1, 0.2], "object": "embedding"}]}), json!([text]), json!("x")]
        {
            assert_eq!(tokens_of_body(body.to_string().as_bytes()), 0, "{body}");
        }
    }

    proptest! {
        /// However a text is cut into events, no less is counted than it has, and no more than a token for
        /// each event beside.
        #[test]
        fn no_cut_makes_it_less(text in "[a-zé\"\\\\]{1,200}", cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..40)) {
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            at.extend([0, text.len()]);
            at.retain(|at| text.is_char_boundary(*at));
            at.sort_unstable();
            at.dedup();
            let pieces: Vec<&str> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            for shape in 0..10 {
                let events: Vec<_> = pieces.iter().map(|piece| shapes(piece)[shape].1.clone()).collect();
                let counted = passed(shapes("")[shape].0, &events);
                let least = (text.len() as u64).div_ceil(BYTES_PER_TOKEN).max(pieces.len() as u64);
                prop_assert_eq!(counted, least, "shape {}", shape);
            }
        }
    }
}
