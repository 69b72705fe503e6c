//! Conversations of several turns: how many turns each has, how long a person thinks between them, and what
//! was said so far. The history holds the server's own answers, as a chat client's does. Sends nothing.

use std::{sync::Arc, time::Duration};

use crate::{
    random::{Purpose, Rng},
    workload::{
        dist::{Seconds, Tokens},
        scale::Block,
        synthetic,
    },
};

/// Turns that the numbers of requests leave room for.
pub const TURNS_MAX: usize = 1024;

/// Marks the ids of blocks of a conversation, which later turns of it share.
const CONVERSATION: u64 = 1 << 61;

/// How conversations go: how many turns each has, and how long a person thinks between two.
#[derive(Debug, Clone)]
pub struct Conversations {
    /// Decides the numbers of turns and the times to think.
    pub seed: u64,
    /// How many turns each has.
    pub turns: Turns,
    /// Time between an answer's end and the next turn.
    pub think: Seconds,
}

/// How many turns conversations have, each at least 1.
#[derive(Debug, Clone)]
pub enum Turns {
    /// Drawn for each conversation.
    Drawn(Tokens),
    /// Known from a file, one for each conversation.
    Listed(Arc<[usize]>),
}

/// What was said so far in one conversation.
#[derive(Debug, Default)]
pub struct History {
    /// Its messages as JSON, each with a comma behind it.
    pub json: Vec<u8>,
    /// Its text, for the reference caches.
    pub blocks: Vec<Block>,
}

/// An answer that a conversation goes on from.
#[derive(Debug, Clone)]
pub struct Reply {
    /// Its text, which the next turn's request carries as the assistant's message.
    pub text: String,
    /// Generated tokens by the server's `usage`; 0 without it.
    pub tokens: u64,
}

/// The number of a turn's request.
pub fn row(conversation: usize, turn: usize) -> usize {
    conversation * TURNS_MAX + turn
}

/// The conversation and the turn of a request's number.
pub fn split(row: usize) -> (usize, usize) {
    (row / TURNS_MAX, row % TURNS_MAX)
}

/// The id of block `block` of what the person (or the server, `reply`) said in turn `row`.
pub fn block_id(row: usize, reply: bool, block: u32) -> u64 {
    CONVERSATION | u64::from(reply) << 60 | (row as u64) << 22 | u64::from(block)
}

impl Conversations {
    /// Turns of a conversation: at least 1.
    pub fn turns(&self, conversation: usize) -> usize {
        match &self.turns {
            Turns::Drawn(dist) => {
                let turns = dist.draw(&mut Rng::at(self.seed, Purpose::Turns, conversation as u64));
                (turns as usize).min(TURNS_MAX)
            }
            Turns::Listed(list) => list[conversation],
        }
    }

    /// Time from the end of the answer to request `row` to the next turn.
    pub fn think(&self, row: usize) -> Duration {
        self.think.draw(&mut Rng::at(self.seed, Purpose::ThinkTime, row as u64))
    }
}

impl History {
    /// Adds the server's answer to request `row`.
    pub fn add_reply(&mut self, row: usize, reply: &Reply) {
        // Some APIs refuse a message without text.
        let said = if reply.text.is_empty() { "." } else { &reply.text };
        let text = serde_json::Value::from(said).to_string();
        self.json.extend_from_slice(br#"{"role":"assistant","content":"#);
        self.json.extend_from_slice(text.as_bytes());
        self.json.extend_from_slice(b"},");
        let tokens = u32::try_from(reply.tokens).unwrap_or(u32::MAX);
        synthetic::append(tokens, |i| block_id(row, true, i), &mut self.blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_turns_and_ids() {
        assert_eq!(split(row(7, 3)), (7, 3));
        let ids = [block_id(5, false, 0), block_id(5, true, 0), block_id(5, false, 1), block_id(6, false, 0)];
        assert!((0..4).all(|i| (0..i).all(|j| ids[i] != ids[j])));
        assert!(ids.iter().all(|&id| !crate::workload::is_unshared(id)));
    }

    #[test]
    fn turns_and_thinking_depend_on_seed_and_number() {
        let of = |seed| Conversations {
            seed,
            turns: Turns::Drawn("uniform(1,9)".parse().unwrap()),
            think: "exp(2s)".parse().unwrap(),
        };
        let draws = |seed| (0..50).map(|i| (of(seed).turns(i), of(seed).think(i))).collect::<Vec<_>>();
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
        assert!(draws(1).iter().all(|(turns, _)| (1..=9).contains(turns)));
    }

    #[test]
    fn a_reply_is_quoted_for_json() {
        let mut history = History::default();
        history.add_reply(3, &Reply { text: "a \"b\"\n".into(), tokens: 20 });
        assert_eq!(history.json, br#"{"role":"assistant","content":"a \"b\"\n"},"#);
        assert_eq!(history.blocks.iter().map(|block| block.tokens).collect::<Vec<_>>(), [16, 4]);
    }
}
