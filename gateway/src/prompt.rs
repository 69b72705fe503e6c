//! What a request says: its text, its tokens, what routing goes by.

pub mod content;
pub mod drift;
pub mod ignored;
pub mod media;
pub mod request;
pub mod session;
pub mod stored_ids;
pub mod text;
pub mod token_keyer;
pub mod urgency;
pub mod work;
