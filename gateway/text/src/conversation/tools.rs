//! Functions that the model may call, in the form and with the fields that vLLM hands to templates: a
//! template may print a function whole, so its fields' order is part of the prompt.

use serde_json::{Map, Value, json};

use super::{ConversationError, take};

/// What separates the name of a namespace from that of a function in it.
const NAMESPACE_END: &str = "__";

const NO_FUNCTION: ConversationError = ConversationError::Tools("one of them is no function");

/// A function by its fields. What is not said of `strict` and `defer_loading` is left out, and what is not
/// said of the others is `null`.
fn function(
    name: Value,
    mut fields: Map<String, Value>,
    parameters: &str,
) -> Result<Value, ConversationError> {
    if !name.is_string() {
        return Err(NO_FUNCTION);
    }
    let mut field = |name: &str| fields.remove(name).unwrap_or_default();
    let mut function = Map::new();
    function.insert("name".to_owned(), name);
    function.insert("description".to_owned(), field("description"));
    function.insert("parameters".to_owned(), field(parameters));
    for optional in ["strict", "defer_loading"] {
        let value = field(optional);
        if !value.is_null() {
            function.insert(optional.to_owned(), value);
        }
    }
    Ok(Value::Object(function))
}

fn tool(function: Value) -> Value {
    json!({ "type": "function", "function": function })
}

fn object(tool: Value) -> Result<Map<String, Value>, ConversationError> {
    match tool {
        Value::Object(fields) => Ok(fields),
        _ => Err(NO_FUNCTION),
    }
}

/// The `tools` of a chat request as templates are given them.
///
/// # Errors
/// One of them is no function.
pub fn chat_tools(tools: Vec<Value>) -> Result<Vec<Value>, ConversationError> {
    let one = |tool: Value| {
        let mut fields = object(tool)?;
        if fields.get("type").is_some_and(|of| of != "function") {
            return Err(NO_FUNCTION);
        }
        let mut inner = object(fields.remove("function").unwrap_or_default())?;
        let deferred = take(&mut fields, "defer_loading");
        if let Some(deferred) = &deferred
            && inner.get("defer_loading").is_none_or(Value::is_null)
        {
            inner.insert("defer_loading".to_owned(), deferred.clone());
        }
        let name = inner.remove("name").unwrap_or_default();
        let mut tool = self::tool(function(name, inner, "parameters")?);
        if let Some(deferred) = deferred {
            tool["defer_loading"] = deferred;
        }
        Ok(tool)
    };
    tools.into_iter().map(one).collect()
}

/// Of a request to Anthropic's API.
pub(super) fn of_anthropic(definition: Value) -> Result<Value, ConversationError> {
    let mut fields = object(definition)?;
    let Some(Value::Object(schema)) = fields.get_mut("input_schema") else { return Err(NO_FUNCTION) };
    schema.entry("type").or_insert_with(|| "object".into());
    let name = fields.remove("name").unwrap_or_default();
    Ok(tool(function(name, fields, "input_schema")?))
}

/// The `tools` of a request to OpenAI's Responses in the form of chat completions. What is no function there,
/// such as a search of the engine's own, no template hears of.
///
/// # Errors
/// One of them is of no kind, or a function without a name.
pub fn responses_tools(tools: Vec<Value>) -> Result<Vec<Value>, ConversationError> {
    let mut functions = Vec::with_capacity(tools.len());
    for tool in tools {
        let mut fields = object(tool)?;
        let name = fields.remove("name").unwrap_or_default();
        match fields.get("type").and_then(Value::as_str) {
            Some("function") => functions.push(self::tool(function(name, fields, "parameters")?)),
            Some("custom") => functions.push(self::tool(free_text(name, fields)?)),
            Some("namespace") => {
                let space = name.as_str().ok_or(NO_FUNCTION)?;
                let Some(Value::Array(inner)) = take(&mut fields, "tools") else { return Err(NO_FUNCTION) };
                for tool in inner {
                    let mut fields = object(tool)?;
                    if fields.get("type").is_some_and(|of| of == "function") {
                        let name = fields.remove("name").unwrap_or_default();
                        let name = in_namespace(space, name.as_str().ok_or(NO_FUNCTION)?);
                        functions.push(self::tool(function(name.into(), fields, "parameters")?));
                    }
                }
            }
            Some(_) => {}
            None => return Err(NO_FUNCTION),
        }
    }
    Ok(functions)
}

/// How a function of a namespace is called in a prompt.
pub(super) fn in_namespace(space: &str, name: &str) -> String {
    format!("{space}{NAMESPACE_END}{name}")
}

/// A tool that takes text in no form: to the model a function of one text.
fn free_text(name: Value, mut fields: Map<String, Value>) -> Result<Value, ConversationError> {
    let parameters = json!({
        "type": "object",
        "properties": { "input": { "type": "string", "description": "The freeform text payload for this tool." } },
        "required": ["input"],
        "additionalProperties": false,
    });
    fields.insert("parameters".to_owned(), parameters);
    fields.remove("strict");
    fields.remove("defer_loading");
    function(name, fields, "parameters")
}

/// A call in a chat request as templates are given it: in the order in which vLLM's types have its fields.
pub fn chat_call(call: Value) -> Value {
    let Value::Object(mut fields) = call else { return call };
    let mut ordered = Map::new();
    for name in ["id", "function", "type"] {
        if let Some(mut value) = fields.remove(name) {
            if let Value::Object(function) = &mut value {
                let inner =
                    ["arguments", "name"].map(|name| function.remove(name).map(|it| (name.to_owned(), it)));
                *function = inner.into_iter().flatten().collect();
            }
            ordered.insert(name.to_owned(), value);
        }
    }
    Value::Object(ordered)
}

/// The arguments of a call of such a tool.
pub(super) fn free_text_arguments(text: String) -> Value {
    json!({ "input": text })
}
