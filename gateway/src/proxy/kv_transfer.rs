//! The bodies of a request whose prompt one worker computes and another answers, by each contract that
//! engines have for it, and what the first says that matters to the second; and of one whose worker fetches
//! what another has cached. Sends nothing.

pub(super) mod mooncake;
pub(super) mod nixl;
pub(super) mod peer;
pub(super) mod sglang;

use std::borrow::Cow;

use bytes::{BufMut, Bytes, BytesMut};
use keyway_wire::openai::Usage;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{named_body, resume::ask::holds_several};
use crate::{api::Api, config::KvTransfer, json::Value, machine::heap, usage};

/// vLLM's field of a body that says where KV is to come from or to go, and of an answer where it is.
const PARAMS: &str = "kv_transfer_params";

/// The first of two legs of which one follows the other.
#[derive(Debug)]
pub(super) struct FirstLeg {
    /// What the worker is sent that is to compute the prompt.
    pub(super) body: Bytes,
    /// The name by which its KV is fetched, where the gateway gives it.
    pub(super) transfer_id: Option<String>,
}

impl FirstLeg {
    /// That of a request; `None` where it has several answers, says itself where KV comes from, or where the
    /// legs do not follow each other.
    pub(super) fn of(contract: KvTransfer, api: Api, body: &[u8]) -> Option<Self> {
        let (params, transfer_id) = match contract {
            KvTransfer::Nixl => (nixl::KEEP.to_owned(), None),
            KvTransfer::Mooncake => {
                let id = mooncake::new_transfer_id();
                (mooncake::keep(&id), Some(id))
            }
            KvTransfer::Sglang => return None,
        };
        Some(Self { body: one_token(api, body, &params)?, transfer_id })
    }
}

/// What a vLLM that computed a prompt says of it.
#[derive(Debug, Deserialize)]
pub(super) struct Prefilled {
    /// Where its KV is, in the worker's own words.
    #[serde(rename = "kv_transfer_params")]
    pub(super) params: Option<Box<RawValue>>,
    /// Its tokens, and how many were found cached.
    #[serde(skip)]
    pub(super) usage: Option<Usage>,
    #[serde(default)]
    choices: Vec<Ended>,
    /// How a message ended.
    stop_reason: Option<String>,
    /// How a response did.
    status: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Ended {
    finish_reason: Option<String>,
}

impl Prefilled {
    /// What an answer says, in any API; `None` of what is none.
    pub(super) fn read(answer: &[u8]) -> Option<Self> {
        let said: Self = serde_json::from_slice(answer).ok()?;
        Some(Self { usage: usage::of(answer), ..said })
    }

