//! The fields of OpenAI's Responses that chats write in another way: the prompt, the functions, the form of
//! the answer. Temperature and the like are taken as a chat's. What the answer repeats is noted.

use std::collections::HashSet;

use keyway_apis::responses::ToolNames;
use keyway_text::Conversation;
use serde_json::{Map, Value, json};

use super::previous::items_of;
use crate::api::App;
use crate::api::error::ApiError;
use crate::api::params::Params;
use crate::api::prompt::{PromptSource, reads_effort};
use crate::api::tools::{ToolChoice, Tools};
use crate::api::work::memory_of;
use crate::request_memory::Turn;

/// What the answer needs of its request.
#[derive(Debug, Default)]
pub(in crate::api) struct Asked {
    /// Fields that the answer repeats.
    pub(in crate::api) repeated: Map<String, Value>,
    /// The input's items as JSON, if the answer is to be kept.
    pub(in crate::api) items: Option<Vec<u8>>,
    /// Whether its client asks for the answer later.
    pub(in crate::api) in_background: bool,
    pub(super) names: ToolNames,
}

impl Asked {
    /// Notes the answer that the request goes on from.
    pub(in crate::api) fn follow(&mut self, previous: String) {
        self.repeated.insert("previous_response_id".to_owned(), previous.into());
    }

    /// Memory that it takes while the answer comes: what it repeats is told as well, and perhaps kept.
    pub(in crate::api) fn bytes(&self) -> usize {
        let repeated: usize = self.repeated.values().map(memory_of).sum();
        2 * repeated + self.items.as_ref().map_or(0, Vec::len)
    }
}

/// What a request comes to.
pub(in crate::api) struct Taken {
    pub(in crate::api) source: PromptSource,
    pub(in crate::api) tools: Tools,
    pub(in crate::api) asked: Asked,
}

/// Which functions the model may call.
struct Choice {
    choice: ToolChoice,
    /// None but these, where a request says which.
    allowed: Option<HashSet<String>>,
}

/// Takes a generation's prompt and functions. What else a chat has under another name gets that name.
pub(in crate::api) fn take(
    app: &App,
    params: &mut Params,
    body: &[u8],
    turn: &Turn,
) -> Result<Taken, ApiError> {
    let input = params.take("input").ok_or_else(|| ApiError::missing("input"))?;
    let items = items_of(&input)?;
    drop(input);
    let stores = params.take_bool("store")?.unwrap_or(true);
    let in_background = take_background(params, stores)?;
    let tools = params.take_array("tools")?.unwrap_or_default();
    let names = ToolNames::of(&tools);
    let parallel = params.take_bool("parallel_tool_calls")?.unwrap_or(true);
    let mut repeated = repeated(app, params)?;
    repeated.insert("parallel_tool_calls".to_owned(), parallel.into());
    repeated.insert("store".to_owned(), stores.into());
    repeated.insert("background".to_owned(), in_background.into());
    let choice = params.take("tool_choice");
    repeated.insert("tool_choice".to_owned(), choice.clone().unwrap_or_else(|| "auto".into()));
    take_lengths(params, &mut repeated)?;
    take_form(params, &mut repeated)?;
    take_reasoning(app, params, &mut repeated)?;
    if tools.iter().any(|tool| tool["type"] == "custom" && tool["format"]["type"] == "grammar") {
        params.ignore("tools.format".to_owned());
    }
    repeated.insert("tools".to_owned(), tools.into());
    params.take_object("chat_template_kwargs")?;
    let conversation =
        Conversation::from_responses(body).map_err(|error| ApiError::conversation(&error, "input"))?;
    let Choice { choice, allowed } = chosen(choice.as_ref(), &names)?;
    let is_allowed = |tool: &&Value| {
        let name = tool["function"]["name"].as_str();
        allowed.as_ref().is_none_or(|allowed| name.is_some_and(|name| allowed.contains(name)))
    };
    let callable: Vec<Value> = conversation.tools().iter().filter(is_allowed).cloned().collect();
    let tools = Tools::told(&callable, choice, parallel)?;
    let max_len = Some(app.model.max_model_len);
    let source = PromptSource::conversation(&app.text, conversation, "input", max_len, turn)?;
    let asked = Asked { repeated, items: stores.then_some(items), in_background, names };
    Ok(Taken { source, tools, asked })
}

/// Whether the client asks for the answer later: one that is kept, and that is no stream.
fn take_background(params: &mut Params, stores: bool) -> Result<bool, ApiError> {
    if !params.take_bool("background")?.unwrap_or(false) {
        return Ok(false);
    }
    let streams = params.get("stream").is_some_and(|stream| *stream == true);
    let what = match (stores, streams) {
        (false, _) => "'background' needs 'store': the answer is asked for later.",
        (true, true) => "'background' does not go with 'stream': ask for the answer until it is complete.",
        (true, false) => return Ok(true),
    };
    Err(ApiError::unsupported("background", what))
}

