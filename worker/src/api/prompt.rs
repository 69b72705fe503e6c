//! Messages or prompts to token ids. Not their lengths' limits, which depend on the rest of the request.

use keyway_text::{RenderOptions, TextModel};
use serde_json::{Map, Value};

use super::error::ApiError;
use super::params::{Params, kind};

const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool", "function"];

/// What is to be tokenised.
#[derive(Debug)]
pub(crate) enum PromptSource {
    /// A checked conversation and how to render it.
    Chat { messages: Value, options: Box<RenderOptions> },
    /// Plain prompts.
    Prompts { prompts: Vec<Prompt>, add_special: bool },
}

/// One of a completion request's prompts.
#[derive(Debug)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

impl PromptSource {
    /// Takes a chat request's fields.
    pub(crate) fn chat(params: &mut Params) -> Result<Self, ApiError> {
        let messages = params.take("messages").ok_or_else(|| ApiError::missing("messages"))?;
        let Value::Array(messages) = messages else {
            let message = format!("'messages' must be an array, not {}.", kind(&messages));
            return Err(ApiError::invalid_value("messages", message));
        };
        if messages.is_empty() {
            return Err(ApiError::invalid_value("messages", "'messages' must hold at least one message."));
        }
        let messages = messages.into_iter().enumerate().map(|(i, m)| checked_message(i, m));
        let options = RenderOptions {
            add_generation_prompt: params.take_bool("add_generation_prompt")?.unwrap_or(true),
            continue_final_message: params.take_bool("continue_final_message")?.unwrap_or(false),
            variables: params.take_object("chat_template_kwargs")?.unwrap_or_default(),
            ..RenderOptions::default()
        };
        Ok(Self::Chat { messages: messages.collect::<Result<Value, _>>()?, options: Box::new(options) })
    }

    /// Takes a completion request's fields.
    pub(crate) fn completion(params: &mut Params, vocab_size: usize) -> Result<Self, ApiError> {
        let prompt = params.take("prompt").ok_or_else(|| ApiError::missing("prompt"))?;
        let add_special = params.take_bool("add_special_tokens")?.unwrap_or(true);
        let prompts = match prompt {
            Value::Array(items) if items.iter().any(|item| item.is_string() || item.is_array()) => {
                items.into_iter().map(|item| one_prompt(item, vocab_size)).collect::<Result<_, _>>()?
            }
            one => vec![one_prompt(one, vocab_size)?],
        };
        Ok(Self::Prompts { prompts, add_special })
    }

    /// Whether it comes to one prompt.
    pub(crate) fn is_single(&self) -> bool {
        !matches!(self, Self::Prompts { prompts, .. } if prompts.len() != 1)
    }

    /// The field that holds the text.
    pub(crate) const fn param(&self) -> &'static str {
        match self {
            Self::Chat { .. } => "messages",
            Self::Prompts { .. } => "prompt",
        }
    }

    /// Token ids of each prompt.
    pub(crate) fn tokenize(self, text: &TextModel) -> Result<Vec<Vec<u32>>, ApiError> {
        let param = self.param();
        let encode = |prompt: &str, add_special: bool| {
            text.tokenizer.encode(prompt, add_special).map_err(|e| ApiError::text(&e, param))
        };
        let ids: Vec<Vec<u32>> = match self {
            Self::Chat { messages, options } => {
                let rendered =
                    text.template.render(&messages, &options).map_err(|e| ApiError::text(&e, param))?;
                vec![encode(&rendered, false)?]
            }
            Self::Prompts { prompts, add_special } => {
                let ids = prompts.into_iter().map(|prompt| match prompt {
                    Prompt::Text(text) => encode(&text, add_special),
                    Prompt::Ids(ids) => Ok(ids),
                });
                ids.collect::<Result<_, _>>()?
            }
        };
        if ids.iter().any(Vec::is_empty) {
            return Err(ApiError::invalid_value(
                param,
                format!("'{param}' must come to at least one token."),
            ));
        }
        Ok(ids)
    }
}

/// A message with its text parts joined, as templates expect it.
fn checked_message(i: usize, message: Value) -> Result<Value, ApiError> {
    let Value::Object(mut message) = message else {
        let what = format!("'messages[{i}]' must be an object, not {}.", kind(&message));
        return Err(ApiError::invalid_value(&format!("messages[{i}]"), what));
    };
    if !message.get("role").and_then(Value::as_str).is_some_and(|role| ROLES.contains(&role)) {
        let what = format!("'messages[{i}].role' must be one of {}.", ROLES.join(", "));
        return Err(ApiError::invalid_value(&format!("messages[{i}].role"), what));
    }
    let content = match message.get("content") {
        Some(Value::String(_)) => return Ok(Value::Object(message)),
        Some(Value::Array(parts)) => joined_parts(i, parts)?,
        None | Some(Value::Null) if has_calls(&message) => String::new(),
        other => {
            let what = format!(
                "'messages[{i}].content' must be a string or an array of text parts, not {}.",
                other.map_or("absent", kind)
            );
            return Err(ApiError::invalid_value(&format!("messages[{i}].content"), what));
        }
    };
    // In its place: a template may print a whole message.
    message.insert("content".to_owned(), Value::String(content));
    Ok(Value::Object(message))
}

fn has_calls(message: &Map<String, Value>) -> bool {
    message.get("role").is_some_and(|r| r == "assistant")
        && ["tool_calls", "function_call"].iter().any(|name| message.get(*name).is_some_and(|v| !v.is_null()))
}

fn joined_parts(i: usize, parts: &[Value]) -> Result<String, ApiError> {
    let text = |(j, part): (usize, &Value)| {
        let text = part["text"].as_str().filter(|_| part["type"] == "text").map(str::to_owned);
        text.ok_or_else(|| {
            let param = format!("messages[{i}].content[{j}]");
            let what = format!(
                "'{param}' must be of type text with a 'text' string: this model reads nothing else."
            );
            ApiError::invalid_value(&param, what)
        })
    };
    Ok(parts.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn one_prompt(prompt: Value, vocab_size: usize) -> Result<Prompt, ApiError> {
    let id = |value: &Value| value.as_u64().filter(|id| *id < vocab_size as u64).map(|id| id as u32);
    match prompt {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(ids) => {
            let ids: Option<Vec<u32>> = ids.iter().map(id).collect();
            ids.map(Prompt::Ids).ok_or_else(|| {
                let what = format!(
                    "'prompt' holds something that is not a token id between 0 and {}.",
                    vocab_size - 1
                );
                ApiError::invalid_value("prompt", what)
            })
        }
        other => {
            let what =
                format!("'prompt' must be a string, token ids, or an array of them, not {}.", kind(&other));
            Err(ApiError::invalid_value("prompt", what))
        }
    }
}
