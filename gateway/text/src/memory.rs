//! What memory it takes to make a request's body a prompt, and a prompt tokens; known before it is taken, so
//! that the caller can bound it.

/// Memory that tokenising takes for each byte of text that cannot be cut: measured 110 for English, 140 for
/// one long word, 220 for digits and blanks in turn.
pub const TOKENIZE_BYTES_EACH: usize = 240;

/// Memory that a JSON value takes, parsed, checked and as a template's value: measured 80 for a number, 160
/// for each mark of small objects, 540 for those of functions.
const JSON_BYTES_EACH: usize = 600;

/// How often a body's texts are there at once: as they came, parsed, as a template's value, and rendered
/// while the text grows.
const JSON_TEXT_COPIES: usize = 6;

/// Bytes that a body takes parsed, checked and rendered: its texts some times over, and its values.
pub fn to_render(body: &[u8]) -> usize {
    body.len() * JSON_TEXT_COPIES + values(body) * JSON_BYTES_EACH
}

/// How many values a JSON text has at most: there is one behind each of these marks that stands in no string.
fn values(json: &[u8]) -> usize {
    let (mut count, mut in_string, mut is_escaped) = (1, false, false);
    for byte in json {
        if in_string {
            in_string = is_escaped || *byte != b'"';
            is_escaped = !is_escaped && *byte == b'\\';
        } else {
            in_string = *byte == b'"';
            count += usize::from(matches!(byte, b',' | b':' | b'[' | b'{'));
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    /// Values and names of an object's fields.
    fn counted(value: &Value) -> usize {
        1 + match value {
            Value::Array(items) => items.iter().map(counted).sum(),
            Value::Object(fields) => fields.values().map(counted).sum(),
            _ => 0,
        }
    }

    proptest! {
        #[test]
        fn no_value_is_missed(texts in prop::collection::vec("[\\[\\]{},:\"\\\\a]{0,6}", 0..6), deep in 0_usize..5) {
            let mut value = serde_json::json!(texts);
            for text in texts.iter().take(deep) {
                value = serde_json::json!({text: [value, 1, null], "b": {}});
            }
            let json = serde_json::to_vec(&value).unwrap();
            let found = values(&json);
            prop_assert!(found >= counted(&value), "{found} of {}", counted(&value));
            prop_assert!(found <= 3 * counted(&value) + 1, "what stands in strings is none");
        }
    }
}
