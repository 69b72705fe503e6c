//! A request for the embeddings of several texts, in one body.

use super::Bodies;
use crate::workload::Ask;

impl Bodies {
    /// The body that asks for an embedding of each of `asks`, in their order. Of one, its text stands by
    /// itself.
    pub fn make_texts(&self, asks: &[Ask]) -> Vec<u8> {
        if let [ask] = asks {
            return self.make(ask, None);
        }
        let tokens: u64 = asks.iter().map(Ask::prompt_tokens).sum();
        let text_bytes = (tokens as f64 * self.bytes_per_token) as usize + asks.len() * 4;
        let mut body = Vec::with_capacity(self.head.len() + text_bytes + self.tail.len() + 16);
        body.extend_from_slice(self.head.as_bytes());
        for (i, ask) in asks.iter().enumerate() {
            body.push(if i == 0 { b'[' } else { b',' });
            self.append(ask, &mut body);
        }
        body.push(b']');
        body.extend_from_slice(self.tail.as_bytes());
        body.push(b'}');
        body
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::workload::{body::Endpoint, scale::Block};

    fn ask(id: u64, tokens: u32) -> Ask {
        Ask { blocks: vec![Block { id, tokens }], output_tokens: 10, said: None, begins_history: false }
    }

    fn made(asks: &[Ask]) -> Value {
        let fields = serde_json::from_str(r#"{"dimensions": 64}"#).unwrap();
        let bodies = Bodies::new(Endpoint::Embeddings, "m", true, 42, 1.0).with_fields(&fields);
        serde_json::from_slice(&bodies.make_texts(asks)).unwrap()
    }

    #[test]
    fn one_text_is_a_string_and_nothing_is_asked_to_be_generated() {
        let body = made(&[ask(1, 16)]);
        assert_eq!(body["input"].as_str().unwrap().len(), 16);
        let mut fields: Vec<&str> = body.as_object().unwrap().keys().map(String::as_str).collect();
        fields.sort_unstable();
        assert_eq!(fields, ["dimensions", "input", "model"]);
    }

    #[test]
    fn several_texts_are_a_list_in_their_order() {
        let body = made(&[ask(1, 16), ask(2, 9), ask(1, 16)]);
        let texts: Vec<&str> =
            body["input"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
        assert_eq!(texts.iter().map(|text| text.len()).collect::<Vec<_>>(), [16, 9, 16]);
        assert!(texts[0] == texts[2] && texts[0][..7] != texts[1][..7]);
        assert_eq!(body["model"], "m");
    }
}
