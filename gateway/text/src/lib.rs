//! From messages to token ids and back: tokenizers, chat templates, incremental decoding. One implementation
//! for the gateway and the worker, so that they cannot disagree on a prompt's tokens. No I/O besides reading
//! a checkpoint's files, no runtime.
//!
//! ```
//! let text = keyway_text::TextModel::builtin();
//! let messages = serde_json::json!([{"role": "user", "content": "hello"}]);
//! let prompt = text.template.render(&messages, &Default::default())?;
//! let ids = text.tokenizer.encode(&prompt, false)?;
//! assert_eq!(text.tokenizer.decode(&ids)?, "user\nhello\nassistant\n"); // special tokens have no text
//! # Ok::<(), keyway_text::TextError>(())
//! ```

mod byte_tokenizer;
mod chat_template;
mod checkpoint;
mod conversation;
mod decode;
mod developer;
mod error;
mod harmony;
mod incremental;
mod jinja;
mod limits;
pub mod memory;
mod message;
mod segments;
mod strftime;
mod token_bytes;
mod token_floor;
mod tokenizer;

pub use chat_template::{ChatTemplate, RenderOptions};
pub use checkpoint::TextModel;
pub use conversation::{
    BILLING, Conversation, ConversationError, PromptText, chat_call, chat_tools, responses_tools,
};
pub use decode::Decoder;
pub use error::TextError;
pub use harmony::{HarmonyChannel, HarmonyParser, HarmonyPiece, HarmonyTokens};
pub use incremental::{Encoded, Encoding, IncrementalTokenizer};
pub use message::{Field, Message};
pub use tokenizer::Tokenizer;
