//! The interface over a model that says a given text to whatever it is asked, and what clients get of it.

use http_body_util::{BodyExt as _, Full};
use serde_json::Value;

use super::*;

/// Says a text byte by byte, and ends; at a zero it breaks.
struct Saying {
    text: Vec<u8>,
    said: usize,
}

impl Backend for Saying {
    fn vocab_size(&self) -> usize {
        320
    }

    fn block_size(&self) -> usize {
        16
    }

    fn num_blocks(&self) -> usize {
        256
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        &[CacheGroup::Full]
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), StepError> {
        logits.clear();
        for _ in chunks.iter().filter(|chunk| chunk.wants_logits) {
            let next = self.text.get(self.said).map_or(256, |byte| u32::from(*byte));
            assert!(next != 0, "broken on purpose");
            self.said = if next == 256 { 0 } else { self.said + 1 };
            logits.extend((0..320).map(|id| if id == next { 100.0 } else { 0.0 }));
        }
        Ok(())
    }
}

/// The interface over such a model, which thinks and calls as Qwen3 does.
pub(in crate::api) fn saying(text: &str) -> Arc<App> {
    let backend = Saying { text: text.into(), said: 0 };
    let mut app = app_over(Box::new(backend), TextModel::builtin());
    let shared = Arc::get_mut(&mut app).unwrap();
    shared.formats = Formats::of(
        &shared.text,
        Some(crate::answer::answer_format::ReasoningFormat::Think),
        Some(crate::answer::answer_format::CallFormat::Hermes),
    );
    app
}

/// What a client gets.
pub(in crate::api) struct Got {
    pub(in crate::api) status: StatusCode,
    pub(in crate::api) headers: http::HeaderMap,
    pub(in crate::api) text: String,
}

impl Got {
    pub(in crate::api) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// A stream's events, each of which must bear the name that its data says.
    pub(in crate::api) fn events(&self) -> Vec<Value> {
        let event = |text: &str| {
            let (name, data) = text.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{text}");
            data
        };
        self.text.split_terminator("\n\n").map(event).collect()
    }
}

pub(in crate::api) async fn ask(app: &Arc<App>, method: Method, path: &str, body: &Value) -> Got {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let request = http::Request::builder().method(method).uri(path).body(Full::<Bytes>::from(body)).unwrap();
    send(app, request).await
}

/// What a client of Anthropic's gets.
pub(in crate::api) async fn ask_as_anthropics(app: &Arc<App>, path: &str) -> Got {
    let request = http::Request::builder().uri(path).header("anthropic-version", "2023-06-01");
    send(app, request.body(Full::default()).unwrap()).await
}

async fn send(app: &Arc<App>, request: http::Request<Full<Bytes>>) -> Got {
    let Ok(answer) = handle(Arc::clone(app), Client::alone(), request).await;
    let (head, mut body) = answer.into_parts();
    let mut bytes = Vec::new();
    // A stream that breaks is read as far as it goes.
    while let Some(Ok(frame)) = body.frame().await {
        bytes.extend_from_slice(frame.data_ref().unwrap());
    }
    Got { status: head.status, headers: head.headers, text: String::from_utf8(bytes).unwrap() }
}
