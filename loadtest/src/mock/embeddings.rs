//! `/v1/embeddings`: reads what is to be embedded, and writes an answer that depends on the texts alone.
//! Format: OpenAI's API reference, "create embeddings".

use std::io::Write as _;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use keyway_wire::openai::ErrorBody;
use serde::Deserialize;

use super::{
    api::Api,
    prompt::Tokens,
    request::{self, Ask, Reading, invalid},
};

/// Numbers of an embedding, unless the request says `dimensions`.
const DIMENSIONS: u32 = 64;
const DIMENSIONS_MAX: u32 = 8192;
/// Texts in one request, as OpenAI's API has it.
const TEXTS_MAX: usize = 2048;

/// What is to be embedded, and how it is to be written.
#[derive(Debug)]
pub(super) struct Wanted {
    /// One for each text, which generates a token that nobody sees.
    pub asks: Vec<Ask>,
    /// What each embedding is drawn from.
    seeds: Vec<u64>,
    dimensions: u32,
    as_base64: bool,
}

#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    input: Input,
    dimensions: Option<u32>,
    encoding_format: Option<Encoding>,
    cache_salt: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    Lists(Vec<Vec<u32>>),
}

#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    Float,
    Base64,
}

/// Reads `body`; an error is what the client gets.
pub(super) fn read(body: &[u8], reading: &Reading<'_>) -> Result<Wanted, ErrorBody> {
    let body: Body = serde_json::from_slice(body)
        .map_err(|error| invalid(&format!("the body is no request for embeddings: {error}")))?;
    request::is_served(body.model.as_deref(), reading)?;
    let dimensions = body.dimensions.unwrap_or(DIMENSIONS);
    if dimensions == 0 || dimensions > DIMENSIONS_MAX {
        let message = format!("`dimensions` must be 1 to {DIMENSIONS_MAX}");
        return Err(invalid(&message).with_param("dimensions"));
    }
    let texts = match body.input {
        Input::Text(text) => vec![of_text(&text)],
        Input::Texts(texts) => texts.iter().map(|text| of_text(text)).collect(),
        Input::Ids(ids) => vec![of_ids(&ids)],
        Input::Lists(lists) => lists.iter().map(|ids| of_ids(ids)).collect(),
    };
    if texts.is_empty() || texts.len() > TEXTS_MAX || texts.iter().any(Tokens::is_empty) {
        let message = format!("`input` must hold 1 to {TEXTS_MAX} texts, and none that is empty");
        return Err(invalid(&message).with_param("input"));
    }
    let seeds = texts.iter().map(|tokens| xxhash_rust::xxh3::xxh3_64(tokens.bytes())).collect();
    let salt = body.cache_salt.as_deref();
    let asks = texts.into_iter().map(|tokens| ask(tokens, reading, salt)).collect();
    Ok(Wanted { asks, seeds, dimensions, as_base64: body.encoding_format == Some(Encoding::Base64) })
}

fn of_text(text: &str) -> Tokens {
    let mut tokens = Tokens::default();
    tokens.push_text(text.as_bytes());
    tokens
}

fn of_ids(ids: &[u32]) -> Tokens {
    let mut tokens = Tokens::default();
    for id in ids {
        tokens.push_id(*id);
    }
    tokens
}

/// The engine's part of one text: its prompt, computed until its first token would come out.
fn ask(mut tokens: Tokens, reading: &Reading<'_>, salt: Option<&str>) -> Ask {
    let prompt_tokens = tokens.len() as u32;
    tokens.push_answer(reading.vocabulary, 0, 1);
    Ask {
        api: Api::Completions,
        prompt_tokens,
        chain: request::chain(&tokens, reading.block_tokens, salt),
        tokens,
        output_tokens: 1,
        first: 0,
        finish: "stop",
        stream: false,
        include_usage: false,
        salt: salt.map(str::to_owned),
        kv: None,
        fetched_tokens: 0,
    }
}

impl Wanted {
    /// The answer as one JSON object. `model` is a JSON string.
    pub(super) fn answer(&self, model: &str) -> Vec<u8> {
        let mut out = br#"{"object":"list","data":["#.to_vec();
        // Writing to memory cannot fail: the results of `write!` say nothing.
        for (index, seed) in self.seeds.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let _ = write!(out, r#"{comma}{{"object":"embedding","index":{index},"embedding":"#);
            let numbers = (0..self.dimensions).map(|i| number(*seed, i));
            if self.as_base64 {
                let bytes: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
                let _ = write!(out, r#""{}""#, BASE64_STANDARD.encode(bytes));
            } else {
                let numbers: Vec<f32> = numbers.collect();
                let _ = serde_json::to_writer(&mut out, &numbers);
            }
            out.push(b'}');
        }
        let prompt: u64 = self.asks.iter().map(|ask| u64::from(ask.prompt_tokens)).sum();
        let _ = write!(
            out,
            r#"],"model":{model},"usage":{{"prompt_tokens":{prompt},"total_tokens":{prompt},"completion_tokens":0}}}}"#
        );
        out
    }
}

/// A number of -1 to 1: the `i`-th of the text that `seed` is the hash of.
fn number(seed: u64, i: u32) -> f32 {
    let bits = xxhash_rust::xxh3::xxh3_64_with_seed(&i.to_le_bytes(), seed) >> 40;
    bits as f32 / (1 << 23) as f32 - 1.0
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{super::prompt::Vocabulary, *};

    fn wanted(body: &Value) -> Result<Wanted, ErrorBody> {
        let vocabulary = Vocabulary::default();
        let reading = Reading {
            model: "m",
            block_tokens: 4,
            output_tokens: 7,
            image_tokens: 0,
            vocabulary: &vocabulary,
        };
        read(body.to_string().as_bytes(), &reading)
    }

    fn answer(body: &Value) -> Value {
        serde_json::from_slice(&wanted(body).unwrap().answer("\"m\"")).unwrap()
    }

    #[test]
    fn equal_texts_have_equal_embeddings_in_their_order() {
        let found = answer(&json!({"model": "m", "input": ["some text", "other", "some text"]}));
        let of = |i: usize| &found["data"][i]["embedding"];
        assert!(of(0) == of(2) && of(0) != of(1) && of(0).as_array().unwrap().len() == 64);
        assert_eq!((&found["data"][1]["index"], &found["usage"]["prompt_tokens"]), (&1.into(), &8.into()));
        let alone = answer(&json!({"input": "other", "dimensions": 3}));
        assert_eq!(alone["data"][0]["embedding"].as_array().unwrap()[..], of(1).as_array().unwrap()[..3]);
        assert!(of(0).as_array().unwrap().iter().all(|n| n.as_f64().unwrap().abs() <= 1.0));
    }

    #[test]
    fn base64_holds_the_same_numbers() {
        let plain = answer(&json!({"input": [7, 8, 9]}));
        let coded = answer(&json!({"input": [[7, 8, 9]], "encoding_format": "base64"}));
        let bytes = BASE64_STANDARD.decode(coded["data"][0]["embedding"].as_str().unwrap()).unwrap();
        let numbers: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let plain: Vec<f32> = serde_json::from_value(plain["data"][0]["embedding"].clone()).unwrap();
        assert_eq!(numbers, plain);
    }

    #[test]
    fn what_cannot_be_embedded_is_refused() {
        for body in [
            json!({"input": ""}),
            json!({"input": []}),
            json!({"input": ["a", ""]}),
            json!({"input": 7}),
            json!({"input": "a", "dimensions": 0}),
            json!({"input": "a", "model": "other"}),
        ] {
            assert!(wanted(&body).is_err(), "{body}");
        }
    }
}
