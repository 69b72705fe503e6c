//! A request to `/v1/messages` as one to `/v1/chat/completions`, field by field. No field is lost: it goes
//! on, is named as ignored, or is refused.

use std::collections::BTreeMap;

use serde_json::json;
use serde_json::value::RawValue;

use super::back::MessageBack;
use super::chat_body::ChatBody;
use super::fields::{Fields, kind, refused, wrong};
use super::{conversation, tools};
use crate::engine_fields::of_chats;
use crate::ignored::Ignored;
use crate::{Refusal, SystemPlace, Translated};

/// Tokens of thought that a request may bound, at least.
const THINKING_BUDGET_MIN: u64 = 1024;

/// Fields of chats that engines take over this API, too.
const OF_CHATS_TOO: [&str; 7] = [
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "continue_final_message",
    "reasoning_effort",
    "response_format",
    "user",
];

/// Fields without which the answer would be to something else.
const INDISPENSABLE: [&str; 5] = ["compaction", "container", "keyway", "mcp_servers", "thread"];

/// Turns a request's body into a chat's.
///
/// # Errors
/// It is no such request, or asks for what no engine of chats can do.
pub(crate) fn to_chat(body: &[u8], place: SystemPlace) -> Result<Translated, Refusal> {
    translated(Fields::of_body(body)?, place, Wanted::Answer)
}

/// The chat whose prompt's tokens a request to `/v1/messages/count_tokens` asks for.
///
/// # Errors
/// It is no such request.
pub fn to_counted_chat(body: &[u8], place: SystemPlace) -> Result<Vec<u8>, Refusal> {
    let mut body = Fields::of_body(body)?;
    body.take("compaction");
    translated(body, place, Wanted::Count).map(|translated| translated.chat)
}

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Answer,
    Count,
}

fn translated(mut body: Fields<'_>, place: SystemPlace, wanted: Wanted) -> Result<Translated, Refusal> {
    let (mut chat, mut ignored) = (ChatBody::default(), Ignored::default());
    let model = body.text("model")?;
    chat.put_if("model", model.as_ref());
    let conversation = conversation::take(&mut body, place, &mut ignored)?;
    chat.put("messages", &conversation.messages);
    let max_tokens = match body.integer("max_tokens", 1)? {
        None if wanted == Wanted::Count => 1 + THINKING_BUDGET_MIN,
        max => max.ok_or_else(|| body.missing("max_tokens"))?,
    };
    chat.put("max_tokens", &max_tokens);
    for name in ["temperature", "top_p", "top_k"] {
        chat.put_if(name, body.number(name)?);
    }
    let stops = take_stops(&mut body)?;
    chat.put_if("stop", Some(&stops).filter(|stops| !stops.is_empty()));
    if let Some(stream) = body.flag("stream")? {
        chat.put("stream", &stream);
        chat.put_if("stream_options", stream.then_some(&json!({"include_usage": true})));
    }
    tools::put(&mut body, conversation.changes, &mut chat, &mut ignored)?;
    let thinks = take_thinking(&mut body, max_tokens, &mut ignored)?;
    put_output_config(&mut body, thinks, &mut chat, &mut ignored)?;
    if !thinks {
        put_no_thinking(&mut body, &mut chat)?;
    }
    if let Some(mut metadata) = body.object("metadata")? {
        chat.put_if("user", metadata.text("user_id")?.as_ref());
        ignored.note_all("metadata", metadata.names());
    }
    put_rest(body, &mut chat, &mut ignored)?;
    let back = MessageBack::new(model.map(Into::into), stops);
    Ok(Translated { chat: chat.into_json(), ignored: ignored.into_names(), back: Box::new(back) })
}

fn take_stops(body: &mut Fields<'_>) -> Result<Vec<String>, Refusal> {
    let stops = body.list("stop_sequences")?.unwrap_or_default().into_iter().enumerate();
    let stop = |(i, stop)| super::fields::text(stop, &format!("stop_sequences.{i}")).map(Into::into);
    stops.map(stop).collect()
}

