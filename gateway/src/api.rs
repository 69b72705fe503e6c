//! The APIs whose answers stream, and how each says what a gateway has to understand of them: generated
//! content, an answer's end, an error. What is not said here passes unread.

mod says;
mod shape;

pub use self::says::{AtFault, End, Said};

/// Anthropic's word for a request that goes on from a thread, where none are kept.
pub const NO_THREADS: &str = "thread_unsupported_request";

/// An API, by the path of its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// OpenAI's chat completions, `/v1/chat/completions`: streams end with `[DONE]`.
    Chat,
    /// OpenAI's completions, `/v1/completions`: streams end with `[DONE]`.
    Completions,
    /// OpenAI's responses, `/v1/responses`: streams end with `response.completed` or `response.incomplete`.
    Responses,
    /// Anthropic's messages, `/v1/messages`: streams end with `message_stop`.
    Messages,
    /// Any other: its streams are relayed without being understood, but for errors.
    Other,
}

impl Api {
    /// The API of a path.
    pub fn of(path: &str) -> Self {
        match path.strip_suffix('/').unwrap_or(path) {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            _ => Self::Other,
        }
    }

    /// Whether its streams say themselves that they are whole: one that ends without that has broken off.
    pub fn says_its_end(self) -> bool {
        self != Self::Other
    }
}
