//! A request's body as a chat's, field by field: what a chat has under this or another name, what the answer
//! repeats, what says nothing to an engine of chats, and what nothing here could do.

use serde_json::{Map, Value, json};

use super::back::ResponseBack;
use super::fields::Fields;
use super::input::Messages;
use super::names::ToolNames;
use super::tools;
use super::writer::ResponseWriter;
use crate::engine_fields::of_chats;
use crate::ignored::Ignored;
use crate::late_system::{as_system, in_front};
use crate::{Refusal, SystemPlace, Translated};

/// Fields of chats that engines take over this API, too.
const OF_CHATS_TOO: [&str; 3] = ["stop", "stream_interval", "top_k"];

/// Fields that need what was kept of earlier requests, or keep something.
const KEPT: [&str; 5] =
    ["previous_response_id", "conversation", "prompt", "previous_input_messages", "background"];

/// What a request comes to, while its fields are taken.
#[derive(Default)]
struct Translation {
    chat: Map<String, Value>,
    /// Fields that the answer repeats.
    repeated: Map<String, Value>,
    ignored: Ignored,
}

pub(crate) fn to_chat(body: &[u8], place: SystemPlace) -> Result<Translated, Refusal> {
    let mut fields = Fields::of_body(body)?;
    refuse(&mut fields)?;
    let mut to = Translation::default();
    let model = fields.take_text("model")?;
    to.send_some("model", model.clone());
    to.messages(&mut fields, place)?;
    let names = to.functions(&mut fields)?;
    to.lengths(&mut fields)?;
    to.form(&mut fields)?;
    to.reasoning(&mut fields)?;
    to.stream(&mut fields)?;
    to.repeat(&mut fields)?;
    for (name, value) in fields.rest() {
        match of_chats(&name, &OF_CHATS_TOO) {
            Some(_) => drop(to.chat.insert(name, value)),
            None => to.ignored.note(name),
        }
    }
    let mut chat = Vec::new();
    // Writing plain values to memory cannot fail.
    let _ = serde_json::to_writer(&mut chat, &to.chat);
    let writer = ResponseWriter::new(model.unwrap_or_default(), 0, to.repeated, names);
    Ok(Translated { chat, ignored: to.ignored.into_names(), back: Box::new(ResponseBack::new(writer)) })
}

/// Refuses what nothing here could do, and without which the answer would be to something else.
fn refuse(fields: &mut Fields) -> Result<(), Refusal> {
    for name in KEPT {
        let value = fields.take(name).unwrap_or_default();
        if ![json!(null), json!(false), json!([])].contains(&value) {
            let what = if name == "background" {
                "is for answers that are kept, and nothing is kept here: wait for the answer."
            } else {
                "needs what was kept, and nothing is kept between requests here: send the whole input."
            };
            return Err(fields.refusal(name, what));
        }
    }
    if fields.take("keyway").is_some() {
        return Err(fields.refusal("keyway", "does not go with responses: leave it out."));
    }
    if fields.take_integer("top_logprobs", 0)?.is_some_and(|top| top > 0) {
        return Err(fields.refusal("top_logprobs", "is not told in responses here: leave it out."));
    }
    Ok(())
}

impl Translation {
    fn send(&mut self, name: &str, value: impl Into<Value>) {
        self.chat.insert(name.to_owned(), value.into());
    }

