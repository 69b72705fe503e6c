//! Names of what concerns the model, by OpenTelemetry's conventions for generative AI. They are still in
//! development, so the operator chooses: those of version 1.36, which most instrumentations and dashboards
//! speak, the latest (`open-telemetry/semantic-conventions-genai`), or none. Contents of prompts and answers
//! are in none of them.

use super::{
    otlp::{KeyValue, attribute},
    spans::Ended,
};
use crate::config::GenAi;

/// What a path asks of a model, in the conventions' words.
pub(super) fn operation(path: &str) -> Option<&'static str> {
    match path {
        "/v1/chat/completions" | "/v1/messages" | "/v1/responses" => Some("chat"),
        "/v1/completions" | "/generate" | "/inference/v1/generate" => Some("text_completion"),
        "/v1/embeddings" => Some("embeddings"),
        _ => None,
    }
}

impl GenAi {
    /// `chat MODEL`, if spans are named so.
    pub(super) fn name(self, ended: &Ended<'_>) -> Option<String> {
        let operation = operation(ended.path).filter(|_| self != Self::Off)?;
        Some(format!("{operation} {}", ended.model))
    }

    /// Of an attempt. What was counted (`answered`) belongs to the attempt that answered.
    pub(super) fn attributes(self, ended: &Ended<'_>, answered: bool) -> Vec<KeyValue> {
        let Some(operation) = operation(ended.path).filter(|_| self != Self::Off) else { return Vec::new() };
        let system = if self == Self::V1_36 { "gen_ai.system" } else { "gen_ai.provider.name" };
        let mut attributes = vec![
            attribute("gen_ai.operation.name", operation),
            // The conventions' word for whatever is asked by OpenAI's protocol.
            attribute(system, "openai"),
            attribute("gen_ai.request.model", ended.model),
        ];
        if answered && ended.usage.prompt_tokens > 0 {
            attributes.push(attribute("gen_ai.usage.input_tokens", ended.usage.prompt_tokens));
            attributes.push(attribute("gen_ai.usage.output_tokens", ended.usage.completion_tokens));
            if let Some(cached) = ended.usage.cached_tokens().filter(|_| self == Self::Latest) {
                attributes.push(attribute("gen_ai.usage.cache_read.input_tokens", cached));
            }
        }
        if let (true, Self::Latest, Some(ttft)) = (answered, self, ended.ttft) {
            attributes.push(attribute("gen_ai.response.time_to_first_chunk", ttft.as_secs_f64()));
        }
        attributes
    }
}
