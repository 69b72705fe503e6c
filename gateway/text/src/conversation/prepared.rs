//! One message as vLLM hands it to a template: the fields that it knows, in its order; content as a list of
//! parts, which the template's renderer joins where the template takes text; the arguments of calls as
//! objects.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::{BILLING, ConversationError};
use crate::{Field, Message};

/// Stands for the content of a message that is not all text, to find in the rendered prompt where that
/// message begins. Private use characters, so that no client's text is taken for it by chance; if one is, the
/// prompt's known beginning is shorter.
pub(super) const NO_TEXT: &str = "\u{f8ff}keyway: no text\u{f8ff}";

const NO_CALL: ConversationError = ConversationError::Unsupported("a call that is none");

/// The message, and whether its content is all text.
pub(super) fn prepared(mut said: Message<'_>) -> Result<(Message<'_>, bool), ConversationError> {
    let Some(Field::Text(role)) = said.take("role") else {
        return Err(ConversationError::Unsupported("a message of no role"));
    };
    let (content, is_text) = content(&role, said.take("content"))?;
    let mut message = Message::default();
    let kind = role.clone();
    message.set("role", Field::Text(role));
    message.set("content", content);
    match &*kind {
        "assistant" => {
            if let Some(calls) = said.take("tool_calls").filter(|calls| !calls.is_null()) {
                let calls = calls.into_items().ok_or(NO_CALL)?;
                let calls = calls.into_iter().map(call).collect::<Result<Vec<_>, _>>()?;
                if !calls.is_empty() {
                    message.set("tool_calls", Field::Other(Cow::Owned(calls.into())));
                }
            }
            let mut reasoning = |name| said.take(name).filter(|field| !field.is_null());
            if let Some(reasoning) = reasoning("reasoning").or_else(|| reasoning("reasoning_content")) {
                message.set("reasoning", reasoning);
            }
        }
        "tool" => {
            if let Some(id) = said.take("tool_call_id") {
                message.set("tool_call_id", id);
            }
        }
        "developer" => {
            if let Some(tools) = said.take("tools") {
                message.set("tools", tools);
            }
        }
        _ => {}
    }
    if let Some(Field::Text(name)) = said.take("name") {
        message.set("name", Field::Text(name));
    }
    Ok((message, is_text))
}

/// A content as text or as parts, and whether it is all text.
fn content<'a>(role: &str, content: Option<Field<'a>>) -> Result<(Field<'a>, bool), ConversationError> {
    let is_system = role == "system";
    let parts = match content.filter(|content| !content.is_null()) {
        Some(Field::Text(text)) if is_system && text.starts_with(BILLING) => {
            vec![Value::String(text.into_owned())]
        }
        Some(Field::Text(text)) => return Ok((Field::Text(text), true)),
        None => Vec::new(),
        Some(parts) => parts.into_items().ok_or(ConversationError::Unsupported("a content of no kind"))?,
    };
    let mut known = Vec::with_capacity(parts.len());
    for part in parts {
        match part_of(part)? {
            Part::Text(text) if is_system => known.extend(without_billing(text).map(text_part)),
            Part::Text(text) => known.push(text_part(text)),
            Part::Nothing => {}
            Part::Reference(name) => known.push(json!({ "type": "tool_reference", "name": name })),
            Part::NoText => {
                return Ok((Field::Other(Cow::Owned(json!([text_part(NO_TEXT.to_owned())]))), false));
            }
        }
    }
    Ok((Field::Other(Cow::Owned(known.into())), true))
}

/// A part of a content.
enum Part {
    Text(String),
    /// The name of a tool that was to be found later.
    Reference(String),
    /// It is left out.
    Nothing,
    NoText,
}

fn part_of(part: Value) -> Result<Part, ConversationError> {
    let mut fields = match part {
        Value::String(text) => return Ok(Part::Text(text)),
        Value::Object(fields) => fields,
        _ => return Ok(Part::NoText),
    };
    let of = fields.remove("type").unwrap_or_default();
    let field = match of.as_str() {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("thinking") => "thinking",
        Some("tool_reference") => "name",
        _ => return Ok(Part::NoText),
    };
    Ok(match fields.remove(field) {
        Some(Value::String(name)) if field == "name" => Part::Reference(name),
        Some(Value::String(text)) => Part::Text(text),
        None | Some(Value::Null) if matches!(of.as_str(), Some("text" | "refusal")) => Part::Nothing,
        _ => return Err(ConversationError::Unsupported("a part without its text")),
    })
}

fn text_part(text: String) -> Value {
    json!({ "type": "text", "text": text })
}

/// What is left of a system's text without the line of [`BILLING`].
fn without_billing(text: String) -> Option<String> {
    if !text.starts_with(BILLING) {
        return Some(text);
    }
    let (_, rest) = text.split_once('\n')?;
    Some(rest.to_owned()).filter(|rest| !rest.is_empty())
}

/// A call with its arguments as an object: those that are none are taken for an empty one, as they stand in
/// every later turn too.
fn call(call: Value) -> Result<Value, ConversationError> {
    let Value::Object(mut fields) = call else { return Err(NO_CALL) };
    if fields.get("type").is_some_and(|of| of != "function") {
        return Err(NO_CALL);
    }
    let Some(Value::Object(function)) = fields.get_mut("function") else { return Err(NO_CALL) };
    let arguments = function.entry("arguments").or_insert(Value::Null);
    let parsed = match &*arguments {
        Value::Object(_) => return Ok(Value::Object(fields)),
        Value::String(json) => serde_json::from_str(json).ok(),
        _ => None,
    };
    *arguments = parsed.filter(Value::is_object).unwrap_or_else(|| Value::Object(Map::new()));
    Ok(Value::Object(fields))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shown(said: &Value) -> (Vec<String>, bool) {
        let (message, is_text) = prepared(Message::of(said).unwrap()).unwrap();
        (message.fields().map(|(name, field)| format!("{name}={field:?}")).collect(), is_text)
    }

    #[test]
    fn a_message_has_the_fields_that_engines_know_in_their_order() {
        let said = json!({ "extra": 1, "tool_calls": [], "name": "n", "content": "c", "role": "assistant",
            "reasoning_content": "r", "refusal": null });
        let (fields, is_text) = shown(&said);
        let names: Vec<_> = fields.iter().map(|field| field.split('=').next().unwrap()).collect();
        assert_eq!((names, is_text), (vec!["role", "content", "reasoning", "name"], true));
        assert!(prepared(Message::of(&json!({ "content": "c" })).unwrap()).is_err());
    }

    #[test]
    fn a_content_that_is_not_all_text_is_the_mark_alone() {
        let text = json!({ "type": "text", "text": "t" });
        for other in [json!({ "type": "image_url" }), json!(3), json!({ "text": "no type" })] {
            let (fields, is_text) = shown(&json!({ "role": "user", "content": [text, other] }));
            assert!(
                !is_text && fields[1].contains("keyway: no text") && !fields[1].contains("\"t\""),
                "{fields:?}"
            );
        }
        // A client that writes the mark has a message of text.
        assert!(shown(&json!({ "role": "user", "content": NO_TEXT })).1);
    }
}
