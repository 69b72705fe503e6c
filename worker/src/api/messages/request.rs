//! The fields of Anthropic's requests that chats write in another way: the prompt, the functions, the form of
//! the answer. Temperature and the like are taken as a chat's.

use keyway_text::{ChatTemplate, Conversation};
use serde_json::{Map, Value, json};

use crate::api::App;
use crate::api::error::ApiError;
use crate::api::kv_transfer;
use crate::api::params::{Params, kind};
use crate::api::prompt::{PromptSource, reads_effort};
use crate::api::tools::{ToolChoice, Tools};
use crate::request_memory::Turn;

/// Tokens of thought that a request may bound, at least.
const THINKING_BUDGET_MIN: usize = 1024;

/// Takes a generation's prompt and functions. What else a chat has under another name gets that name.
pub(in crate::api) fn take(
    app: &App,
    params: &mut Params,
    body: &[u8],
    turn: &Turn,
) -> Result<(PromptSource, Tools), ApiError> {
    let max_tokens = params.take("max_tokens").ok_or_else(|| ApiError::missing("max_tokens"))?;
    // One token is asked for where another worker answers.
    if let Some(budget) = take_thinking(params)?
        && !kv_transfer::keeps(params)
        && max_tokens.as_u64().is_some_and(|max| budget as u64 >= max)
    {
        let what = "'thinking.budget_tokens' must be less than 'max_tokens'.";
        return Err(ApiError::invalid_value("thinking.budget_tokens", what));
    }
    params.put("max_tokens", max_tokens);
    take_form(&app.text.template, params)?;
    let (choice, parallel) = take_choice(params)?;
    let conversation = take_conversation(app, params, body)?;
    let tools = Tools::told(conversation.tools(), choice, parallel)?;
    let max_len = Some(app.model.max_model_len);
    Ok((PromptSource::conversation(&app.text, conversation, "messages", max_len, turn)?, tools))
}

/// Takes a prompt alone, to be counted.
pub(super) fn take_prompt(
    app: &App,
    params: &mut Params,
    body: &[u8],
    turn: &Turn,
) -> Result<PromptSource, ApiError> {
    // What a request does with its messages does not change their number of tokens.
    params.take("compaction");
    // Of the prompt's, what thinking costs is the template's matter.
    take_thinking(params)?;
    take_form(&app.text.template, params)?;
    take_choice(params)?;
    let conversation = take_conversation(app, params, body)?;
    PromptSource::conversation(&app.text, conversation, "messages", None, turn)
}

/// What is read of the body itself, for the order of its fields is a part of the prompt.
fn take_conversation<'a>(
    app: &App,
    params: &mut Params,
    body: &'a [u8],
) -> Result<Conversation<'a>, ApiError> {
    // A client whose thread is refused sends the whole conversation; one that goes on would be misunderstood.
    if params.take("thread").is_some() {
        return Err(ApiError::no_threads());
    }
    let wrong = |name: &str, what: &str, found: &Value| {
        ApiError::invalid_value(name, format!("'{name}' must be {what}, not {}.", kind(found)))
    };
    match params.take("messages") {
        None => return Err(ApiError::missing("messages")),
        Some(Value::Array(messages)) if messages.is_empty() => {
            return Err(ApiError::invalid_value("messages", "'messages' must hold at least one message."));
        }
        Some(Value::Array(_)) => {}
        Some(other) => return Err(wrong("messages", "an array", &other)),
    }
    match params.take("system") {
        None | Some(Value::String(_) | Value::Array(_)) => {}
        Some(other) => return Err(wrong("system", "a string or an array of blocks", &other)),
    }
    match params.take("tools") {
        None | Some(Value::Array(_)) => {}
        Some(other) => return Err(wrong("tools", "an array", &other)),
    }
    params.take_object("chat_template_kwargs")?;
    keyway_apis::messages_in_place(body, &app.text.template)
        .map_err(|error| ApiError::conversation(&error, "messages"))
}

/// How many tokens of thought are asked for at most. How a prompt asks for thoughts is the conversation's
/// matter; their number is not held to.
fn take_thinking(params: &mut Params) -> Result<Option<usize>, ApiError> {
    let Some(thinking) = params.take_object("thinking")? else { return Ok(None) };
    match thinking.get("type").and_then(Value::as_str) {
        Some("enabled") => {}
        Some("adaptive" | "disabled") => return Ok(None),
        _ => {
            let what = "'thinking.type' must be enabled, adaptive or disabled.";
            return Err(ApiError::invalid_value("thinking.type", what));
        }
    }
    let budget = thinking.get("budget_tokens").and_then(Value::as_u64).map(|budget| budget as usize);
    let Some(budget) = budget.filter(|budget| *budget >= THINKING_BUDGET_MIN) else {
        let what = format!("'thinking.budget_tokens' must be an integer of at least {THINKING_BUDGET_MIN}.");
        return Err(ApiError::invalid_value("thinking.budget_tokens", what));
    };
    params.ignore("thinking.budget_tokens".to_owned());
    Ok(Some(budget))
}

/// Makes `output_config.format` a chat's `response_format`. Its effort is the conversation's matter, if the
/// template makes anything of it.
fn take_form(template: &ChatTemplate, params: &mut Params) -> Result<(), ApiError> {
    let Some(mut config) = params.take_object("output_config")? else { return Ok(()) };
    let format = config.remove("format").filter(|format| !format.is_null());
    let effort = config.get("effort").and_then(Value::as_str);
    let reads = effort.is_none_or(|effort| reads_effort(template, effort));
    let left = config.keys().filter(|name| *name != "effort" || !reads);
    left.for_each(|name| params.ignore(format!("output_config.{name}")));
    let Some(format) = format else { return Ok(()) };
    let schema = format.get("schema").filter(|schema| schema.is_object());
    let Some(schema) = schema.filter(|_| format["type"] == "json_schema") else {
        let what = "'output_config.format' must be of type json_schema with a 'schema', which is an object.";
        return Err(ApiError::invalid_value("output_config.format", what));
    };
    let json_schema = json!({"name": "json_schema", "schema": schema});
    params.put("response_format", json!({"type": "json_schema", "json_schema": json_schema}));
    Ok(())
}

/// Whether the model calls, and whether more than once.
fn take_choice(params: &mut Params) -> Result<(ToolChoice, bool), ApiError> {
    let Some(choice) = params.take_object("tool_choice")? else { return Ok((ToolChoice::Auto, true)) };
    let name = || choice.get("name").and_then(Value::as_str);
    let chosen = match (choice.get("type").and_then(Value::as_str), name()) {
        (Some("auto"), _) => ToolChoice::Auto,
        (Some("any"), _) => ToolChoice::Required,
        (Some("none"), _) => ToolChoice::Never,
        (Some("tool"), Some(name)) => ToolChoice::Named(name.to_owned()),
        _ => {
            let what = "'tool_choice' must be of type auto, any, none or tool with the 'name' of a tool.";
            return Err(ApiError::invalid_value("tool_choice", what));
        }
    };
    Ok((chosen, !is_true(&choice, "disable_parallel_tool_use")))
}

fn is_true(fields: &Map<String, Value>, name: &str) -> bool {
    fields.get(name).is_some_and(|value| *value == true)
}
