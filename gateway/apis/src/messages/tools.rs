//! A request's tools as the functions of a chat, their schemas byte for byte, and which of them the model may
//! or must call.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use serde::Serialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::chat_body::ChatBody;
use super::conversation::ToolChange;
use super::fields::{Fields, kind, refused, wrong};
use crate::Refusal;
use crate::ignored::Ignored;

/// A tool as the request has it.
#[derive(Debug)]
struct Tool<'a> {
    name: Cow<'a, str>,
    /// None, where only Anthropic's models know what it takes.
    function: Option<Function<'a>>,
}

/// A function, but for its name.
#[derive(Debug, Serialize)]
struct Function<'a> {
    name: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<Cow<'a, str>>,
    parameters: Cow<'a, RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    defer_loading: Option<bool>,
}

/// As a chat has it.
#[derive(Serialize)]
struct ChatTool<'a> {
    #[serde(rename = "type")]
    of: &'static str,
    function: &'a Function<'a>,
}

/// Puts the tools that are there at the end of the conversation, and the choice among them.
pub(super) fn put(
    body: &mut Fields<'_>,
    changes: Vec<ToolChange<'_>>,
    chat: &mut ChatBody,
    ignored: &mut Ignored,
) -> Result<(), Refusal> {
    let declared = body.list("tools")?.unwrap_or_default();
    let declared = declared.into_iter().enumerate().map(|(i, tool)| {
        let mut fields = Fields::of(tool, format!("tools.{i}"))?;
        Tool::take(&mut fields).inspect(|tool| tool.note_left(fields, ignored))
    });
    let tools = changed(declared.collect::<Result<_, _>>()?, changes, ignored)?;
    let functions: Vec<&Function<'_>> = tools.iter().filter_map(|tool| tool.function.as_ref()).collect();
    for tool in tools.iter().filter(|tool| tool.function.is_none()) {
        if functions.is_empty() {
            let message =
                "'tools' must hold a tool with an 'input_schema': an engine of chats knows no other.";
            return Err(refused("tools", message));
        }
        ignored.note(format!("tools.{}", tool.name));
    }
    if !functions.is_empty() {
        let tools: Vec<ChatTool<'_>> =
            functions.iter().map(|function| ChatTool { of: "function", function }).collect();
        chat.put("tools", &tools);
    }
    put_choice(body, &functions, chat, ignored)
}

/// Puts whether the model calls, and whether more than once.
fn put_choice(
    body: &mut Fields<'_>,
    functions: &[&Function<'_>],
    chat: &mut ChatBody,
    ignored: &mut Ignored,
) -> Result<(), Refusal> {
    let Some(mut choice) = body.object("tool_choice")? else { return Ok(()) };
    let of = choice.needed_text("type")?;
    let name = choice.text("name")?;
    let alone = choice.flag("disable_parallel_tool_use")?.unwrap_or(false);
    let chosen = match &*of {
        "auto" => json!("auto"),
        "none" => json!("none"),
        "any" => json!("required"),
        "tool" => {
            let name = name.ok_or_else(|| choice.missing("name"))?;
            if functions.iter().all(|function| function.name != name) {
                let message = "'tool_choice.name' must be that of one of 'tools' that has an 'input_schema'.";
                return Err(refused("tool_choice.name", message));
            }
            json!({"type": "function", "function": {"name": name}})
        }
        _ => {
            let message = "'tool_choice.type' must be auto, any, none or tool.";
            return Err(refused("tool_choice.type", message));
        }
    };
    ignored.note_all("tool_choice", choice.names());
    if functions.is_empty() {
        // Engines refuse a choice among nothing; these two ask for nothing.
        return match &*of {
            "auto" | "none" => Ok(()),
            _ => Err(refused("tool_choice", "'tool_choice' needs 'tools' to choose from.")),
        };
    }
    chat.put("tool_choice", &chosen);
    if alone {
        chat.put("parallel_tool_calls", &false);
    }
    Ok(())
}

impl<'a> Tool<'a> {
    fn take(fields: &mut Fields<'a>) -> Result<Self, Refusal> {
        let name = fields.needed_text("name")?;
        let of = fields.text("type")?;
        let Some(schema) = fields.take("input_schema") else {
            return match of.as_deref() {
                None | Some("custom") => Err(fields.missing("input_schema")),
                Some(_) => Ok(Self { name, function: None }),
            };
        };
        let function = Function {
            name: name.clone(),
            description: fields.text("description")?,
            parameters: parameters(schema, &fields.path("input_schema"))?,
            strict: fields.flag("strict")?,
            defer_loading: fields.flag("defer_loading")?,
        };
        Ok(Self { name, function: Some(function) })
    }

    /// Notes what else is said of a function.
    fn note_left(&self, mut fields: Fields<'_>, ignored: &mut Ignored) {
        fields.take("cache_control");
        if self.function.is_some() {
            ignored.note_all("tools", fields.names());
        }
    }
}

/// A schema as the client wrote it. One that does not say its type is an object's.
fn parameters<'a>(schema: &'a RawValue, path: &str) -> Result<Cow<'a, RawValue>, Refusal> {
    if kind(schema) != "an object" {
        return Err(wrong(path, "a JSON schema, which is an object", schema));
    }
    let fields = Fields::of(schema, path.to_owned())?;
    if fields.has("type") {
        return Ok(Cow::Borrowed(schema));
    }
    let comma = if fields.is_empty() { "" } else { "," };
    let open = schema.get().strip_suffix('}').unwrap_or_default();
    let typed = format!("{open}{comma}\"type\":\"object\"}}");
    RawValue::from_string(typed).map(Cow::Owned).map_err(|_| wrong(path, "a JSON schema", schema))
}

