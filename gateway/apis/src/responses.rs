//! OpenAI's Responses: how a response is told, whole and in events, and a request as a chat and back. A
//! request becomes the chat that vLLM 0.32 makes of it, so its prompt finds the same cached blocks.

mod back;
mod errors;
mod fields;
mod input;
mod items;
mod names;
mod parts;
mod request;
mod tools;
mod writer;

pub(crate) use self::errors::error;
pub use self::names::ToolNames;
pub(crate) use self::request::to_chat;
pub use self::writer::ResponseWriter;

#[cfg(test)]
mod tests;
