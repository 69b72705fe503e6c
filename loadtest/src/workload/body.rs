//! The bytes of each request's body: fixed text around the prompt, so that the same seed sends the same
//! bytes. Decides no lengths.

mod embeddings;

use std::{collections::BTreeMap, fmt::Write as _};

use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};

use crate::workload::{Ask, conversation::History, prompt::PromptText, texts::Utterance};

/// Where requests go and how the prompt is wrapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    /// `/v1/chat/completions`, the prompt as one user message.
    #[value(alias = "/v1/chat/completions")]
    Chat,
    /// `/v1/completions`, the prompt as it is.
    #[value(alias = "/v1/completions")]
    Completions,
    /// `/v1/responses`, the prompt as one user message.
    #[value(alias = "/v1/responses")]
    Responses,
    /// `/v1/messages`, the prompt as one user message.
    #[value(alias = "/v1/messages")]
    Messages,
    /// `/v1/embeddings`, the prompt as a text or one of several; the answer is in one piece and has no
    /// tokens.
    #[value(alias = "/v1/embeddings")]
    Embeddings,
}

impl Endpoint {
    /// Path of the API at the server, such as `/v1/messages`.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::Embeddings => "/v1/embeddings",
        }
    }

    /// Whether answers are generated, token by token, and so have a first one and times between them.
    pub fn generates(self) -> bool {
        self != Self::Embeddings
    }

    /// A body up to the prompt's first message or its text. `model` is any string.
    fn head(self, model: &str) -> String {
        let model = serde_json::Value::from(model);
        match self {
            Self::Chat | Self::Messages => format!(r#"{{"model":{model},"messages":["#),
            Self::Responses => format!(r#"{{"model":{model},"input":["#),
            Self::Completions => format!(r#"{{"model":{model},"prompt":"#),
            Self::Embeddings => format!(r#"{{"model":{model},"input":"#),
        }
    }

    /// What stands around the prompt's text.
    fn quotes(self) -> (&'static str, &'static str) {
        match self {
            Self::Chat | Self::Responses | Self::Messages => (r#"{"role":"user","content":""#, r#""}"#),
            Self::Completions | Self::Embeddings => (r#"""#, r#"""#),
        }
    }

    /// What closes the prompt.
    fn tail(self) -> &'static str {
        match self {
            Self::Chat | Self::Responses | Self::Messages => "]",
            Self::Completions | Self::Embeddings => "",
        }
    }

    /// What asks for a stream, with its token counts where they must be asked for.
    fn stream(self) -> &'static str {
        match self {
            Self::Chat | Self::Completions => r#","stream":true,"stream_options":{"include_usage":true}"#,
            Self::Responses | Self::Messages => r#","stream":true"#,
            Self::Embeddings => "",
        }
    }

    /// The field that bounds the answer.
    fn max_tokens(self) -> &'static str {
        if self == Self::Responses { "max_output_tokens" } else { "max_tokens" }
    }
}

/// A body that asks for one token and no stream, or for an embedding; `prompt` is letters and spaces.
pub fn probe(endpoint: Endpoint, model: &str, prompt: &str) -> String {
    let (head, (open, close), tail) = (endpoint.head(model), endpoint.quotes(), endpoint.tail());
    if !endpoint.generates() {
        return format!("{head}{open}{prompt}{close}{tail}}}");
    }
    let max_tokens = endpoint.max_tokens();
    format!("{head}{open}{prompt}{close}{tail},\"{max_tokens}\":1,\"temperature\":0}}")
}

/// Fields of a body, in an order that no build changes, and their values as they were written.
pub type Fields = BTreeMap<String, Box<RawValue>>;

/// Makes the bodies of a run.
#[derive(Debug)]
pub struct Bodies {
    /// Bytes of text for one token.
    pub bytes_per_token: f64,
    text: PromptText,
    endpoint: Endpoint,
    head: String,
    /// Fields beside the prompt and its lengths.
    fields: Fields,
    tail: String,
}

impl Bodies {
    /// Bodies for `model` at `endpoint`, in words that `seed` decides.
    pub fn new(endpoint: Endpoint, model: &str, ignore_eos: bool, seed: u64, bytes_per_token: f64) -> Self {
        let raw = |json: &str| RawValue::from_string(json.into()).unwrap_or_default();
        let mut fields = Fields::new();
        if endpoint.generates() {
            fields.insert("temperature".into(), raw("0"));
        }
        if endpoint.generates() && ignore_eos {
            fields.insert("ignore_eos".into(), raw("true"));
        }
        Self {
            bytes_per_token,
            text: PromptText::new(seed),
            endpoint,
            head: endpoint.head(model),
            fields,
            tail: String::new(),
        }
        .sealed()
    }

    /// The same with more fields; one that is there already is replaced.
    #[must_use]
    pub fn with_fields(mut self, fields: &Fields) -> Self {
        self.fields.extend(fields.iter().map(|(name, value)| (name.clone(), value.clone())));
        self.sealed()
    }

    /// Makes the tail, which every body ends with, from the fields.
    fn sealed(mut self) -> Self {
        let close = self.endpoint.tail();
        self.tail = format!("{close}{}", self.endpoint.stream());
        for (name, value) in &self.fields {
            // Writing to a string cannot fail.
            let _ = write!(self.tail, ",{}:{}", Value::from(name.as_str()), value.get());
        }
        if self.endpoint.generates() {
            // Writing to a string cannot fail.
            let _ = write!(self.tail, ",\"{}\":", self.endpoint.max_tokens());
        }
        self
    }

    /// The body of `ask`. Of a conversation, `history` comes before it and then holds it too.
    pub fn make(&self, ask: &Ask, history: Option<&mut History>) -> Vec<u8> {
        let mut history = history;
        if let (Some(history), true) = (&mut history, ask.begins_history) {
            **history = History::default();
        }
        let said = history.as_ref().map_or(0, |history| history.json.len());
        let prompt_bytes = said + (ask.prompt_tokens() as f64 * self.bytes_per_token) as usize;
        let mut body = Vec::with_capacity(self.head.len() + prompt_bytes + self.tail.len() + 64);
        body.extend_from_slice(self.head.as_bytes());
        if let Some(history) = &history {
            body.extend_from_slice(&history.json);
        }
        let start = body.len();
        self.append(ask, &mut body);
        if let Some(history) = history {
            history.json.extend_from_slice(&body[start..]);
            history.json.push(b',');
            history.blocks.extend_from_slice(&ask.blocks);
        }
        body.extend_from_slice(self.tail.as_bytes());
        if self.endpoint.generates() {
            body.extend_from_slice(ask.output_tokens.to_string().as_bytes());
        }
        body.push(b'}');
        body
    }

    /// The prompt's new message, or its text.
    fn append(&self, ask: &Ask, body: &mut Vec<u8>) {
        let (open, close) = self.endpoint.quotes();
        match &ask.said {
            None => {
                body.extend_from_slice(open.as_bytes());
                for block in &ask.blocks {
                    self.text.append(block.id, self.bytes(block.tokens), body);
                }
                body.extend_from_slice(close.as_bytes());
            }
            Some(Utterance::Text(text)) => {
                let quoted = serde_json::Value::from(&**text).to_string();
                body.extend_from_slice(open.trim_end_matches('"').as_bytes());
                body.extend_from_slice(quoted.as_bytes());
                body.extend_from_slice(close.trim_start_matches('"').as_bytes());
            }
            Some(Utterance::Messages(messages)) => {
                // The file's reader has seen that it is a list.
                let list = messages.get().trim();
                let inner = list.strip_prefix('[').and_then(|list| list.strip_suffix(']')).unwrap_or(list);
                body.extend_from_slice(inner.as_bytes());
            }
        }
    }

    /// Bytes of the text of a block of `tokens`.
    pub fn bytes(&self, tokens: u32) -> usize {
        ((f64::from(tokens) * self.bytes_per_token).round() as usize).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::scale::Block;

    fn ask(ids: [u64; 3]) -> Ask {
        let blocks = ids.into_iter().zip([16, 16, 9]).map(|(id, tokens)| Block { id, tokens }).collect();
        Ask { blocks, output_tokens: 10, said: None, begins_history: false }
    }

    #[test]
    fn a_chat_body() {
        let bodies = Bodies::new(Endpoint::Chat, "a \"b\"", true, 42, 1.0);
        let body: Value = serde_json::from_slice(&bodies.make(&ask([0, 1, 2]), None)).unwrap();
        assert_eq!(body["model"], "a \"b\"");
        assert_eq!(body["messages"][0]["content"].as_str().unwrap().len(), 16 + 16 + 9);
        assert_eq!(body["max_tokens"], 10);
        assert_eq!((&body["stream"], &body["ignore_eos"]), (&Value::from(true), &Value::from(true)));
        assert_eq!(body["stream_options"]["include_usage"], true);
    }

    #[test]
    fn fields_of_one_s_own_replace_ours() {
        let fields = serde_json::from_str(r#"{"temperature": 0.7, "top_p": 0.9}"#).unwrap();
        let bodies = Bodies::new(Endpoint::Chat, "m", true, 42, 1.0).with_fields(&fields);
        let text = String::from_utf8(bodies.make(&ask([0, 1, 2]), None)).unwrap();
        assert_eq!(text.matches("temperature").count(), 1);
        let body: Value = serde_json::from_str(&text).unwrap();
        let of = |name: &str| body[name].as_f64().unwrap();
        assert_eq!((of("temperature"), of("top_p"), of("max_tokens")), (0.7, 0.9, 10.0));
        assert_eq!((&body["ignore_eos"], &body["stream"]), (&true.into(), &true.into()));
    }

    #[test]
    fn a_completion_body_and_four_bytes_a_token() {
        let bodies = Bodies::new(Endpoint::Completions, "m", false, 42, 4.2);
        let body: Value = serde_json::from_slice(&bodies.make(&ask([0, 1, 2]), None)).unwrap();
        assert_eq!(body["prompt"].as_str().unwrap().len(), 67 + 67 + 38);
        assert_eq!(bodies.bytes(16), 67);
        assert_eq!(body.get("ignore_eos"), None);
    }

    #[test]
    fn bodies_of_the_other_apis() {
        for (endpoint, prompt, limit) in [
            (Endpoint::Responses, "input", "max_output_tokens"),
            (Endpoint::Messages, "messages", "max_tokens"),
        ] {
            let bodies = Bodies::new(endpoint, "m", false, 42, 1.0);
            let body: Value = serde_json::from_slice(&bodies.make(&ask([0, 1, 2]), None)).unwrap();
            assert_eq!(body[prompt][0]["content"].as_str().unwrap().len(), 16 + 16 + 9);
            assert_eq!((&body[limit], &body["stream"]), (&10.into(), &true.into()));
            assert_eq!(body.get("stream_options"), None, "counts come unasked");
        }
    }

    #[test]
    fn a_conversation_carries_its_history() {
        let bodies = Bodies::new(Endpoint::Chat, "m", true, 42, 1.0);
        let mut history = History::default();
        let first: Value = serde_json::from_slice(&bodies.make(&ask([0, 1, 2]), Some(&mut history))).unwrap();
        history.add_reply(0, &crate::workload::conversation::Reply { text: "so \"so\"".into(), tokens: 4 });
        let said = Utterance::Text("and \"then\"\n".into());
        let next = Ask { said: Some(said), ..ask([3, 4, 5]) };
        let second: Value = serde_json::from_slice(&bodies.make(&next, Some(&mut history))).unwrap();
        let roles: Vec<_> =
            second["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["user", "assistant", "user"]);
        assert_eq!(second["messages"][0], first["messages"][0]);
        assert_eq!(second["messages"][1]["content"], "so \"so\"");
        assert_eq!(second["messages"][2]["content"], "and \"then\"\n");
        assert_eq!(history.blocks.len(), 3 + 1 + 3);
    }

    #[test]
    fn messages_of_one_s_own_are_sent_as_they_are() {
        let raw = serde_json::value::RawValue::from_string(
            r#"[{"role":"system","content":"[s]"}, {"role":"user","content":"u"}]"#.into(),
        );
        let own = Ask { said: Some(Utterance::Messages(raw.unwrap().into())), ..ask([0, 1, 2]) };
        let bodies = Bodies::new(Endpoint::Chat, "m", true, 42, 1.0);
        let body: Value = serde_json::from_slice(&bodies.make(&own, None)).unwrap();
        assert_eq!(body["messages"][0]["content"], "[s]");
        assert_eq!(body["messages"][1]["role"], "user");
    }

    #[test]
    fn a_probe_is_not_streamed() {
        for endpoint in [Endpoint::Chat, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages] {
            let body: Value = serde_json::from_str(&probe(endpoint, "m", "a b")).unwrap();
            assert_eq!((&body[endpoint.max_tokens()], body.get("stream")), (&Value::from(1), None));
        }
    }

    #[test]
    fn rows_with_a_common_prefix_have_bodies_with_a_common_prefix() {
        let bodies = Bodies::new(Endpoint::Chat, "m", true, 42, 1.0);
        let (a, b) = (bodies.make(&ask([0, 1, 2]), None), bodies.make(&ask([0, 1, 9]), None));
        let common = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
        let shared = bodies.head.len() + r#"{"role":"user","content":""#.len() + 32;
        assert!((shared..shared + 8).contains(&common), "{common}");
    }
}
