//! How a model writes its thoughts and its calls into its text, told from its chat template, and text to the
//! parts of an answer. Pieces of text in, pieces of parts out: however the text is cut, the parts joined are
//! the same. gpt-oss' format works on token ids and is `keyway_text::HarmonyParser`.

mod hermes;
mod json_call;
mod plain_json;
mod qwen_xml;
mod tag;
mod think;

use std::str::FromStr;
use std::sync::Arc;

use keyway_text::{ChatTemplate, TextModel};

pub(crate) use self::hermes::Hermes;
pub(crate) use self::plain_json::PlainJson;
pub(crate) use self::qwen_xml::QwenXml;
pub(crate) use self::think::ThinkSplitter;

/// How an answer is laid out as a whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum AnswerFormat {
    /// Text, perhaps with tags.
    #[default]
    Text,
    /// gpt-oss' own: channels for thoughts, answer and calls, between special tokens.
    Harmony,
}

/// How thoughts are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// None are told from the answer.
    None,
    /// Between `<think>` and `</think>` (Qwen3, DeepSeek-R1). The prompt may have opened them.
    Think,
    /// As before, and an answer without `<think>` begins inside them (older templates of DeepSeek-R1).
    ThinkOpen,
}

/// How calls of functions are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFormat {
    /// None are told from the answer.
    None,
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes 2 Pro, Qwen2.5, Qwen3).
    Hermes,
    /// The whole answer is `{"name": …, "parameters": {…}}`, several set off by `;` (Llama 3).
    Json,
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen3-Coder).
    QwenXml,
}

/// How the served model writes answers, thoughts and calls; one for all requests, made by [`Formats::of`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Formats {
    pub(crate) answer: AnswerFormat,
    pub(crate) reasoning: ReasoningFormat,
    pub(crate) calls: CallFormat,
}

/// A function, as far as reading its calls needs it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// JSON schema of its arguments.
    pub(crate) parameters: serde_json::Value,
}

/// More of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CallDelta {
    /// Which call of the answer.
    pub(crate) index: usize,
    /// The function, where the call begins.
    pub(crate) name: Option<String>,
    /// More of the arguments' JSON.
    pub(crate) arguments: String,
}

/// What a reader of calls found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) content: String,
    pub(crate) calls: Vec<CallDelta>,
}

/// Reads calls out of text.
#[derive(Debug)]
pub(crate) enum CallReader {
    Hermes(Hermes),
    Json(PlainJson),
    QwenXml(QwenXml),
}

// === impl Formats ===

impl Formats {
    /// A model's, unless `reasoning` or `calls` say otherwise.
    pub(crate) fn of(
        text: &TextModel,
        reasoning: Option<ReasoningFormat>,
        calls: Option<CallFormat>,
    ) -> Self {
        let answer = if text.harmony.is_some() { AnswerFormat::Harmony } else { AnswerFormat::Text };
        Self {
            answer,
            reasoning: reasoning.unwrap_or_else(|| ReasoningFormat::of(&text.template)),
            calls: calls.unwrap_or_else(|| CallFormat::of(&text.template)),
        }
    }
}

impl ReasoningFormat {
    fn of(template: &ChatTemplate) -> Self {
        if template.mentions("</think>") { Self::Think } else { Self::None }
    }
}

impl CallFormat {
    /// The most telling mark of each family's template. A template without one leaves plain JSON, in which
    /// calls that a grammar enforces can be told.
    fn of(template: &ChatTemplate) -> Self {
        if template.mentions("<function=") && template.mentions("<tool_call>") {
            Self::QwenXml
        } else if template.mentions("<tool_call>") {
            Self::Hermes
        } else {
            Self::Json
        }
    }
}

impl FromStr for ReasoningFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "none" => Ok(Self::None),
            "qwen3" | "think" => Ok(Self::Think),
            "deepseek_r1" => Ok(Self::ThinkOpen),
            _ => Err("expected none, qwen3 (or think) or deepseek_r1".to_owned()),
        }
    }
}

impl FromStr for CallFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "none" => Ok(Self::None),
            "hermes" => Ok(Self::Hermes),
            "llama3_json" | "json" => Ok(Self::Json),
            "qwen3_coder" | "qwen3_xml" => Ok(Self::QwenXml),
            _ => Err("expected none, hermes, llama3_json (or json) or qwen3_coder".to_owned()),
        }
    }
}

// === impl CallReader ===

impl CallReader {
    /// A reader of calls to `functions`; `None` where none are told.
    pub(crate) fn new(format: CallFormat, functions: &Arc<[Function]>) -> Option<Self> {
        Some(match format {
            CallFormat::None => return None,
            CallFormat::Hermes => Self::Hermes(Hermes::default()),
            CallFormat::Json => Self::Json(PlainJson::default()),
            CallFormat::QwenXml => Self::QwenXml(QwenXml::new(functions)),
        })
    }

    pub(crate) fn push(&mut self, text: &str, found: &mut Found) {
        match self {
            Self::Hermes(reader) => reader.push(text, found),
            Self::Json(reader) => reader.push(text, found),
            Self::QwenXml(reader) => reader.push(text, found),
        }
    }

    /// The text ended: what is withheld and no call is shown; the beginning of a call is not.
    pub(crate) fn finish(&mut self, found: &mut Found) {
        match self {
            Self::Hermes(reader) => reader.finish(found),
            Self::Json(reader) => reader.finish(found),
            Self::QwenXml(reader) => reader.finish(found),
        }
    }
}

// === impl Found ===

impl Found {
    /// Appends to the call at hand, or begins another.
    fn call(&mut self, index: usize, name: Option<String>, arguments: &str) {
        match self.calls.last_mut() {
            Some(last) if last.index == index && name.is_none() => last.arguments.push_str(arguments),
            _ => self.calls.push(CallDelta { index, name, arguments: arguments.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests;