    fn send_some(&mut self, name: &str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.send(name, value);
        }
    }

    fn tell(&mut self, name: &str, value: impl Into<Value>) {
        self.repeated.insert(name.to_owned(), value.into());
    }

    fn messages(&mut self, fields: &mut Fields, place: SystemPlace) -> Result<(), Refusal> {
        let instructions = fields.take_text("instructions")?;
        let input = fields.take("input").ok_or_else(|| fields.missing("input"))?;
        let said = Messages::of(instructions.as_deref(), input, &mut self.ignored)?;
        let messages = match place {
            SystemPlace::Anywhere => said.messages,
            SystemPlace::NoDevelopers => as_system(said.messages),
            SystemPlace::InFront => in_front(said.messages),
        };
        self.send("messages", messages);
        if said.continues {
            self.send("add_generation_prompt", false);
            self.send("continue_final_message", true);
        }
        self.tell("instructions", instructions);
        Ok(())
    }

    fn functions(&mut self, fields: &mut Fields) -> Result<ToolNames, Refusal> {
        let tools = fields.take_list("tools")?.unwrap_or_default();
        let names = ToolNames::of(&tools);
        let mut functions = tools::functions(&tools, &mut self.ignored)?;
        let choice = fields.take("tool_choice");
        let chosen = tools::choose(choice.as_ref(), &mut functions, &names)?;
        let parallel = fields.take_bool("parallel_tool_calls")?;
        if !functions.is_empty() {
            self.send("tools", functions);
            self.send_some("tool_choice", chosen);
            self.send_some("parallel_tool_calls", parallel);
        }
        self.tell("tools", tools);
        self.tell("tool_choice", choice.unwrap_or_else(|| "auto".into()));
        self.tell("parallel_tool_calls", parallel.unwrap_or(true));
        Ok(names)
    }

    /// How long the answer may be, and what does not fit.
    fn lengths(&mut self, fields: &mut Fields) -> Result<(), Refusal> {
        let max = fields.take_integer("max_output_tokens", 1)?;
        self.send_some("max_tokens", max);
        self.tell("max_output_tokens", max);
        // Only the tools of a provider count for it.
        let calls = fields.take_integer("max_tool_calls", 0)?;
        self.tell("max_tool_calls", calls);
        match fields.take_text("truncation")?.as_deref() {
            None | Some("disabled") => {}
            Some("auto") => self.ignored.note("truncation"),
            Some(_) => return Err(fields.refusal("truncation", "must be auto or disabled.")),
        }
        self.tell("truncation", "disabled");
        Ok(())
    }

    /// Makes `text.format` a chat's `response_format`.
    fn form(&mut self, fields: &mut Fields) -> Result<(), Refusal> {
        let mut text = fields.take_object("text")?.unwrap_or_default();
        text.retain(|_, value| !value.is_null());
        text.entry("format").or_insert_with(|| json!({"type": "text"}));
        self.tell("text", text.clone());
        let mut text = Fields::of("text".to_owned(), text.into())?;
        let mut format = Fields::of(text.place("format"), text.take("format").unwrap_or_default())?;
        match &*format.need_text("type")? {
            "text" => {}
            "json_object" => self.send("response_format", json!({"type": "json_object"})),
            "json_schema" => {
                let schema = schema(&mut format)?;
                self.send("response_format", json!({"type": "json_schema", "json_schema": schema}));
            }
            _ => return Err(format.refusal("type", "must be text, json_object or json_schema.")),
        }
        self.ignored.note_all("text.format", format.names());
        self.ignored.note_all("text", text.names());
        Ok(())
    }

    fn reasoning(&mut self, fields: &mut Fields) -> Result<(), Refusal> {
        let mut told = fields.take_object("reasoning")?.unwrap_or_default();
        told.entry("effort").or_insert(Value::Null);
        self.tell("reasoning", told.clone());
        let mut reasoning = Fields::of("reasoning".to_owned(), told.into())?;
        self.send_some("reasoning_effort", reasoning.take_text("effort")?);
        self.ignored.note_all("reasoning", reasoning.names());
        Ok(())
    }

    /// A stream's usage is told at its end, which a chat does if it is asked to.
    fn stream(&mut self, fields: &mut Fields) -> Result<(), Refusal> {
        if fields.take_bool("stream")?.unwrap_or(false) {
            self.send("stream", true);
            self.send("stream_options", json!({"include_usage": true}));
        }
        let options = fields.take_object("stream_options")?.unwrap_or_default();
        let mut options = Fields::of("stream_options".to_owned(), options.into())?;
        // Padding against who watches the traffic; without it the text is the same.
        options.take_bool("include_obfuscation")?;
        self.ignored.note_all("stream_options", options.names());
        Ok(())
    }

    /// What the answer repeats as it came, or says by itself where nothing came.
    fn repeat(&mut self, fields: &mut Fields) -> Result<(), Refusal> {
        for name in ["temperature", "top_p"] {
            let value = fields.take(name);
            if let Some(number) = &value {
                if !number.is_number() {
                    return Err(super::fields::wrong(name, "a number", number));
                }
                self.send(name, number.clone());
            }
            self.tell(name, value);
        }
        for name in ["user", "prompt_cache_key"] {
            let text = fields.take_text(name)?;
            self.send_some(name, text.clone());
            self.tell(name, text);
        }
        let safety = fields.take_text("safety_identifier")?;
        self.tell("safety_identifier", safety);
        let metadata = fields.take_object("metadata")?.unwrap_or_default();
        self.tell("metadata", metadata);
        let tier = fields.take_text("service_tier")?.unwrap_or_else(|| "default".to_owned());
        if !["auto", "default"].contains(&&*tier) {
            self.ignored.note("service_tier");
        }
        self.tell("service_tier", tier);
        if fields.take_bool("store")? == Some(true) {
            self.ignored.note("store");
        }
        self.tell("store", false);
        if fields.take_list("include")?.is_some_and(|include| !include.is_empty()) {
            self.ignored.note("include");
        }
        self.tell("background", false);
        self.tell("top_logprobs", 0);
        Ok(())
    }
}

/// A JSON schema that the answer must have, as chats write it.
fn schema(format: &mut Fields) -> Result<Map<String, Value>, Refusal> {
    let mut told = Map::new();
    for name in ["name", "description"] {
        if let Some(text) = format.take_text(name)? {
            told.insert(name.to_owned(), text.into());
        }
    }
    let schema = format.take_object("schema")?.ok_or_else(|| format.missing("schema"))?;
    told.insert("schema".to_owned(), schema.into());
    if let Some(strict) = format.take_bool("strict")? {
        told.insert("strict".to_owned(), strict.into());
    }
    Ok(told)
}