    /// Whether its token ended the answer, rather than the limit of one token.
    fn has_ended(&self) -> bool {
        let is_other = |said: &Option<String>, limit| said.as_deref().is_some_and(|said| said != limit);
        self.choices.iter().any(|choice| choice.finish_reason.as_deref() != Some("length"))
            || is_other(&self.stop_reason, "max_tokens")
            || is_other(&self.status, "incomplete")
    }
}

/// The body that has a prompt computed and its KV kept: one token, no stream, and nothing that is stored.
/// `None` where the request has several answers, or says itself where KV comes from.
fn one_token(api: Api, body: &[u8], params: &str) -> Option<Bytes> {
    let text = std::str::from_utf8(body).ok().filter(|_| has_one_prompt(api, body))?;
    let mut out = BytesMut::with_capacity(heap::room_for(body.len() + 192));
    out.put_slice(b"{");
    let mut limit = None;
    for field in Value::document(text)? {
        let (name, value) = field.ok()?;
        let given = value.raw() != "null";
        match name.as_ref() {
            // The newer of the two is the one that counts, in engines too.
            "max_completion_tokens" if given => limit = Some("max_completion_tokens"),
            "stream" | "stream_options" | "min_tokens" | "max_tokens" | "max_completion_tokens" | PARAMS => {}
            "max_output_tokens" | "store" | "background" if api == Api::Responses => {}
            _ => {
                // A name is always written.
                out.put_slice(serde_json::to_string(name.as_ref()).unwrap_or_default().as_bytes());
                out.put_slice(b":");
                out.put_slice(value.raw().as_bytes());
                out.put_slice(b",");
            }
        }
    }
    let end = match api {
        Api::Responses => r#""max_output_tokens":1,"store":false"#.to_owned(),
        _ => format!(r#""{}":1"#, limit.unwrap_or("max_tokens")),
    };
    out.put_slice(format!(r#"{end},"stream":false,"{PARAMS}":{params}}}"#).as_bytes());
    Some(out.freeze())
}

/// Whether a body has one prompt and one answer to it, and says nothing itself of where KV comes from. What
/// goes on from a stored response has only a part of its prompt.
pub(super) fn has_one_prompt(api: Api, body: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(body) else { return false };
    let is_one = |(name, value): (Cow<'_, str>, Value<'_>)| {
        let given = value.raw() != "null";
        match name.as_ref() {
            PARAMS | "prompt_embeds" | "prompt_logprobs" => !given,
            "previous_response_id" | "conversation" | "prompt" if api == Api::Responses => !given,
            "background" if api == Api::Responses => value.raw() != "true",
            "n" | "best_of" => !given || value.raw() == "1",
            "echo" | "use_beam_search" => value.raw() != "true",
            "prompt" => !holds_several(value),
            _ => true,
        }
    };
    Value::document(text).is_some_and(|mut fields| fields.all(|field| field.is_ok_and(is_one)))
}

/// The client's own body, with where the prompt's KV is. Of two such fields engines would take the last, so
/// there is one.
pub(super) fn decode_body(body: &Bytes, params: &str) -> Bytes {
    named_body::with_field(&named_body::without(body, &[PARAMS]), PARAMS, params)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};

    use super::*;

    fn prefill(body: &str) -> Option<Json> {
        prefill_of(Api::Chat, body)
    }

    fn prefill_of(api: Api, body: &str) -> Option<Json> {
        Some(serde_json::from_slice(&FirstLeg::of(KvTransfer::Nixl, api, body.as_bytes())?.body).unwrap())
    }

    #[test]
    fn what_has_several_answers_or_its_own_params_is_computed_in_one_place() {
        for body in [
            json!({"n": 2}),
            json!({"best_of": 3}),
            json!({"prompt": ["a", "b"]}),
            json!({"prompt": [[1], [2]]}),
            json!({"echo": true}),
            json!({"prompt_logprobs": 1}),
            json!({"kv_transfer_params": {"do_remote_prefill": true}}),
        ] {
            assert_eq!(prefill(&body.to_string()), None, "{body}");
        }
        assert_eq!((prefill("[]"), prefill("{"), prefill("")), (None, None, None));
        assert!(FirstLeg::of(KvTransfer::Sglang, Api::Chat, b"{}").is_none(), "its legs go at once");
    }

    #[test]
    fn agents_apis_have_first_legs_in_their_own_words() {
        let keep: Json = serde_json::from_str(nixl::KEEP).unwrap();
        let body = r#"{"system":"s","thinking":{"type":"enabled","budget_tokens":2048},"max_tokens":4096,"stream":true}"#;
        assert_eq!(
            prefill_of(Api::Messages, body),
            Some(
                json!({"system": "s", "thinking": {"type": "enabled", "budget_tokens": 2048}, "max_tokens": 1,
                        "stream": false, "kv_transfer_params": keep})
            )
        );
        let body = r#"{"input":"i","max_output_tokens":90,"store":true,"background":false,"stream":true,"previous_response_id":null}"#;
        assert_eq!(
            prefill_of(Api::Responses, body),
            Some(json!({"input": "i", "max_output_tokens": 1, "store": false, "stream": false,
                        "previous_response_id": null, "kv_transfer_params": keep}))
        );
        for body in [
            json!({"previous_response_id": "resp_1"}),
            json!({"conversation": "conv_1"}),
            json!({"prompt": {"id": "p"}}),
            json!({"background": true}),
        ] {
            assert_eq!(prefill_of(Api::Responses, &body.to_string()), None, "{body}");
        }
    }

    #[test]
    fn every_api_says_how_its_token_ended_and_what_was_cached() {
        for (answer, cached, has_ended) in [
            (
                r#"{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}"#,
                Some(4),
                false,
            ),
            (r#"{"choices":[{"finish_reason":"stop"}]}"#, None, true),
            (
                r#"{"stop_reason":"max_tokens","usage":{"input_tokens":5,"cache_read_input_tokens":4}}"#,
                Some(4),
                false,
            ),
            (r#"{"stop_reason":"end_turn"}"#, None, true),
            (
                r#"{"status":"incomplete","usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4}}}"#,
                Some(4),
                false,
            ),
            (r#"{"status":"completed","usage":null}"#, None, true),
        ] {
            let said = Prefilled::read(answer.as_bytes()).unwrap();
            let usage = said.usage.clone().unwrap_or_default();
            assert_eq!((usage.cached_tokens(), said.has_ended()), (cached, has_ended), "{answer}");
        }
        assert!(Prefilled::read(b"[1").is_none());
    }

    #[test]
    fn there_is_one_word_of_where_kv_comes_from() {
        let body = Bytes::from_static(br#"{"kv_transfer_params":null,"a":1,"kv\u005ftransfer_params":null}"#);
        assert_eq!(decode_body(&body, r#"{"b":2}"#), r#"{"kv_transfer_params":{"b":2},"a":1}"#);
        assert_eq!(decode_body(&Bytes::from_static(b" { } "), "{}"), r#"{"kv_transfer_params":{} } "#);
    }

    proptest! {
        /// Whatever the worker says goes on as it is, and the client's fields with it.
        #[test]
        fn the_second_leg_says_both(
            fields in prop::collection::btree_map("[a-z]{1,6}", "\\PC{0,12}", 0..4),
            params in prop::collection::btree_map("[a-z_]{1,8}", prop::collection::vec(any::<u32>(), 0..5), 0..4),
            space in "[ \n]{0,3}",
        ) {
            let text = json!(fields).to_string().replacen('{', &format!("{space}{{{space}"), 1);
            let params = json!(params).to_string();
            let body = decode_body(&Bytes::from(text), &params);
            let mut both: Json = serde_json::from_slice(&body).unwrap();
            let told = both.as_object_mut().unwrap().remove("kv_transfer_params").unwrap();
            prop_assert_eq!(told.to_string(), params);
            prop_assert_eq!(both, json!(fields));
        }
    }
}
