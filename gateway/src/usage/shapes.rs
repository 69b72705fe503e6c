//! The shapes in which answers say their usage: OpenAI's for chat completions, completions and embeddings
//! (`prompt_tokens`), for responses, audio and images (`input_tokens`, within `response` in a stream),
//! Anthropic's for messages (within `message` when a stream begins; what is cached counted beside
//! `input_tokens`), and SGLang's own (`meta_info`).
//!
//! Formats: OpenAI's API reference, Anthropic's, vLLM's and SGLang's servers.

use std::num::ParseIntError;

use keyway_wire::openai::{PromptTokensDetails, Usage};

use super::NAME;
use crate::json::{Fields, Value};

/// The usage in a chunk or whole answer.
pub fn of(json: &[u8]) -> Option<Usage> {
    let text = simdutf8::basic::from_utf8(json).ok()?;
    Value::last_object_of_document(text, &NAME, read).or_else(|| {
        let mut within = None;
        for (name, value) in Value::document(text)?.map_while(Result::ok) {
            match &*name {
                "usage" => return read(&mut value.fields()?),
                "response" | "message" => within = within.or_else(|| field(value, "usage")),
                "meta_info" => within = within.or(Some(value)),
                _ => {}
            }
        }
        read(&mut within?.fields()?)
    })
}

/// The usage at the end of an answer whose beginning is not there.
pub(super) fn in_tail(json: &[u8]) -> Option<Usage> {
    // It may begin within a character.
    let whole = json.iter().position(|byte| !matches!(byte, 0x80..0xc0))?;
    Value::last_object_of_document(std::str::from_utf8(&json[whole..]).ok()?, &NAME, read)
}

fn field<'a>(object: Value<'a>, name: &str) -> Option<Value<'a>> {
    object.fields()?.map_while(Result::ok).find(|(field, _)| field == name).map(|(_, value)| value)
}

/// As serde would, with null for what is not there: what is not there is 0, what is no number makes it no
/// usage.
fn read(usage: &mut Fields<'_>) -> Option<Usage> {
    let (mut prompt, mut completion, mut total, mut input, mut output) = (None, None, None, None, None);
    // Of Anthropic's prompts, what is in a cache or is put there is not among their `input_tokens`.
    let (mut created, mut cached_beside) = (None, None);
    let (mut cached, mut details) = (None, None);
    for field in usage {
        let (name, value) = field.ok()?;
        let count = match &*name {
            "prompt_tokens" => &mut prompt,
            "completion_tokens" => &mut completion,
            "total_tokens" => &mut total,
            "input_tokens" => &mut input,
            "output_tokens" => &mut output,
            "cache_creation_input_tokens" => &mut created,
            "cache_read_input_tokens" => &mut cached_beside,
            // SGLang's own.
            "cached_tokens" => &mut cached,
            "prompt_tokens_details" | "input_tokens_details" => {
                if value.raw() != "null" {
                    let mut fields = value.fields()?.map_while(Result::ok);
                    let cached = fields.find(|(name, _)| name == "cached_tokens");
                    details = Some(cached.map_or(Ok(None), |(_, cached)| number(cached)).ok()?);
                }
                continue;
            }
            _ => continue,
        };
        *count = number(value).ok()?;
    }
    let beside = [created, cached_beside].into_iter().flatten().fold(0, u64::saturating_add);
    let cached_tokens = cached_beside.or(details.unwrap_or(cached));
    Some(Usage {
        prompt_tokens: prompt.max(input).unwrap_or(0).saturating_add(beside),
        completion_tokens: completion.max(output).unwrap_or(0),
        total_tokens: total.unwrap_or(0),
        prompt_tokens_details: (details.is_some() || cached_tokens.is_some())
            .then_some(PromptTokensDetails { cached_tokens }),
    })
}

