//! Anthropic's Messages: how a message is told, whole (`answer.rs`) and in events (`events.rs`), and its
//! errors (`error.rs`); and a request as a chat (`request.rs`) with the chat's answer back (`back.rs`).

mod answer;
mod arguments;
mod back;
mod blocks;
mod chat_body;
mod conversation;
mod error;
mod events;
mod fields;
mod request;
mod tools;

pub use self::answer::MessageHead;
pub(crate) use self::error::error_of_body;
pub use self::error::{error, error_of_event};
pub use self::events::{MessageEvents, write_error};
pub(crate) use self::request::to_chat;
pub use self::request::to_counted_chat;
