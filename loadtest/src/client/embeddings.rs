//! Reads an answer with embeddings: whether it holds one for each text, and its token counts. Keeps no number
//! of them. Format: OpenAI's API reference, "create embeddings".

use keyway_wire::openai::Usage;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, SeqAccess, Visitor},
};

use super::{
    event::{Counts, error_of_body},
    exchange::failure,
    record::{Failure, FailureClass},
};

#[derive(Deserialize)]
struct Answer {
    data: Vec<Item>,
    usage: Option<Counts>,
}

#[derive(Deserialize)]
struct Item {
    embedding: Filled,
}

/// Whether there is anything in an embedding: a list of numbers, or their bytes in base64.
struct Filled(bool);

/// The counts of `body`, an answer to a request of `texts`.
///
/// # Errors
/// An error in place of the answer, one that is none, and one with more or fewer embeddings than texts.
pub(super) fn read(body: &[u8], texts: u32) -> Result<Option<Usage>, Failure> {
    let answer: Answer = serde_json::from_slice(body).map_err(|error| match error_of_body(body) {
        Some(message) => failure(FailureClass::ErrorBody, message),
        None => failure(FailureClass::Protocol, format!("the answer is no list of embeddings: {error}")),
    })?;
    let found = answer.data.iter().filter(|item| item.embedding.0).count();
    if found != texts as usize || answer.data.len() != found {
        return Err(failure(
            FailureClass::Unfinished,
            format!("the answer has {found} embeddings for {texts} texts"),
        ));
    }
    Ok(answer.usage.map(|counts| counts.onto(None)))
}

impl<'de> Deserialize<'de> for Filled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Filled;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("numbers, or their bytes in base64")
            }

            fn visit_str<E>(self, text: &str) -> Result<Filled, E> {
                Ok(Filled(!text.is_empty()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut numbers: A) -> Result<Filled, A::Error> {
                let mut filled = false;
                while numbers.next_element::<IgnoredAny>()?.is_some() {
                    filled = true;
                }
                Ok(Filled(filled))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(body: &str, texts: u32) -> FailureClass {
        read(body.as_bytes(), texts).unwrap_err().class
    }

    #[test]
    fn numbers_and_bytes_with_their_counts() {
        let answer = r#"{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.5,-1e-3]},
            {"object":"embedding","index":1,"embedding":"AACAPw=="}],
            "model":"m","usage":{"prompt_tokens":7,"total_tokens":7,"completion_tokens":0}}"#;
        let usage = read(answer.as_bytes(), 2).unwrap().unwrap();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens()), (7, 0, None));
        assert_eq!(read(br#"{"data":[{"embedding":[1]}]}"#, 1), Ok(None));
    }

    #[test]
    fn an_answer_that_lacks_something_is_none() {
        let two = r#"{"data":[{"embedding":[1]},{"embedding":[]}]}"#;
        assert_eq!(class(two, 2), FailureClass::Unfinished);
        assert_eq!(class(two, 1), FailureClass::Unfinished, "one too many, though there is nothing in it");
        assert_eq!(class(r#"{"data":[]}"#, 1), FailureClass::Unfinished);
        assert_eq!(class(r#"{"data":[{"index":0}]}"#, 1), FailureClass::Protocol);
        assert_eq!(class(r#"{"data":[{"embedding":7}]}"#, 1), FailureClass::Protocol);
        assert_eq!(class("<h1>", 1), FailureClass::Protocol);
        assert_eq!(class(r#"{"error":{"message":"engine dead"}}"#, 1), FailureClass::ErrorBody);
    }
}