/// A count, if it is said to be there; else what makes it no usage.
fn number(value: Value<'_>) -> Result<Option<u64>, ParseIntError> {
    if value.raw() == "null" { Ok(None) } else { value.raw().parse().map(Some) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What answers say, and the prompt's tokens, the answer's, and the cached ones in it.
    const SAID: [(&str, u64, u64, Option<u64>); 14] = [
        (r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}}"#, 9, 2, None),
        (
            r#"{"object":"response","output":[],"usage":{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":4},"output_tokens_details":null}}"#,
            9,
            2,
            Some(4),
        ),
        (
            r#"{"type":"response.completed","response":{"output":[{"usage":1}],"usage":{"input_tokens":9,"output_tokens":2}},"sequence_number":7}"#,
            9,
            2,
            None,
        ),
        (
            r#"{"type":"response.incomplete","response":{"usage":{"input_tokens":9,"output_tokens":2}}}"#,
            9,
            2,
            None,
        ),
        (
            r#"{"type":"response.failed","response":{"error":{},"usage":{"input_tokens":9,"output_tokens":0}}}"#,
            9,
            0,
            None,
        ),
        (
            r#"{"type":"message","content":[],"usage":{"input_tokens":9,"output_tokens":2,"cache_creation_input_tokens":null,"cache_read_input_tokens":null}}"#,
            9,
            2,
            None,
        ),
        (
            r#"{"type":"message","usage":{"input_tokens":9,"cache_creation_input_tokens":100,"cache_read_input_tokens":1000,"output_tokens":2,"service_tier":"standard","cache_creation":{"ephemeral_5m_input_tokens":100}}}"#,
            1_109,
            2,
            Some(1_000),
        ),
        (
            r#"{"type":"message_start","message":{"content":[],"usage":{"input_tokens":9,"output_tokens":1}}}"#,
            9,
            1,
            None,
        ),
        (
            r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":20}}"#,
            0,
            20,
            None,
        ),
        (
            r#"{"object":"list","data":[],"model":"m","usage":{"prompt_tokens":9,"total_tokens":9,"completion_tokens":null,"prompt_tokens_details":null}}"#,
            9,
            0,
            None,
        ),
        (
            r#"{"text":"hi","usage":{"type":"tokens","input_tokens":9,"output_tokens":2,"total_tokens":11,"input_token_details":{"audio_tokens":9}}}"#,
            9,
            2,
            None,
        ),
        (
            r#"{"created":1,"data":[{"b64_json":"x"}],"usage":{"input_tokens":9,"output_tokens":2,"total_tokens":11}}"#,
            9,
            2,
            None,
        ),
        (
            r#"{"type":"transcript.text.done","text":"hi","usage":{"type":"tokens","input_tokens":9,"output_tokens":2}}"#,
            9,
            2,
            None,
        ),
        (
            r#"{"text":"hi","meta_info":{"id":"x","prompt_tokens":9,"completion_tokens":2,"cached_tokens":4,"finish_reason":null}}"#,
            9,
            2,
            Some(4),
        ),
    ];

    #[test]
    fn every_api_s_usage_is_read() {
        for (json, prompt, completion, cached) in SAID {
            let usage = of(json.as_bytes()).unwrap_or_default();
            assert_eq!(
                (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens()),
                (prompt, completion, cached),
                "{json}"
            );
        }
        for json in [
            r#"{"usage":null}"#,
            r#"{"type":"response.created","response":{"usage":null}}"#,
            r#"{"choices":[{"message":{"content":"\"usage\":{\"input_tokens\":5}"}}]}"#,
            r#"{"text":"hi","usage":{"type":"duration","seconds":3}}"#,
            "[]",
        ] {
            assert!(of(json.as_bytes()).is_none_or(|usage| usage == Usage::default()), "{json}");
        }
    }

    proptest! {
        /// What serde reads of engines' answers is read, wherever in them the usage stands.
        #[test]
        fn it_is_what_serde_reads(
            counts in prop::collection::vec(prop_oneof!["0|[1-9][0-9]{0,8}", "null", "-1", "1\\.5", "\"1\"", "18446744073709551616"], 3),
            details in prop_oneof![Just(String::new()), "null", "\\{\\}", "\\{\"cached_tokens\":(7|null|-1)\\}", "[0-9]"],
            before in prop::sample::select(vec!["", "\"choices\":[{\"usage\":{\"prompt_tokens\":99}}],", "\"id\":\"\\\"usage\\\":{\","]),
            after in prop::sample::select(vec!["", ",\"x\":null", ",\"y\":{\"usage\":{}}", ",\"s\":\"usage\""]),
        ) {
            #[derive(serde::Deserialize)]
            struct Carrier {
                usage: Option<Usage>,
            }
            let details = if details.is_empty() { details } else { format!(",\"prompt_tokens_details\":{details}") };
            let [prompt, completion, total] = &counts[..] else { unreachable!("three") };
            let written = |prompt: &str, completion: &str, total: &str| format!(
                "{{{before}\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{completion},\"total_tokens\":{total}{details}}}{after}}}"
            );
            let json = written(prompt, completion, total);
            // What is null is not there, which serde does not take for a number.
            let number = |count: &String| if count == "null" { "0".to_owned() } else { count.clone() };
            let plain = written(&number(prompt), &number(completion), &number(total));
            let serde = serde_json::from_str::<Carrier>(&plain).ok().and_then(|carrier| carrier.usage);
            prop_assert_eq!(of(json.as_bytes()), serde, "{}", json);
        }
    }
}
