//! What can go wrong between text and token ids. Each message says what to do.

use std::path::PathBuf;

/// An error of a tokenizer or a chat template.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A checkpoint's file is missing or unreadable.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file, as it was opened.
        path: PathBuf,
        /// Why the operating system did not read it, such as a missing file.
        source: std::io::Error,
    },
    /// A checkpoint's file is not what its name promises.
    #[error("{} is malformed: {reason}", path.display())]
    Malformed {
        /// The file that was read and not understood; only its name where its text was given.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// The checkpoint brings no chat template.
    #[error(
        "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): use /v1/completions"
    )]
    NoChatTemplate,
    /// A chat template that does not compile.
    #[error("the chat template is malformed: {0}")]
    Template(String),
    /// The chat template refuses this conversation, in its own words (`raise_exception`).
    #[error("the model's chat template rejects these messages: {0}")]
    Rejected(String),
    /// The chat template broke on this conversation.
    #[error("the model's chat template cannot render these messages: {0}")]
    Render(String),
    /// The text that the chat template makes of this conversation is longer than it may be.
    #[error("the model's chat template makes too long a text of these messages")]
    TooLong,
    /// The tokenizer broke on this text or these ids.
    #[error("the tokenizer cannot process this input: {0}")]
    Tokenize(String),
}
