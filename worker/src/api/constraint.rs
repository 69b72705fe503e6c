//! The fields that say which form an answer must have, and the forms of answers that call functions. The
//! forms are compiled by `grammar.rs`.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::App;
use super::error::ApiError;
use super::params::{Params, kind};
use super::tools::{ToolChoice, Tools};
use crate::answer::answer_format::{AnswerFormat, CallFormat, Function, ReasoningFormat};
use crate::engine::grammar::{Form, FormBound, check_parts, set_compactly};
use crate::limits::GRAMMAR_CHOICES_MAX;

/// Text of any kind, up to what follows in the grammar.
const ANY_TEXT: &str = "/(.|\\n)*/";

/// Takes the fields that ask for a form; at most one may.
pub(super) fn take(params: &mut Params) -> Result<Option<Form>, ApiError> {
    let mut forms = Vec::new();
    if let Some(form) = take_response_format(params)? {
        forms.push(("response_format", form));
    }
    for name in ["guided_json", "guided_regex", "guided_choice", "guided_grammar"] {
        if let Some(value) = params.take(name) {
            forms.push((name, form(name, name.trim_start_matches("guided_"), value)?));
        }
    }
    if let Some(fields) = params.take_object("structured_outputs")? {
        let mut fields = Params::new(fields);
        for key in ["json", "regex", "choice", "grammar", "json_object"] {
            if let Some(value) = fields.take(key) {
                forms.push(("structured_outputs", form("structured_outputs", key, value)?));
            }
        }
        fields.finish()?;
    }
    match forms.len() {
        0 | 1 => Ok(forms.pop().map(|(_, form)| form)),
        _ => {
            let names: Vec<&str> = forms.iter().map(|(name, _)| *name).collect();
            let what = format!("Only one of {} may say the answer's form.", names.join(", "));
            Err(ApiError::invalid_value(names[1], what))
        }
    }
}

fn take_response_format(params: &mut Params) -> Result<Option<Form>, ApiError> {
    const NAME: &str = "response_format";
    let Some(format) = params.take_object(NAME)? else { return Ok(None) };
    let wrong = |what: &str| Err(ApiError::invalid_value(NAME, what));
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Form::Json(json!({"type": "object"})))),
        Some("json_schema") => match format.get("json_schema").and_then(|s| s.get("schema")) {
            Some(schema @ Value::Object(_)) => Ok(Some(Form::Json(schema.clone()))),
            _ => wrong("'response_format.json_schema.schema' must be a JSON schema, which is an object."),
        },
        _ => wrong("'response_format.type' must be text, json_object or json_schema."),
    }
}

