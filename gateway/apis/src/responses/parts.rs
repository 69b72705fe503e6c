//! A message's content as chats have it: a text, or parts. Images, sounds and files keep their data.

use serde_json::{Map, Value, json};

use super::fields::{Fields, wrong};
use crate::Refusal;
use crate::ignored::Ignored;
use crate::late_system::{Beside, Speaker, Turn, beside};

/// Fields of an answer's texts that are not the model's matter when it is sent back.
const OF_ANSWERS: [&str; 2] = ["annotations", "logprobs"];

/// Of the value at `place`.
pub(super) fn content(place: &str, value: Value, ignored: &mut Ignored) -> Result<Value, Refusal> {
    match value {
        Value::String(_) => Ok(value),
        Value::Array(parts) => {
            let part =
                |(nth, value): (usize, Value)| part(Fields::of(format!("{place}[{nth}]"), value)?, ignored);
            parts.into_iter().enumerate().map(part).collect()
        }
        other => Err(wrong(place, "a string or an array of parts", &other)),
    }
}

fn part(mut part: Fields, ignored: &mut Ignored) -> Result<Value, Refusal> {
    let of = part.need_text("type")?;
    let told = match &*of {
        "input_text" | "output_text" | "text" => {
            for name in OF_ANSWERS {
                part.take(name);
            }
            json!({"type": "text", "text": part.need_text("text")?})
        }
        "refusal" => json!({"type": "text", "text": part.need_text("refusal")?}),
        "input_image" => image(&mut part)?,
        "input_file" => file(&mut part)?,
        // As chats write them, or as vLLM's do.
        "input_audio" | "image_url" | "audio_url" | "video_url" | "file" => {
            let data = part.take(&of).ok_or_else(|| part.missing(&of))?;
            let fields = [("type".to_owned(), of.clone().into()), (of.clone(), data)];
            Value::Object(fields.into_iter().collect())
        }
        _ => {
            let what = "is no kind of part that chats have: send text, an image, a sound or a file.";
            return Err(part.refusal("type", what));
        }
    };
    ignored.note_all("input.content", part.names());
    Ok(told)
}

fn image(part: &mut Fields) -> Result<Value, Refusal> {
    let Some(url) = part.take_text("image_url")? else {
        let (name, what) = match part.take("file_id") {
            Some(_) => ("file_id", "names a file, and chats have no images by name: send 'image_url'."),
            None => ("image_url", "is missing: it is the image's address, or a data URL."),
        };
        return Err(part.refusal(name, what));
    };
    let mut told = Map::new();
    told.insert("url".to_owned(), url.into());
    if let Some(detail) = part.take_text("detail")? {
        told.insert("detail".to_owned(), detail.into());
    }
    Ok(json!({"type": "image_url", "image_url": told}))
}

fn file(part: &mut Fields) -> Result<Value, Refusal> {
    let mut told = Map::new();
    for name in ["file_data", "file_id", "filename"] {
        if let Some(text) = part.take_text(name)? {
            told.insert(name.to_owned(), text.into());
        }
    }
    if part.take("file_url").is_some() {
        return Err(part.refusal("file_url", "is an address, and chats have none: send 'file_data'."));
    }
    if !told.contains_key("file_data") && !told.contains_key("file_id") {
        return Err(part.missing("file_data"));
    }
    Ok(json!({"type": "file", "file": told}))
}

/// A chat's message as JSON.
impl Turn for Value {
    fn speaker(&self) -> Speaker {
        match self["role"].as_str() {
            Some("system" | "developer") => Speaker::System,
            Some("user") => Speaker::Reminded,
            Some("tool") if self["content"].is_string() => Speaker::Reminded,
            _ => Speaker::Other,
        }
    }

    fn is_developers(&self) -> bool {
        self["role"] == "developer"
    }

    fn make_system(&mut self) {
        self["role"] = "system".into();
    }

    fn of_user(text: String) -> Self {
        json!({"role": "user", "content": text})
    }

    fn into_text(mut self) -> String {
        match self["content"].take() {
            Self::String(text) => text,
            Self::Array(parts) => {
                parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
            }
            _ => String::new(),
        }
    }

    fn join(&mut self, next: Self) {
        let text = beside(&self.take().into_text(), &next.into_text(), Beside::Behind);
        *self = json!({"role": "system", "content": text});
    }

    fn add(&mut self, added: &str, place: Beside) {
        match &mut self["content"] {
            Self::String(text) => *text = beside(text, added, place),
            Self::Array(parts) => {
                let at = if place == Beside::Before { 0 } else { parts.len() };
                parts.insert(at, json!({"type": "text", "text": added}));
            }
            _ => {}
        }
    }
}
