//! What moves bytes between the ranks of a group: one message of 32-bit words from each rank to each other
//! one, in exchanges that all ranks take part in, each with a deadline. It knows neither tokens nor experts;
//! what a message says is [`crate::moe::parallel`]'s business.
//!
//! A rank writes its messages where they will be sent from ([`Fabric::outbox`]), exchanges, and reads what
//! came where it lies ([`Fabric::inbox`]): over shared memory nothing is copied in between. After an error a
//! fabric stays failed: the group is made anew. A rank that finds another at fault tells the others, lest
//! they take its own leaving for the fault.

mod grouped;
mod local;
#[cfg(target_os = "linux")]
mod shm;
mod tcp;

use std::fmt;
use std::time::Duration;

pub use grouped::{GroupedRank, Mover};
pub use local::Local;
#[cfg(target_os = "linux")]
pub use shm::{Alarm, Shm};
pub use tcp::Tcp;

/// Ranks of a group: who holds an expert is a mask of this many bits.
pub const RANKS_MAX: usize = 32;

/// One rank's end of a group.
pub trait Fabric: Send + fmt::Debug {
    /// This rank's number, below [`Fabric::size`].
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn size(&self) -> usize;

    /// Words of the longest message.
    fn capacity(&self) -> usize;

    /// The message of `words` words to rank `to` in the next exchange, to be filled in; what it held before
    /// means nothing. Who is sent nothing gets an empty message. There is none to oneself.
    fn outbox(&mut self, to: usize, words: usize) -> Result<&mut [u32], FabricError>;

    /// Sends every message and waits for those of all other ranks, `deadline` at most.
    fn exchange(&mut self, phase: Phase, deadline: Duration) -> Result<(), FabricError>;

    /// What rank `from` sent in the last exchange. Nothing came from oneself.
    fn inbox(&self, from: usize) -> &[u32];

    /// Ends the group because of what `rank` sent: this error is that of every later exchange.
    fn fail(&mut self, rank: usize, phase: Phase, cause: Cause) -> FabricError;
}

/// What an exchange is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Tokens go to the experts' ranks, or word of what is to be done.
    Dispatch,
    /// The experts' outputs go back.
    Combine,
    /// Ranks say that they hold their experts.
    Placement,
    /// Ranks tell what their part of a step came to.
    Result,
}

/// An exchange that failed: which rank, where, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FabricError {
    /// The rank at fault.
    pub rank: usize,
    /// The exchange's number in this group, from 1 on.
    pub exchange: u64,
    /// What it was for.
    pub phase: Phase,
    /// The model's layer, where that is known.
    pub layer: Option<u32>,
    /// What is wrong with that rank, as far as this one knows.
    pub cause: Cause,
}

/// What is wrong with a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// It sent nothing, or took nothing, for this long.
    Deadline(Duration),
    /// It has left, or its connection is cut.
    Gone,
    /// It sent what makes no sense.
    Protocol(&'static str),
    /// It sent what makes no sense to another rank.
    Reported,
    /// What others sent does not reach it; why, where that is known.
    Unreached(String),
    /// A message to it is longer than the fabric takes, in words.
    TooLong {
        /// How many words the refused message has.
        words: usize,
        /// How many words the fabric takes in one message at most.
        capacity: usize,
    },
}

// === impl FabricError ===

impl FabricError {
    /// Rank and cause in a word that is not 0, for other ranks.
    fn blame(&self) -> u32 {
        let cause = match self.cause {
            Cause::Deadline(_) => 1,
            Cause::Gone => 2,
            Cause::Protocol(_) | Cause::Reported | Cause::Unreached(_) | Cause::TooLong { .. } => 3,
        };
        cause << 8 | self.rank as u32
    }

    /// The same, in this layer.
    #[must_use]
    pub fn in_layer(mut self, layer: u32) -> Self {
        self.layer.get_or_insert(layer);
        self
    }
}

impl fmt::Display for FabricError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, exchange, phase, layer, cause } = self;
        write!(f, "expert-parallel rank {rank} failed in exchange {exchange} ({}", phase.name())?;
        if let Some(layer) = layer {
            write!(f, " of layer {layer}")?;
        }
        match cause {
            Cause::Deadline(deadline) => write!(f, "): no answer within {deadline:?}"),
            Cause::Gone => write!(f, "): it is gone"),
            Cause::Protocol(what) => write!(f, "): it sent {what}"),
            Cause::Reported => write!(f, "): another rank cannot read what it sent"),
            Cause::Unreached(why) if why.is_empty() => write!(f, "): nothing reaches it"),
            Cause::Unreached(why) => write!(f, "): nothing reaches it: {why}"),
            Cause::TooLong { words, capacity } => {
                write!(f, "): a message to it has {words} words, the fabric takes {capacity}")
            }
        }
    }
}

impl std::error::Error for FabricError {}

impl Phase {
    const fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::Placement => "placement",
            Self::Result => "result",
        }
    }
}

/// Rank and cause of [`FabricError::blame`]'s word; the deadline is one's own.
fn blamed(word: u32, deadline: Duration) -> (usize, Cause) {
    let cause = match word >> 8 {
        1 => Cause::Deadline(deadline),
        2 => Cause::Gone,
        _ => Cause::Reported,
    };
    ((word & 0xff) as usize, cause)
}

// === words ===

/// Words as the floats they are the bits of.
#[allow(unsafe_code)]
pub fn floats(words: &[u32]) -> &[f32] {
    // SAFETY: same size and alignment, and every pattern of bits is a float.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}

/// Words to be written as floats.
#[allow(unsafe_code)]
pub fn floats_mut(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: as above, both ways, and the reference is exclusive.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

#[cfg(test)]
pub(crate) mod tests;
