//! The body of `/v1/chat/completions`.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Conversation, ConversationError, Ending, tools};
use crate::Message;

/// As far as its prompt depends on it.
#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    messages: Vec<Message<'a>>,
    tools: Option<Vec<Value>>,
    documents: Option<Value>,
    chat_template: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<Value>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
}

impl<'a> Conversation<'a> {
    /// Of a request to `/v1/chat/completions`.
    ///
    /// # Errors
    /// It is no such request, or brings a template of its own.
    pub fn from_chat(body: &'a [u8]) -> Result<Self, ConversationError> {
        let body: Body<'_> =
            serde_json::from_slice(body).map_err(|_| ConversationError::Unsupported("no chat request"))?;
        if body.chat_template.is_some_and(|template| !template.is_null()) {
            return Err(ConversationError::Unsupported("a template of its own"));
        }
        let mut messages = body.messages;
        for call in messages.iter_mut().filter_map(calls_of).flatten() {
            *call = tools::chat_call(call.take());
        }
        let mut chat = Self::of(messages);
        let given = body.tools.filter(|tools| !tools.is_empty());
        chat.tools = given.map(tools::chat_tools).transpose()?;
        chat.documents = body.documents.filter(|list| list.as_array().is_some_and(|list| !list.is_empty()));
        chat.variables = body.chat_template_kwargs.unwrap_or_default();
        chat.reason(body.reasoning_effort.as_ref());
        let opens = body.add_generation_prompt.unwrap_or(true);
        chat.ending = match (body.continue_final_message.unwrap_or(false), opens) {
            (true, true) => return Err(ConversationError::Unsupported("an answer opened and gone on with")),
            (true, false) => Ending::ContinuesLast,
            (false, true) => Ending::OpensAnswer,
            (false, false) => Ending::Nothing,
        };
        chat.add_special = body.add_special_tokens.unwrap_or(false);
        Ok(chat)
    }
}

fn calls_of<'m>(message: &'m mut Message<'_>) -> Option<&'m mut Vec<Value>> {
    message.get_mut("tool_calls")?.items_mut()
}
