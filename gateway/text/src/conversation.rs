//! A conversation as engines hand it to a model's chat template, from the body of any API that has one: chat
//! completions, OpenAI's Responses, Anthropic's Messages. What becomes of a body here is what vLLM 0.32 makes
//! of it (`vllm/renderers/chat_utils.py`, `renderers/online_renderer.py`), so that a prompt's tokens are the
//! engine's. A body that an engine would refuse may pass: its answer is the engine's matter.

mod chat;
mod messages;
mod prepared;
mod responses;
mod tools;
mod traits;

use serde_json::{Map, Value};

use self::prepared::{NO_TEXT, prepared};
pub use self::tools::{chat_call, chat_tools, responses_tools};
pub(crate) use self::traits::{TemplateTraits, later_system};
use crate::{ChatTemplate, Message, RenderOptions, TextError};

/// Begins a line that Claude Code puts before its system text, and that says something else in each request.
/// vLLM leaves it out.
pub const BILLING: &str = "x-anthropic-billing-header";

/// A conversation, however its request wrote it, and how its prompt is made.
#[derive(Debug)]
pub struct Conversation<'a> {
    messages: Vec<Message<'a>>,
    /// Functions, in the form of chat completions. A list of none is not the same to every template.
    tools: Option<Vec<Value>>,
    documents: Option<Value>,
    /// Further variables for the template.
    variables: Map<String, Value>,
    ending: Ending,
    /// Whether the tokenizer puts its own tokens around the prompt.
    add_special: bool,
}

/// How a prompt ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// With the opening of the answer.
    OpensAnswer,
    /// Within the last message, for the model to go on with it.
    ContinuesLast,
    /// With the end of the last message.
    Nothing,
}

/// A prompt's text, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptText {
    /// All of it, and whether the tokenizer puts its own tokens around it.
    Whole {
        /// As the engine would tokenise it.
        text: String,
        /// Such as a BOS token.
        add_special: bool,
    },
    /// What comes before the first message with what is no text: which tokens an image becomes only the
    /// engine knows.
    Beginning(String),
}

/// Why a prompt's text is not known.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// An engine would not take it so, or it is not known what an engine would make of it.
    #[error("it is not understood: {0}")]
    Unsupported(&'static str),
    /// The same, of the functions that the model may call.
    #[error("its tools are not understood: {0}")]
    Tools(&'static str),
    /// The template refuses it, or breaks.
    #[error(transparent)]
    Text(#[from] TextError),
}

impl<'a> Conversation<'a> {
    fn of(messages: Vec<Message<'a>>) -> Self {
        Self {
            messages,
            tools: None,
            documents: None,
            variables: Map::new(),
            ending: Ending::OpensAnswer,
            add_special: false,
        }
    }

    /// Messages that it has.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// The functions that it tells the model of, in the form of chat completions.
    pub fn tools(&self) -> &[Value] {
        self.tools.as_deref().unwrap_or_default()
    }

    /// Whether it has no message.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Sets how much the model is to reason, as an engine does that is told so: templates read one variable
    /// or the other.
    fn reason(&mut self, effort: Option<&Value>) {
        let Some(effort) = effort.filter(|effort| !effort.is_null()) else { return };
        self.variables.entry("enable_thinking").or_insert(Value::Bool(effort != "none"));
        self.variables.insert("reasoning_effort".to_owned(), effort.clone());
    }

    /// The text of its prompt.
    ///
    /// # Errors
    /// The template's; [`TextError::TooLong`] where the text would have more than `bytes_max` bytes.
    pub fn render(self, template: &ChatTemplate, bytes_max: usize) -> Result<PromptText, ConversationError> {
        let mut all_is_text = true;
        let mut messages = Vec::with_capacity(self.messages.len());
        for message in self.messages {
            let (message, is_text) = prepared(message)?;
            all_is_text &= is_text;
            messages.push(message);
        }
        let options = RenderOptions {
            add_generation_prompt: self.ending == Ending::OpensAnswer,
            continue_final_message: self.ending == Ending::ContinuesLast,
            tools: self.tools.map(Value::Array),
            documents: self.documents,
            variables: self.variables,
            bytes_max,
            ..RenderOptions::default()
        };
        let mut text = template.render_messages(messages, &options)?;
        if all_is_text {
            return Ok(PromptText::Whole { text, add_special: self.add_special });
        }
        match text.find(NO_TEXT) {
            Some(begins) if !self.add_special => {
                text.truncate(begins);
                Ok(PromptText::Beginning(text))
            }
            _ => Err(ConversationError::Unsupported("where what is no text stands in the prompt")),
        }
    }
}

/// A message by its fields.
fn message<'a>(fields: impl IntoIterator<Item = (&'static str, crate::Field<'a>)>) -> Message<'a> {
    let mut message = Message::default();
    for (name, field) in fields {
        message.set(name, field);
    }
    message
}

/// A field of an object that is there and not `null`.
fn take(object: &mut Map<String, Value>, name: &str) -> Option<Value> {
    object.remove(name).filter(|value| !value.is_null())
}

/// A text that may be missing.
fn take_text(object: &mut Map<String, Value>, name: &str) -> Result<Option<String>, ConversationError> {
    match take(object, name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(ConversationError::Unsupported("a text that is none")),
    }
}
