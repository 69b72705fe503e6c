//! The model as clients see it: its names, its card, and what fits its context.

use http::HeaderMap;
use keyway_apis::models::{ListedModel, listed};
use serde_json::{Value, json};

use super::error::ApiError;
use super::params::Params;
use super::{Response, json_response, messages};

/// What `/v1/models` says: the model under each name, in the form of the API that the client speaks.
pub(super) fn list(
    model: &ServedModel,
    headers: &HeaderMap,
    query: Option<&str>,
) -> Result<Response, ApiError> {
    if !messages::of_client(headers) {
        let cards: Vec<Value> = model.names.iter().map(|name| model.card(name)).collect();
        return Ok(json_response(&json!({"object": "list", "data": cards})));
    }
    let models: Vec<ListedModel> = model.names.iter().map(|name| model.listed(name)).collect();
    let page = listed(&models, query);
    let page = page
        .map_err(|wrong| ApiError::invalid_value(wrong.param.as_deref().unwrap_or("query"), wrong.message))?;
    Ok(json_response(&page))
}

/// The model that a worker serves.
#[derive(Debug)]
pub(crate) struct ServedModel {
    /// Its name, and others by which it may be asked for; at least one.
    pub(crate) names: Vec<String>,
    /// Prompt and answer together, in tokens.
    pub(crate) max_model_len: usize,
    pub(crate) vocab_size: usize,
    /// Ids that end a generation.
    pub(crate) eos_token_ids: Vec<u32>,
    pub(crate) numerics_id: String,
    /// Port at which other workers fetch what is cached here, if they may.
    pub(crate) kv_source_port: Option<u16>,
    /// When the worker started, in Unix seconds, for `/v1/models`.
    pub(crate) created: u64,
}

impl ServedModel {
    /// The first of its names, which a request that names no model means; empty without any.
    pub(crate) fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    /// The name by which a request asks for it.
    pub(crate) fn named_in(&self, params: &mut Params) -> Result<String, ApiError> {
        // A worker serves one model, so a request that names none means that one (as vLLM reads it).
        match params.take_string("model")? {
            None => Ok(self.name().to_owned()),
            Some(name) if self.is_named(&name) => Ok(name),
            Some(name) => Err(ApiError::model_not_found(&name, self.name())),
        }
    }

    /// Tokens that fit behind a prompt: at least one, and as many as are asked for.
    pub(crate) fn room_behind(
        &self,
        prompt: &[u32],
        asked: Option<usize>,
        noun: &'static str,
    ) -> Result<usize, ApiError> {
        if prompt.iter().any(|id| *id as usize >= self.vocab_size) {
            // A tokenizer with more tokens than the model.
            let what = format!("'{noun}' holds a token this model does not know.");
            return Err(ApiError::invalid_value(noun, what));
        }
        let room = self.max_model_len.saturating_sub(prompt.len());
        if room == 0 || asked.is_some_and(|asked| asked > room) {
            return Err(ApiError::context_length(self.max_model_len, prompt.len(), asked, noun));
        }
        Ok(room)
    }

    /// What is said of it under one name, in the form of the API that the client speaks.
    pub(super) fn told(&self, name: &str, headers: &HeaderMap) -> Value {
        if messages::of_client(headers) { self.listed(name).told() } else { self.card(name) }
    }

    /// As Anthropic's clients list it.
    fn listed(&self, name: &str) -> ListedModel {
        let max_input_tokens = Some(self.max_model_len as u64);
        ListedModel { id: name.to_owned(), created: self.created, max_input_tokens }
    }

    /// As OpenAI's clients list it.
    fn card(&self, name: &str) -> Value {
        let mut card = json!({
            "id": name, "object": "model", "created": self.created, "owned_by": "keyway", "root": self.name(),
            "max_model_len": self.max_model_len, "numerics_id": self.numerics_id,
        });
        if let Some(port) = self.kv_source_port {
            card["kv_source_port"] = port.into();
        }
        card
    }
}
