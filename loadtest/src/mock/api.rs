//! The APIs in whose words the mock generates.

/// An API that generates answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    /// OpenAI's `/v1/chat/completions`: messages, and one that answers them.
    Chat,
    /// OpenAI's `/v1/completions`: a text that goes on.
    Completions,
    /// OpenAI's `/v1/responses`: items, and an output of items.
    Responses,
    /// Anthropic's `/v1/messages`: messages, and blocks that answer them.
    Messages,
}
