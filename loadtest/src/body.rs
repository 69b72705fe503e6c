//! The bytes of each request's body: fixed text around the prompt, so that the same seed sends the same bytes.
//! Decides no lengths.

use serde::{Deserialize, Serialize};

use crate::{prompt::PromptText, workload::Ask};

/// Where requests go and how the prompt is wrapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    /// `/v1/chat/completions`, the prompt as one user message.
    Chat,
    /// `/v1/completions`, the prompt as it is.
    Completions,
}

impl Endpoint {
    /// The URL's path.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }

    /// A body up to the prompt. `model` is any string.
    fn head(self, model: &str) -> String {
        let model = serde_json::Value::from(model);
        match self {
            Self::Chat => format!(r#"{{"model":{model},"messages":[{{"role":"user","content":""#),
            Self::Completions => format!(r#"{{"model":{model},"prompt":""#),
        }
    }

    /// What closes the prompt.
    fn tail(self) -> &'static str {
        match self {
            Self::Chat => r#""}]"#,
            Self::Completions => r#"""#,
        }
    }
}

/// A body that asks for one token and no stream; `prompt` is letters and spaces.
pub fn probe(endpoint: Endpoint, model: &str, prompt: &str) -> String {
    format!("{}{prompt}{},\"max_tokens\":1,\"temperature\":0}}", endpoint.head(model), endpoint.tail())
}

/// Makes the bodies of a run.
#[derive(Debug)]
pub struct Bodies {
    /// Bytes of text for one token.
    pub bytes_per_token: f64,
    text: PromptText,
    head: String,
    tail: String,
}

impl Bodies {
    /// Bodies for `model` at `endpoint`.
    pub fn new(endpoint: Endpoint, model: &str, ignore_eos: bool, seed: u64, bytes_per_token: f64) -> Self {
        let eos = if ignore_eos { r#","ignore_eos":true"# } else { "" };
        let tail = format!(
            r#"{},"stream":true,"stream_options":{{"include_usage":true}},"temperature":0{eos},"max_tokens":"#,
            endpoint.tail()
        );
        Self { bytes_per_token, text: PromptText::new(seed), head: endpoint.head(model), tail }
    }

    /// The body of `ask`.
    pub fn make(&self, ask: &Ask) -> Vec<u8> {
        let prompt_bytes = ask.prompt_tokens() as f64 * self.bytes_per_token;
        let mut body = Vec::with_capacity(self.head.len() + prompt_bytes as usize + self.tail.len() + 64);
        body.extend_from_slice(self.head.as_bytes());
        for block in &ask.blocks {
            self.text.append(block.id, self.bytes(block.tokens), &mut body);
        }
        body.extend_from_slice(self.tail.as_bytes());
        body.extend_from_slice(ask.output_tokens.to_string().as_bytes());
        body.push(b'}');
        body
    }

    /// Bytes of the text of a block of `tokens`.
    pub fn bytes(&self, tokens: u32) -> usize {
        ((f64::from(tokens) * self.bytes_per_token).round() as usize).max(1)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::scale::Block;

    fn ask(ids: [u64; 3]) -> Ask {
        let blocks = ids.into_iter().zip([16, 16, 9]).map(|(id, tokens)| Block { id, tokens }).collect();
        Ask { blocks, output_tokens: 10 }
    }

    #[test]
    fn a_chat_body() {
        let bodies = Bodies::new(Endpoint::Chat, "a \"b\"", true, 42, 1.0);
        let body: Value = serde_json::from_slice(&bodies.make(&ask([0, 1, 2]))).unwrap();
        assert_eq!(body["model"], "a \"b\"");
        assert_eq!(body["messages"][0]["content"].as_str().unwrap().len(), 16 + 16 + 9);
        assert_eq!(body["max_tokens"], 10);
        assert_eq!((&body["stream"], &body["ignore_eos"]), (&Value::from(true), &Value::from(true)));
        assert_eq!(body["stream_options"]["include_usage"], true);
    }

    #[test]
    fn a_completion_body_and_four_bytes_a_token() {
        let bodies = Bodies::new(Endpoint::Completions, "m", false, 42, 4.2);
        let body: Value = serde_json::from_slice(&bodies.make(&ask([0, 1, 2]))).unwrap();
        assert_eq!(body["prompt"].as_str().unwrap().len(), 67 + 67 + 38);
        assert_eq!(bodies.bytes(16), 67);
        assert_eq!(body.get("ignore_eos"), None);
    }

    #[test]
    fn a_probe_is_not_streamed() {
        for endpoint in [Endpoint::Chat, Endpoint::Completions] {
            let body: Value = serde_json::from_str(&probe(endpoint, "m", "a b")).unwrap();
            assert_eq!((&body["max_tokens"], body.get("stream")), (&Value::from(1), None));
        }
    }

    #[test]
    fn rows_with_a_common_prefix_have_bodies_with_a_common_prefix() {
        let bodies = Bodies::new(Endpoint::Chat, "m", true, 42, 1.0);
        let (a, b) = (bodies.make(&ask([0, 1, 2])), bodies.make(&ask([0, 1, 9])));
        let common = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
        let shared = bodies.head.len() + 32;
        assert!((shared..shared + 8).contains(&common), "{common}");
    }
}