/// Whether the model may think. How much it does is its own matter: chats have no bound of tokens.
fn take_thinking(body: &mut Fields<'_>, max_tokens: u64, ignored: &mut Ignored) -> Result<bool, Refusal> {
    let Some(mut thinking) = body.object("thinking")? else { return Ok(true) };
    match &*thinking.needed_text("type")? {
        "disabled" => return Ok(false),
        "adaptive" => {}
        "enabled" => {
            let budget = thinking.integer("budget_tokens", THINKING_BUDGET_MIN)?;
            let budget = budget.ok_or_else(|| thinking.missing("budget_tokens"))?;
            if budget >= max_tokens {
                let message = "'thinking.budget_tokens' must be less than 'max_tokens'.";
                return Err(refused("thinking.budget_tokens", message));
            }
            ignored.note("thinking.budget_tokens".to_owned());
        }
        _ => {
            let message = "'thinking.type' must be enabled, adaptive or disabled.";
            return Err(refused("thinking.type", message));
        }
    }
    ignored.note_all("thinking", thinking.names());
    Ok(true)
}

/// Puts how much the model shall reason, and the form of its answer.
fn put_output_config(
    body: &mut Fields<'_>,
    thinks: bool,
    chat: &mut ChatBody,
    ignored: &mut Ignored,
) -> Result<(), Refusal> {
    let Some(mut config) = body.object("output_config")? else { return Ok(()) };
    match config.text("effort")? {
        Some(effort) if thinks => chat.put("reasoning_effort", &effort),
        Some(_) => ignored.note("output_config.effort".to_owned()),
        None => {}
    }
    if let Some(mut format) = config.object("format")? {
        if format.needed_text("type")? != "json_schema" {
            let message = "'output_config.format.type' must be json_schema.";
            return Err(refused("output_config.format.type", message));
        }
        let schema = format.take("schema").ok_or_else(|| format.missing("schema"))?;
        if kind(schema) != "an object" {
            return Err(wrong(&format.path("schema"), "a JSON schema, which is an object", schema));
        }
        put_form(schema, chat);
        ignored.note_all("output_config.format", format.names());
    }
    ignored.note_all("output_config", config.names());
    Ok(())
}

fn put_form(schema: &RawValue, chat: &mut ChatBody) {
    #[derive(serde::Serialize)]
    struct JsonSchema<'a> {
        name: &'static str,
        schema: &'a RawValue,
    }
    #[derive(serde::Serialize)]
    struct Form<'a> {
        #[serde(rename = "type")]
        of: &'static str,
        json_schema: JsonSchema<'a>,
    }
    let json_schema = JsonSchema { name: "json_schema", schema };
    chat.put("response_format", &Form { of: "json_schema", json_schema });
}

/// Puts that the model shall not think, unless the client told the template itself whether it shall.
fn put_no_thinking(body: &mut Fields<'_>, chat: &mut ChatBody) -> Result<(), Refusal> {
    let given = body.object("chat_template_kwargs")?;
    let mut variables: BTreeMap<String, &RawValue> = given.into_iter().flat_map(Fields::left).collect();
    variables.entry("enable_thinking".to_owned()).or_insert(RawValue::FALSE);
    chat.put("chat_template_kwargs", &variables);
    Ok(())
}

/// Puts what chats know under the same name, and names what nobody acts on.
fn put_rest(mut body: Fields<'_>, chat: &mut ChatBody, ignored: &mut Ignored) -> Result<(), Refusal> {
    // Which parts are to be cached is the engine's own matter.
    body.take("cache_control");
    for (name, value) in body.left() {
        if let Some(passed) = of_chats(&name, &OF_CHATS_TOO).filter(|passed| !chat.has(passed)) {
            chat.put(passed, value);
        } else if !INDISPENSABLE.contains(&name.as_str()) {
            ignored.note(name);
        } else if !holds_nothing(value) {
            let message = format!("'{name}' cannot be acted on here. Leave it out.");
            return Err(refused(&name, &message));
        }
    }
    Ok(())
}

/// Whether a value is an array or an object of nothing.
fn holds_nothing(value: &RawValue) -> bool {
    let inner = |open, close| value.get().strip_prefix(open)?.strip_suffix(close);
    let inner: Option<&str> = inner('[', ']').or_else(|| inner('{', '}'));
    inner.is_some_and(|inner| inner.trim().is_empty())
}

#[cfg(test)]
mod tests;
