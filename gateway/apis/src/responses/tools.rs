//! The functions of a request as a chat's, and which of them the model may call. Tools that the provider of
//! an API runs itself, such as a search of the web, no engine of chats has.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::fields::Fields;
use super::names::ToolNames;
use crate::Refusal;
use crate::ignored::Ignored;

/// Fields of a function's definition that a chat has.
const OF_FUNCTIONS: [&str; 6] = ["type", "name", "description", "parameters", "strict", "defer_loading"];

/// The functions, in the form of chats.
pub(super) fn functions(tools: &[Value], ignored: &mut Ignored) -> Result<Vec<Value>, Refusal> {
    for (nth, tool) in tools.iter().enumerate() {
        check(Fields::of(format!("tools[{nth}]"), tool.clone())?, ignored)?;
    }
    let told = keyway_text::responses_tools(tools.to_vec()).map_err(|_| Refusal {
        message: "'tools' must hold functions, each with a name.".to_owned(),
        param: Some("tools".to_owned()),
    })?;
    Ok(told.into_iter().map(without_nulls).collect())
}

/// Checks one tool, and notes what of it says nothing to an engine of chats.
fn check(mut tool: Fields, ignored: &mut Ignored) -> Result<(), Refusal> {
    let of = tool.need_text("type")?;
    match &*of {
        "function" => {
            check_function(&mut tool)?;
            ignored.note_all("tools", tool.names());
        }
        "custom" => {
            check_function(&mut tool)?;
            // A format of free text asks for nothing.
            if tool.take("format").is_some_and(|format| format["type"] != "text") {
                ignored.note("tools.format");
            }
            ignored.note_all("tools", tool.names());
        }
        "namespace" => {
            tool.need_text("name")?;
            let inner = tool.take_list("tools")?.ok_or_else(|| tool.missing("tools"))?;
            for (nth, inner) in inner.into_iter().enumerate() {
                let mut inner = Fields::of(format!("{}[{nth}]", tool.place("tools")), inner)?;
                match &*inner.need_text("type")? {
                    "function" => {
                        check_function(&mut inner)?;
                        ignored.note_all("tools", inner.names());
                    }
                    other => ignored.note(format!("tools.{other}")),
                }
            }
            // A prompt has the functions alone.
            ignored.note_all("tools.namespace", tool.names());
        }
        other => ignored.note(format!("tools.{other}")),
    }
    Ok(())
}

fn check_function(function: &mut Fields) -> Result<(), Refusal> {
    function.need_text("name")?;
    function.take_text("description")?;
    function.take_object("parameters")?;
    for name in OF_FUNCTIONS {
        function.take(name);
    }
    Ok(())
}

/// A function without what is not said of it.
fn without_nulls(mut tool: Value) -> Value {
    if let Some(function) = tool["function"].as_object_mut() {
        function.retain(|_, value| !value.is_null());
    }
    tool
}

/// A chat's `tool_choice`, if it has one. Of functions that the model may not call a chat does not know: they
/// are left out of `functions`.
pub(super) fn choose(
    choice: Option<&Value>,
    functions: &mut Vec<Value>,
    names: &ToolNames,
) -> Result<Option<Value>, Refusal> {
    let Some(choice) = choice else { return Ok(None) };
    let there: HashSet<String> = functions.iter().filter_map(name_of).map(str::to_owned).collect();
    let known = |of: &Value| {
        let name = of["name"].as_str()?;
        Some(if there.contains(name) { name.to_owned() } else { names.known(name) })
    };
    match choice["type"].as_str() {
        None => of_mode(choice, functions),
        Some("function" | "custom") => {
            let name = known(choice).filter(|name| there.contains(name));
            let name = name.ok_or_else(|| refusal("must name one of the functions of 'tools'."))?;
            Ok(Some(json!({"type": "function", "function": {"name": name}})))
        }
        Some("allowed_tools") => {
            let allowed = choice["tools"].as_array().ok_or_else(wrong)?;
            let allowed: HashSet<String> = allowed.iter().filter_map(known).collect();
            functions.retain(|function| name_of(function).is_some_and(|name| allowed.contains(name)));
            of_mode(&choice["mode"], functions)
        }
        Some(_) => Err(refusal(
            "forces a tool that does not run here: only functions that the client runs can be called.",
        )),
    }
}

fn of_mode(mode: &Value, functions: &[Value]) -> Result<Option<Value>, Refusal> {
    match mode.as_str() {
        Some("required") if functions.is_empty() => {
            Err(refusal("needs functions in 'tools' to choose from: no other tools run here."))
        }
        // Without functions it asks for nothing, and engines refuse it.
        Some("auto" | "none") if functions.is_empty() => Ok(None),
        Some("auto" | "none" | "required") => Ok(Some(mode.clone())),
        _ => Err(wrong()),
    }
}

fn name_of(function: &Value) -> Option<&str> {
    function["function"]["name"].as_str()
}

fn wrong() -> Refusal {
    refusal("must be none, auto, required, a function of 'tools' or allowed_tools.")
}

fn refusal(what: &str) -> Refusal {
    Refusal { message: format!("'tool_choice' {what}"), param: Some("tool_choice".to_owned()) }
}
