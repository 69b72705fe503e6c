//! The messages that were published last, once for all subscribers: each subscriber has a place in them, and
//! what it was too slow for is gone for it alone. No sockets.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::{
    limits::{LOOK_MAX, TOGETHER_BYTES, TOGETHER_PIECES},
    link::Unsent,
    topics::Topics,
};

/// A message as it is sent.
#[derive(Debug)]
pub(crate) struct Message {
    /// The message's first frame, whose beginning subscriptions are compared with; empty without frames.
    pub(crate) topic: Bytes,
    /// The whole message as it is on the wire.
    pub(crate) pieces: Vec<Bytes>,
}

impl Message {
    fn bytes(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum()
    }
}

/// The last messages, numbered in order from 0.
#[derive(Debug)]
pub(crate) struct Ring {
    kept: VecDeque<Message>,
    bytes: usize,
    /// The next message's number.
    end: u64,
    messages_max: usize,
    bytes_max: usize,
}

impl Ring {
    pub(crate) fn new(messages_max: usize, bytes_max: usize) -> Self {
        Self { kept: VecDeque::new(), bytes: 0, end: 0, messages_max, bytes_max }
    }

    /// The number of the message that comes next.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Takes a message; the oldest go for it. The last one is kept, however large: a subscriber may have time
    /// for it.
    pub(crate) fn push(&mut self, message: Message) {
        self.bytes += message.bytes();
        self.kept.push_back(message);
        self.end += 1;
        while self.kept.len() > 1 && (self.kept.len() > self.messages_max || self.bytes > self.bytes_max) {
            self.bytes -= self.kept.pop_front().map_or(0, |message| message.bytes());
        }
    }

    /// Moves on from the message numbered `next`, and takes of those that are wanted as many as are sent
    /// together; how many of those passed are gone. Looks at no more than [`LOOK_MAX`]: a subscriber that is
    /// not at the end then comes again.
    pub(crate) fn read(&self, next: &mut u64, topics: &Topics, unsent: &mut Unsent) -> u64 {
        let first = self.end - self.kept.len() as u64;
        let gone = first.saturating_sub(*next);
        *next = first.max(*next);
        let known = usize::try_from(*next - first).unwrap_or(usize::MAX);
        for message in self.kept.iter().skip(known).take(LOOK_MAX) {
            if topics.want(*next, &message.topic) {
                let full = unsent.bytes() + message.bytes() > TOGETHER_BYTES
                    || unsent.pieces() + message.pieces.len() > TOGETHER_PIECES;
                if full && !unsent.is_empty() {
                    return gone;
                }
                unsent.extend(message.pieces.iter().cloned());
            }
            *next += 1;
        }
        gone
    }
}

#[cfg(test)]
mod tests;
