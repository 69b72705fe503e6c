//! What gateways in front of the same workers tell each other of their placements, so that each knows
//! what the others have put into caches that say nothing themselves. Facts alone: which chain was sent
//! where, and later whether its worker began to answer. What they are told in (`told/word.rs`), what is
//! to be told (`told/log.rs`), what was heard (`told/heard.rs`). How the bytes travel is the caller's
//! business.
//!
//! Most of a chain is mostly known to who listens: only its new blocks are told, and the name of the
//! block that they go on from. Now and then all of it is, so that one who missed something has it again.

mod heard;
mod log;
#[cfg(test)]
mod tests;
mod word;

pub use self::{
    heard::{Heard, Outcome},
    log::{PlacementLog, Told, ToldWords},
    word::{Malformed, Word, words},
};
