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
use crate::{config::KvTransfer, json::Value, machine::heap};

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
    pub(super) fn of(contract: KvTransfer, body: &[u8]) -> Option<Self> {
        let (params, transfer_id) = match contract {
            KvTransfer::Nixl => (nixl::KEEP.to_owned(), None),
            KvTransfer::Mooncake => {
                let id = mooncake::new_transfer_id();
                (mooncake::keep(&id), Some(id))
            }
            KvTransfer::Sglang => return None,
        };
        Some(Self { body: one_token(body, &params)?, transfer_id })
    }
}

/// What a vLLM that computed a prompt says of it.
#[derive(Debug, Deserialize)]
pub(super) struct Prefilled {
    /// Where its KV is, in the worker's own words.
    #[serde(rename = "kv_transfer_params")]
    pub(super) params: Option<Box<RawValue>>,
    /// Its tokens, and how many were found cached.
    pub(super) usage: Option<Usage>,
    #[serde(default)]
    choices: Vec<Ended>,
}

#[derive(Debug, Deserialize)]
struct Ended {
    finish_reason: Option<String>,
}

impl Prefilled {
    /// Whether its token ended the answer, rather than the limit of one token.
    fn has_ended(&self) -> bool {
        self.choices.iter().any(|choice| choice.finish_reason.as_deref() != Some("length"))
    }
}

/// Whether requests of this path may have a first leg: where engines take and say where KV is.
pub(super) fn has_legs(path: &str) -> bool {
    matches!(path, "/v1/chat/completions" | "/v1/completions")
}

/// The body that has a prompt computed and its KV kept: one token, no stream. `None` where the request has
/// several answers, or says itself where KV comes from.
fn one_token(body: &[u8], params: &str) -> Option<Bytes> {
    let text = std::str::from_utf8(body).ok().filter(|_| has_one_prompt(body))?;
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
            _ => {
                // A name is always written.
                out.put_slice(serde_json::to_string(name.as_ref()).unwrap_or_default().as_bytes());
                out.put_slice(b":");
                out.put_slice(value.raw().as_bytes());
                out.put_slice(b",");
            }
        }
    }
    let limit = limit.unwrap_or("max_tokens");
    out.put_slice(format!(r#""{limit}":1,"stream":false,"{PARAMS}":{params}}}"#).as_bytes());
    Some(out.freeze())
}

/// Whether a body has one prompt and one answer to it, and says nothing itself of where KV comes from.
pub(super) fn has_one_prompt(body: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(body) else { return false };
    let is_one = |(name, value): (Cow<'_, str>, Value<'_>)| {
        let given = value.raw() != "null";
        match name.as_ref() {
            PARAMS | "prompt_embeds" | "prompt_logprobs" => !given,
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
        Some(serde_json::from_slice(&FirstLeg::of(KvTransfer::Nixl, body.as_bytes())?.body).unwrap())
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
        assert!(FirstLeg::of(KvTransfer::Sglang, b"{}").is_none(), "its legs go at once");
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