/// A form as vLLM's fields say it.
fn form(param: &str, key: &str, value: Value) -> Result<Form, ApiError> {
    let wrong =
        |what: &str| Err(ApiError::invalid_value(param, format!("'{key}' of '{param}' must be {what}.")));
    match (key, value) {
        ("json", Value::String(text)) => match serde_json::from_str(&text) {
            Ok(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(Form::Json(schema)),
            _ => wrong("a JSON schema"),
        },
        ("json", schema @ (Value::Object(_) | Value::Bool(_))) => Ok(Form::Json(schema)),
        ("json", other) => wrong(&format!("a JSON schema, not {}", kind(&other))),
        ("json_object", Value::Bool(true)) => Ok(Form::Json(json!({"type": "object"}))),
        ("json_object", _) => wrong("true, or left out"),
        ("regex", Value::String(regex)) => Ok(Form::Regex(regex)),
        ("grammar", Value::String(lark)) => Ok(Form::Lark(lark)),
        ("choice", Value::Array(choices)) if choices.len() > GRAMMAR_CHOICES_MAX => {
            wrong(&format!("an array of at most {GRAMMAR_CHOICES_MAX} strings, not {}", choices.len()))
        }
        ("choice", Value::Array(choices)) if !choices.is_empty() && choices.iter().all(Value::is_string) => {
            let choices: Vec<String> = choices.iter().map(Value::to_string).collect();
            Ok(Form::Composed(format!("start: {}", choices.join(" | "))))
        }
        ("choice", _) => wrong("an array of strings, at least one"),
        (_, other) => wrong(&format!("a string, not {}", kind(&other))),
    }
}

/// The form of a whole answer, with the thoughts that may come before it. `open` says that the prompt opened
/// them. The error says which bound a part of it exceeds.
pub(super) fn whole_form(
    app: &App,
    form: Option<&Form>,
    tools: &Tools,
    open: bool,
) -> Result<Option<Form>, FormBound> {
    let names: Vec<&Function> = match &tools.choice {
        ToolChoice::Required => tools.callable.iter().collect(),
        ToolChoice::Named(name) => tools.callable.iter().filter(|f| f.name == *name).collect(),
        ToolChoice::Never | ToolChoice::Auto => Vec::new(),
    };
    let harmony = app.formats.answer == AnswerFormat::Harmony;
    let thinks = app.formats.reasoning != ReasoningFormat::None;
    let (body, rules) = if names.is_empty() {
        let Some(form) = form else { return Ok(None) };
        if !harmony && !thinks {
            return Ok(Some(form.clone()));
        }
        check_parts(Some(form), [])?;
        lark_of(form)
    } else {
        check_parts(None, names.iter().map(|function| &function.parameters))?;
        let many = tools.parallel && tools.choice == ToolChoice::Required;
        if harmony { harmony_calls(&names) } else { calls(app.formats.calls, &names, many) }
    };
    let start = if harmony {
        let body = if names.is_empty() { format!("<|channel|> \"final\" <|message|> {body}") } else { body };
        let thoughts = format!(
            "<|channel|> \"analysis\" <|message|> THOUGHTS <|end|> <|start|> \"assistant\"\nTHOUGHTS: {ANY_TEXT}"
        );
        format!("start: thoughts? body\nbody: {body}\nthoughts: {thoughts}\n")
    } else if thinks {
        // Behind thoughts models leave a line free.
        let thoughts = "thoughts \"\\n\"? \"\\n\"?";
        let begin = if open { thoughts.to_owned() } else { format!("(\"<think>\" {thoughts})?") };
        let rule = format!("thoughts[suffix=\"</think>\"]: {ANY_TEXT}");
        format!("start: {begin} body\nbody: {body}\n{rule}\n")
    } else {
        format!("start: {body}\n")
    };
    Ok(Some(Form::Composed(start + &rules)))
}

/// A form as one symbol of a Lark grammar, and the rules it needs.
fn lark_of(form: &Form) -> (String, String) {
    match form {
        Form::Json(schema) => ("form".to_owned(), format!("form: {}\n", json_rule(schema))),
        Form::Regex(regex) => ("FORM".to_owned(), format!("FORM: /{}/\n", regex.replace('/', "\\/"))),
        Form::Lark(lark) | Form::Composed(lark) => {
            ("form".to_owned(), lark.replacen("start:", "form:", 1) + "\n")
        }
    }
}

fn json_rule(schema: &Value) -> String {
    format!("%json {}", set_compactly(schema.clone()))
}

/// Calls in a model's own format: one, or `many`.
fn calls(format: CallFormat, functions: &[&Function], many: bool) -> (String, String) {
    let (mut call, mut rules) = (Vec::new(), String::new());
    for (i, function) in functions.iter().enumerate() {
        let name = Value::String(function.name.clone()).to_string();
        let (before, after) = match format {
            CallFormat::QwenXml => {
                rules += &xml_arguments(i, function);
                (format!("<tool_call>\n<function={}>\n", function.name), "</function>\n</tool_call>")
            }
            CallFormat::Hermes => {
                rules.extend([format!("arguments_{i}: {}\n", json_rule(&function.parameters))]);
                (format!("<tool_call>\n{{\"name\": {name}, \"arguments\": "), "}\n</tool_call>")
            }
            CallFormat::Json | CallFormat::None => {
                rules.extend([format!("arguments_{i}: {}\n", json_rule(&function.parameters))]);
                (format!("{{\"name\": {name}, \"parameters\": "), "}")
            }
        };
        call.push(format!("{} arguments_{i} {}", json!(before), json!(after)));
    }
    let between = if matches!(format, CallFormat::Json | CallFormat::None) { "; " } else { "\n" };
    rules.extend([format!("call: {}\n", call.join(" | "))]);
    let body = if many { format!("call ({} call)*", json!(between)) } else { "call".to_owned() };
    (body, rules)
}

/// Arguments as Qwen3-Coder writes them: those that are required and perhaps the others, in the schema's
/// order.
fn xml_arguments(i: usize, function: &Function) -> String {
    let nothing = Map::new();
    let properties = function.parameters["properties"].as_object().unwrap_or(&nothing);
    let required = function.parameters["required"].as_array().map_or(&[][..], Vec::as_slice);
    // Both may be long.
    let required: HashSet<&str> = required.iter().filter_map(Value::as_str).collect();
    let one = |key: &String| {
        let mark = if required.contains(key.as_str()) { "" } else { "?" };
        format!("({} value_{i}){mark}", json!(format!("<parameter={key}>\n")))
    };
    let all: Vec<String> = properties.keys().map(one).collect();
    let all = if all.is_empty() { "\"\"".to_owned() } else { all.join(" ") };
    format!("arguments_{i}: {all}\nvalue_{i}[suffix=\"\\n</parameter>\\n\"]: {ANY_TEXT}\n")
}

/// A call as gpt-oss writes it; the token behind it ends the turn.
fn harmony_calls(functions: &[&Function]) -> (String, String) {
    let (mut call, mut rules) = (Vec::new(), String::new());
    for (i, function) in functions.iter().enumerate() {
        let header = json!(format!("commentary to=functions.{} ", function.name));
        rules.extend([format!("arguments_{i}: {}\n", json_rule(&function.parameters))]);
        call.push(format!("<|channel|> {header} <|constrain|> \"json\" <|message|> arguments_{i}"));
    }
    (call.join(" | "), rules)
}