/// What an answer repeats as it came, or says by itself where nothing came.
fn repeated(app: &App, params: &mut Params) -> Result<Map<String, Value>, ApiError> {
    let mut repeated = Map::new();
    for name in ["instructions", "user", "prompt_cache_key", "safety_identifier"] {
        repeated.insert(name.to_owned(), params.take_string(name)?.into());
    }
    let metadata = params.take_object("metadata")?.unwrap_or_default();
    repeated.insert("metadata".to_owned(), metadata.into());
    let tier = params.take_string("service_tier")?.unwrap_or_else(|| "default".to_owned());
    repeated.insert("service_tier".to_owned(), tier.into());
    for (name, default) in [("temperature", app.defaults.temperature), ("top_p", app.defaults.top_p)] {
        let value = params.get(name).cloned();
        let value = value.unwrap_or_else(|| f64::from(default.unwrap_or(1.0)).into());
        repeated.insert(name.to_owned(), value);
    }
    Ok(repeated)
}

/// How long the answer may be, and what does not fit.
fn take_lengths(params: &mut Params, repeated: &mut Map<String, Value>) -> Result<(), ApiError> {
    // They are chats'.
    for name in ["max_tokens", "max_completion_tokens"] {
        if params.take(name).is_some() {
            params.ignore(name.to_owned());
        }
    }
    let max = params.take_integer("max_output_tokens", 1)?;
    repeated.insert("max_output_tokens".to_owned(), max.into());
    if let Some(max) = max {
        params.put("max_tokens", max.into());
    }
    // Only an engine's own tools count for it.
    let calls = params.take_integer("max_tool_calls", 0)?;
    repeated.insert("max_tool_calls".to_owned(), calls.into());
    repeated.insert("top_logprobs".to_owned(), 0.into());
    match params.take_string("truncation")?.as_deref() {
        None | Some("disabled") => {}
        Some("auto") => params.ignore("truncation".to_owned()),
        Some(_) => {
            let what = "'truncation' must be auto or disabled.";
            return Err(ApiError::invalid_value("truncation", what));
        }
    }
    repeated.insert("truncation".to_owned(), "disabled".into());
    Ok(())
}

/// Makes `text.format` a chat's `response_format`.
fn take_form(params: &mut Params, repeated: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut text = params.take_object("text")?.unwrap_or_default();
    text.retain(|_, value| !value.is_null());
    let format = text.entry("format").or_insert_with(|| json!({"type": "text"})).clone();
    text.keys().filter(|name| *name != "format").for_each(|name| params.ignore(format!("text.{name}")));
    repeated.insert("text".to_owned(), text.into());
    let wrong = |what: &str| Err(ApiError::invalid_value("text.format", what));
    let form = match format["type"].as_str() {
        Some("text") => return Ok(()),
        Some("json_object") => json!({"type": "json_object"}),
        Some("json_schema") if format["schema"].is_object() => {
            json!({"type": "json_schema", "json_schema": {"name": format["name"], "schema": format["schema"]}})
        }
        Some("json_schema") => {
            return wrong("'text.format.schema' must be a JSON schema, which is an object.");
        }
        _ => return wrong("'text.format.type' must be text, json_object or json_schema."),
    };
    params.put("response_format", form);
    Ok(())
}

/// Notes what of the reasoning is not the conversation's matter.
fn take_reasoning(app: &App, params: &mut Params, repeated: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut reasoning = params.take_object("reasoning")?.unwrap_or_default();
    let effort = reasoning.get("effort").and_then(Value::as_str);
    if effort.is_some_and(|effort| !reads_effort(&app.text.template, effort)) {
        params.ignore("reasoning.effort".to_owned());
    }
    let others = reasoning.iter().filter(|(name, value)| *name != "effort" && !value.is_null());
    let others: Vec<String> = others.map(|(name, _)| format!("reasoning.{name}")).collect();
    for name in others {
        params.ignore(name);
    }
    reasoning.entry("effort").or_insert(Value::Null);
    repeated.insert("reasoning".to_owned(), reasoning.into());
    Ok(())
}

fn chosen(choice: Option<&Value>, names: &ToolNames) -> Result<Choice, ApiError> {
    let known = |of: &Value| of["name"].as_str().map(|name| names.known(name));
    let of_mode = |mode: &Value| match mode.as_str() {
        Some("auto") => Some(ToolChoice::Auto),
        Some("required") => Some(ToolChoice::Required),
        Some("none") => Some(ToolChoice::Never),
        _ => None,
    };
    let free = |choice: ToolChoice| Choice { choice, allowed: None };
    let Some(choice) = choice else { return Ok(free(ToolChoice::Auto)) };
    let found = match choice["type"].as_str() {
        None => of_mode(choice).map(free),
        Some("function" | "custom") => known(choice).map(|name| free(ToolChoice::Named(name))),
        Some("allowed_tools") => choice["tools"].as_array().and_then(|tools| {
            let allowed = Some(tools.iter().filter_map(known).collect());
            Some(Choice { choice: of_mode(&choice["mode"])?, allowed })
        }),
        Some(_) => None,
    };
    found.ok_or_else(|| {
        let what = "'tool_choice' must be none, auto, required, a function of 'tools' or allowed_tools.";
        ApiError::invalid_value("tool_choice", what)
    })
}
