//! The bytes of each request's body: fixed text around the prompt, so that the same seed sends the same bytes.
//! Decides no lengths.

use serde::Serialize;

use crate::{
    prompt::PromptText,
    scale::{Block, Scale},
    trace::Row,
};

/// Where requests go and how the prompt is wrapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
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
    /// The lengths, in tokens.
    pub scale: Scale,
    /// Bytes of text for one token.
    pub bytes_per_token: f64,
    text: PromptText,
    head: String,
    tail: String,
}

impl Bodies {
    /// Bodies for `model` at `endpoint`.
    pub fn new(
        endpoint: Endpoint,
        model: &str,
        ignore_eos: bool,
        seed: u64,
        scale: Scale,
        bytes_per_token: f64,
    ) -> Self {
        let eos = if ignore_eos { r#","ignore_eos":true"# } else { "" };
        let tail = format!(
            r#"{},"stream":true,"stream_options":{{"include_usage":true}},"temperature":0{eos},"max_tokens":"#,
            endpoint.tail()
        );
        Self { scale, bytes_per_token, text: PromptText::new(seed), head: endpoint.head(model), tail }
    }

    /// The body of the trace's row number `index`.
    pub fn make(&self, index: usize, row: &Row) -> Vec<u8> {
        let prompt_bytes = self.scale.prompt_tokens(row) as f64 * self.bytes_per_token;
        let mut body = Vec::with_capacity(self.head.len() + prompt_bytes as usize + self.tail.len() + 64);
        body.extend_from_slice(self.head.as_bytes());
        for block in self.scale.blocks(index, row) {
            self.text.append(block.id, self.bytes(block), &mut body);
        }
        body.extend_from_slice(self.tail.as_bytes());
        body.extend_from_slice(self.scale.output_tokens(row).to_string().as_bytes());
        body.push(b'}');
        body
    }

    /// Bytes of a full block's text.
    pub fn block_bytes(&self) -> usize {
        self.bytes(Block { id: 0, tokens: self.scale.block_tokens() })
    }

    fn bytes(&self, block: Block) -> usize {
        ((f64::from(block.tokens) * self.bytes_per_token).round() as usize).max(1)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn row() -> Row {
        Row { timestamp_ms: 0, input_tokens: 1300, output_tokens: 320, blocks: [0, 1, 2].into() }
    }

    #[test]
    fn a_chat_body() {
        let bodies = Bodies::new(Endpoint::Chat, "a \"b\"", true, 42, Scale::new(0.03125), 1.0);
        let body: Value = serde_json::from_slice(&bodies.make(0, &row())).unwrap();
        assert_eq!(body["model"], "a \"b\"");
        assert_eq!(body["messages"][0]["content"].as_str().unwrap().len(), 16 + 16 + 9);
        assert_eq!(body["max_tokens"], 10);
        assert_eq!((&body["stream"], &body["ignore_eos"]), (&Value::from(true), &Value::from(true)));
        assert_eq!(body["stream_options"]["include_usage"], true);
    }

    #[test]
    fn a_completion_body_and_four_bytes_a_token() {
        let bodies = Bodies::new(Endpoint::Completions, "m", false, 42, Scale::new(0.03125), 4.2);
        let body: Value = serde_json::from_slice(&bodies.make(0, &row())).unwrap();
        assert_eq!(body["prompt"].as_str().unwrap().len(), 67 + 67 + 38);
        assert_eq!(bodies.block_bytes(), 67);
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
        let bodies = Bodies::new(Endpoint::Chat, "m", true, 42, Scale::new(0.03125), 1.0);
        let other = Row { blocks: [0, 1, 9].into(), ..row() };
        let (a, b) = (bodies.make(0, &row()), bodies.make(1, &other));
        let common = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
        let shared = bodies.head.len() + 32;
        assert!((shared..shared + 8).contains(&common), "{common}");
    }
}
