//! The fields about functions: what the model is shown, and what its calls are told against.

use std::sync::Arc;

use serde_json::Value;

use super::error::ApiError;
use super::params::{Params, kind};
use crate::answer::answer_format::Function;

/// The functions that a request offers the model, and whether it may or must call them.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    /// As the client sent them, for the template.
    pub(crate) definitions: Option<Value>,
    /// Those whose calls are told.
    pub(crate) callable: Arc<[Function]>,
    pub(crate) choice: ToolChoice,
    /// Whether there may be more than one call.
    pub(crate) parallel: bool,
}

/// Whether the model calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    Never,
    /// The model chooses whether it calls: the default where there are functions.
    Auto,
    /// At least one call.
    Required,
    /// A call of this function.
    Named(String),
}

impl Default for Tools {
    fn default() -> Self {
        Self { definitions: None, callable: Arc::from([]), choice: ToolChoice::Never, parallel: true }
    }
}

impl Tools {
    pub(super) fn take(params: &mut Params) -> Result<Self, ApiError> {
        let definitions = match params.take("tools") {
            None => Vec::new(),
            Some(Value::Array(tools)) => tools,
            Some(other) => {
                let what = format!("'tools' must be an array, not {}.", kind(&other));
                return Err(ApiError::invalid_value("tools", what));
            }
        };
        let functions = functions(&definitions, CHAT_NAMING)?;
        let choice = take_choice(params, &functions)?;
        let parallel = params.take_bool("parallel_tool_calls")?.unwrap_or(true);
        if functions.is_empty() {
            return Ok(Self::default());
        }
        let callable = if choice == ToolChoice::Never { Arc::from([]) } else { Arc::from(functions) };
        // Checked above.
        let definitions = keyway_text::chat_tools(definitions).map_err(|_| no_function())?;
        Ok(Self { definitions: Some(Value::Array(definitions)), callable, choice, parallel })
    }

    /// Of functions that a conversation tells the model of, in the form of chats.
    pub(super) fn told(definitions: &[Value], choice: ToolChoice, parallel: bool) -> Result<Self, ApiError> {
        let functions = functions(definitions, AGENTS_NAMING)?;
        let choice = choice.among(&functions)?;
        let callable = if choice == ToolChoice::Never { Arc::from([]) } else { Arc::from(functions) };
        Ok(Self { definitions: None, callable, choice, parallel })
    }

    /// Whether the answer must hold calls, which takes a grammar.
    pub(crate) fn must_call(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }
}

fn no_function() -> ApiError {
    ApiError::invalid_value("tools", "'tools' must hold functions: this worker knows no other tools")
}

impl ToolChoice {
    /// The choice, if there are functions for it.
    fn among(self, functions: &[Function]) -> Result<Self, ApiError> {
        let wrong = |what: &str| Err(ApiError::invalid_value("tool_choice", what));
        match &self {
            Self::Auto if functions.is_empty() => Ok(Self::Never),
            Self::Required | Self::Named(_) if functions.is_empty() => {
                wrong("'tool_choice' needs 'tools' to choose from.")
            }
            Self::Named(name) if functions.iter().all(|function| function.name != *name) => {
                wrong("'tool_choice' must name one of 'tools'.")
            }
            _ => Ok(self),
        }
    }
}

/// How an API names its functions.
#[derive(Debug, Clone, Copy)]
struct Naming {
    /// Before a field of a function, in messages.
    within: &'static str,
    bytes_max: usize,
}

/// OpenAI's rule.
const CHAT_NAMING: Naming = Naming { within: ".function", bytes_max: 64 };

/// Anthropic's rule, and room for the name of a namespace.
const AGENTS_NAMING: Naming = Naming { within: "", bytes_max: 128 };

fn functions(definitions: &[Value], naming: Naming) -> Result<Vec<Function>, ApiError> {
    definitions.iter().enumerate().map(|(i, tool)| function(i, tool, naming)).collect()
}

fn function(i: usize, tool: &Value, naming: Naming) -> Result<Function, ApiError> {
    let Naming { within, bytes_max } = naming;
    let wrong = |field: &str, what: &str| {
        let param = format!("tools[{i}]{field}");
        ApiError::invalid_value(&param, format!("'{param}' must be {what}."))
    };
    if tool["type"] != "function" {
        return Err(wrong(".type", "\"function\": this worker knows no other tools"));
    }
    let function = &tool["function"];
    let name = function["name"].as_str().filter(|name| name.len() <= bytes_max && is_name(name));
    let name = name.ok_or_else(|| {
        wrong(&format!("{within}.name"), &format!("1 to {bytes_max} letters, digits, _, . or -"))
    })?;
    let parameters = match &function["parameters"] {
        Value::Null => serde_json::json!({"type": "object", "properties": {}}),
        Value::Object(_) => function["parameters"].clone(),
        _ => return Err(wrong(&format!("{within}.parameters"), "a JSON schema, which is an object")),
    };
    Ok(Function { name: name.to_owned(), parameters })
}

/// Letters as OpenAI and Anthropic have them, with the dot that engines' clients use.
fn is_name(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
    !name.is_empty() && name.bytes().all(allowed)
}

fn take_choice(params: &mut Params, functions: &[Function]) -> Result<ToolChoice, ApiError> {
    let wrong = |what: &str| Err(ApiError::invalid_value("tool_choice", what));
    let choice = match params.take("tool_choice") {
        None if functions.is_empty() => ToolChoice::Never,
        None => ToolChoice::Auto,
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => ToolChoice::Never,
            "auto" => ToolChoice::Auto,
            "required" | "any" => ToolChoice::Required,
            _ => return wrong("'tool_choice' must be none, auto, required or a function of 'tools'."),
        },
        Some(choice) => match choice["function"]["name"].as_str().filter(|_| choice["type"] == "function") {
            Some(name) if functions.iter().any(|function| function.name == name) => {
                ToolChoice::Named(name.to_owned())
            }
            _ => return wrong("'tool_choice' must be none, auto, required or a function of 'tools'."),
        },
    };
    if functions.is_empty() && !matches!(choice, ToolChoice::Never | ToolChoice::Auto) {
        return wrong("'tool_choice' needs 'tools' to choose from.");
    }
    Ok(choice)
}
