//! OpenAI's Responses and Anthropic's Messages beside chat completions: how an answer is told in each, whole
//! and in events, and, in front of engines that speak chats alone, a request as a chat and the chat's answer
//! back. Bytes in, bytes out: no sockets, no engine.

mod chat;
mod engine_error;
mod engine_fields;
mod event;
mod ignored;
mod late_system;
pub mod messages;
pub mod models;
pub mod responses;
mod said;

use std::fmt;

pub use self::engine_error::{ErrorShape, said_in_event};
pub use self::late_system::{SystemPlace, messages_in_place};
pub use self::said::{CallDelta, Counts, Finish, Said};

/// An API that is not chat completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// Anthropic's `/v1/messages`.
    Messages,
    /// OpenAI's `/v1/responses`.
    Responses,
}

/// A request as a chat, and what turns the chat's answer back.
#[derive(Debug)]
pub struct Translated {
    /// The body of a request to `/v1/chat/completions`.
    pub chat: Vec<u8>,
    /// Fields of the request that say nothing to an engine of chats, such as `top_k.x`: left out, and named
    /// to the client.
    pub ignored: Vec<String>,
    /// Turns the answer back.
    pub back: Box<dyn Back>,
}

/// Turns the answer to one chat into that of another API.
pub trait Back: fmt::Debug + Send {
    /// A whole answer, of a body with status 200.
    ///
    /// # Errors
    /// It is no chat completion.
    fn whole(&mut self, chat: &[u8]) -> Result<Vec<u8>, NoChat>;

    /// Appends what one event of a streamed chat comes to: `data` is a chunk as JSON, an error or `[DONE]`.
    fn event(&mut self, data: &[u8], out: &mut Vec<u8>);

    /// Appends the end, once the stream has ended; nothing if it was told already.
    fn end(&mut self, out: &mut Vec<u8>);

    /// An error's body, from that of a chat's.
    fn error(&self, status: u16, body: &[u8]) -> Vec<u8>;
}

/// Why a request is no chat: the client's mistake, or something that no engine of chats can do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// What is wrong and what to do, as a sentence.
    pub message: String,
    /// The field that it is about.
    pub param: Option<String>,
}

/// An answer that is no chat completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the engine's answer is no chat completion")]
pub struct NoChat;

/// Turns a request's body into a chat's, for an engine whose template has this place for system messages.
///
/// # Errors
/// The body is no request of this API, or asks for what chats do not have.
pub fn to_chat(api: Api, body: &[u8], place: SystemPlace) -> Result<Translated, Refusal> {
    match api {
        Api::Messages => messages::to_chat(body, place),
        Api::Responses => responses::to_chat(body, place),
    }
}
