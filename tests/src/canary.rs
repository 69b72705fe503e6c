//! Every prompt and key that a test sends is a canary: no line of any process's log may hold one, nor may a
//! gateway's metrics, its list of workers or its errors. Registered where requests are made
//! ([`crate::openai`], [`crate::client`], [`crate::h2_client`]), looked for where lines are captured
//! ([`crate::process`]), where answers are read and where a gateway ends ([`crate::cluster`]), so that each
//! test of the suite is a test of this too.

use std::collections::HashMap;

use parking_lot::RwLock;
use serde_json::Value;

/// Canaries looked for at once; those that come later are not.
const CANARIES_MAX: usize = 4_096;
/// Shorter ones could stand in a log for another reason. As many bytes find a canary's place in [`CANARIES`].
const BYTES_MIN: usize = 14;
/// How much of a text is looked for: who writes one down may cut it.
const CHARS_MAX: usize = 40;
/// Fields of a request that hold what a person wrote.
const TEXTS: [&str; 4] = ["content", "text", "prompt", "input"];

/// What the gateway itself prints as a request to try, in its first lines.
const PRINTED: &str = "How do I add a worker?";

type Beginning = [u8; BYTES_MIN];

/// The canaries by their beginnings, so that a line costs a look for each of its bytes and not for each
/// canary.
static CANARIES: RwLock<Option<HashMap<Beginning, Vec<String>>>> = RwLock::new(None);

/// Looks for a text from now on, by its beginning (of a credential, without its scheme); short ones are let
/// pass.
pub fn register(text: &str) {
    let text = text.strip_prefix("Bearer ").unwrap_or(text);
    let end = text.char_indices().map(|(at, _)| at).nth(CHARS_MAX).unwrap_or(text.len());
    let canary = &text[..end];
    let plain = canary.bytes().all(|byte| (b' '..0x7f).contains(&byte) && !matches!(byte, b'"' | b'\\'));
    let Some(beginning) = canary.as_bytes().first_chunk::<BYTES_MIN>().filter(|_| plain) else { return };
    if canary == PRINTED {
        return;
    }
    let mut canaries = CANARIES.write();
    let canaries = canaries.get_or_insert_default();
    let known = canaries.get(beginning).is_some_and(|of_it| of_it.iter().any(|other| other == canary));
    if !known && canaries.len() < CANARIES_MAX {
        canaries.entry(*beginning).or_default().push(canary.to_owned());
    }
}

/// Looks from now on for all that a person wrote in the body of a request; what is not JSON is let pass.
pub fn register_body(body: &[u8]) {
    if let Ok(body) = serde_json::from_slice(body) {
        register_texts(&body, false);
    }
}

fn register_texts(value: &Value, is_text: bool) {
    match value {
        Value::String(text) if is_text => register(text),
        Value::Array(values) => values.iter().for_each(|value| register_texts(value, is_text)),
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| register_texts(value, TEXTS.contains(&name.as_str())));
        }
        _ => {}
    }
}

/// A canary that a text holds.
pub fn found_in(text: &str) -> Option<String> {
    found_in_bytes(text.as_bytes())
}

/// The same for what is not text.
pub fn found_in_bytes(bytes: &[u8]) -> Option<String> {
    let canaries = CANARIES.read();
    let canaries = canaries.as_ref()?;
    bytes.windows(BYTES_MIN).enumerate().find_map(|(at, window)| {
        let of_it = canaries.get(window.first_chunk::<BYTES_MIN>()?)?;
        of_it.iter().find(|canary| bytes[at..].starts_with(canary.as_bytes())).cloned()
    })
}

/// Wants none in what a gateway says at `place`.
///
/// # Panics
/// When there is one.
pub fn assert_none(place: &str, text: &[u8]) {
    if let Some(canary) = found_in_bytes(text) {
        panic!("{place} say {canary:?}, which a test sent: {}", String::from_utf8_lossy(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_is_found_and_nothing_else() {
        register("this sentence is a canary, and long enough to be cut");
        register("this sentence is another one");
        register("hi");
        let found = found_in("DEBUG body={\"this sentence is a canary, and long enough\"}");
        assert_eq!(found.as_deref(), Some("this sentence is a canary, and long enou"));
        assert_eq!(found_in("this sentence is another one").as_deref(), Some("this sentence is another one"));
        assert_eq!(found_in("hi, this sentence is none"), None);
    }

    #[test]
    fn a_body_s_texts_are_canaries_and_its_names_are_not() {
        let body = r#"{"model": "a-model-with-a-long-name", "prompt": ["first of two texts", "second of two texts"],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a part of a message"}]}]}"#;
        register_body(body.as_bytes());
        register_body(b"text that is no JSON");
        for text in ["first of two texts", "second of two texts", "a part of a message"] {
            assert_eq!(found_in(&format!("it said {text} again")).as_deref(), Some(text));
        }
        assert_eq!(found_in("a-model-with-a-long-name, text that is no JSON"), None);
    }

    #[test]
    #[should_panic(expected = "metrics say \"a label that was a prompt\"")]
    fn what_a_gateway_says_may_hold_none() {
        register("a label that was a prompt");
        assert_none("metrics", b"requests{model=\"a label that was a prompt\"} 1");
    }
}