/// Tools by their names, in the order in which they came.
#[derive(Debug, Default)]
struct ToolSet<'a> {
    tools: Vec<Tool<'a>>,
    places: HashMap<Cow<'a, str>, usize>,
    removed: HashSet<Cow<'a, str>>,
}

impl<'a> ToolSet<'a> {
    /// Adds a tool, or has it in the place of an older one of its name.
    fn put(&mut self, tool: Tool<'a>) {
        if let Some(&place) = self.places.get(&tool.name) {
            self.tools[place] = tool;
        } else {
            self.places.insert(tool.name.clone(), self.tools.len());
            self.tools.push(tool);
        }
    }

    /// A tool that is added is no longer deferred.
    fn change(&mut self, change: ToolChange<'a>, ignored: &mut Ignored) -> Result<(), Refusal> {
        let ToolChange { adds, mut tool } = change;
        let of = tool.needed_text("type")?;
        let name = match &*of {
            "tool_definition" if adds => {
                let mut fields = tool.object("definition")?.ok_or_else(|| tool.missing("definition"))?;
                let defined = Tool::take(&mut fields)?;
                defined.note_left(fields, ignored);
                let name = defined.name.clone();
                self.put(defined);
                name
            }
            "tool_reference" => {
                let name = tool.needed_text("name")?;
                let Some(&place) = self.places.get(&name) else {
                    let path = tool.path("name");
                    return Err(refused(&path, &format!("'{path}' must be that of one of 'tools'.")));
                };
                if let Some(function) = self.tools[place].function.as_mut().filter(|_| adds) {
                    function.defer_loading = None;
                }
                name
            }
            _ => {
                let path = tool.path("type");
                let message = format!("'{path}' must be tool_reference, or tool_definition to add one.");
                return Err(refused(&path, &message));
            }
        };
        if adds {
            self.removed.remove(&name)
        } else {
            self.removed.insert(name)
        };
        Ok(())
    }
}

/// The tools with what the system added and removed.
fn changed<'a>(
    declared: Vec<Tool<'a>>,
    changes: Vec<ToolChange<'a>>,
    ignored: &mut Ignored,
) -> Result<Vec<Tool<'a>>, Refusal> {
    if changes.is_empty() {
        return Ok(declared);
    }
    let mut set = ToolSet::default();
    for tool in declared {
        set.put(tool);
    }
    changes.into_iter().try_for_each(|change| set.change(change, ignored))?;
    let ToolSet { mut tools, removed, .. } = set;
    tools.retain(|tool| !removed.contains(&tool.name));
    Ok(tools)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_is_passed_on_as_it_was_written() {
        for (schema, want) in [
            (r#"{ "type":"object", "b":1e2,"a":{"x":{}}}"#, r#"{ "type":"object", "b":1e2,"a":{"x":{}}}"#),
            (
                r#"{"z":12345678901234567890123,"a":{"x":{}}}"#,
                r#"{"z":12345678901234567890123,"a":{"x":{}},"type":"object"}"#,
            ),
            ("{ }", r#"{ "type":"object"}"#),
            (r#"{"a":"}"}"#, r#"{"a":"}","type":"object"}"#),
            (r#"{"type":null}"#, r#"{"type":null}"#),
        ] {
            let raw: &RawValue = serde_json::from_str(schema).unwrap();
            assert_eq!(parameters(raw, "p").unwrap().get(), want);
        }
        let raw: &RawValue = serde_json::from_str("[]").unwrap();
        assert_eq!(parameters(raw, "p").unwrap_err().param.as_deref(), Some("p"));
    }
}
