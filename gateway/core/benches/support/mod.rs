//! The index that the benchmarks ask: ten million residencies on a thousand workers, in the shape of a fleet
//! that serves long conversations below one system prompt. Measures nothing itself.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each benchmark uses a part of it")]

use keyway_core::pick::{Candidate, RequestView};
use keyway_core::{LoadSnapshot, PaceSnapshot, PrefixIndex, WorkerId};
use keyway_wire::block_hash::{BlockHash, Chain, HashKey};

pub const WORKERS: u32 = 1000;
/// 128k tokens in blocks of 16.
pub const PROMPT_BLOCKS: usize = 8192;
/// Tokens of a block.
pub const BLOCK_TOKENS: f64 = 16.0;
/// Blocks that all prompts begin with.
pub const SYSTEM_BLOCKS: usize = 64;
const RESIDENCIES: usize = 10_000_000;

/// A prompt of its own behind the system prompt.
pub fn conversation(number: u64) -> Vec<BlockHash> {
    let mut chain = Chain::new(HashKey::new(1), b"");
    let system = (0..SYSTEM_BLOCKS).map(|i| chain.push(&i.to_le_bytes())).collect::<Vec<_>>();
    let mut chain = Chain::after(*system.last().unwrap_or(&BlockHash(0)));
    let own =
        (SYSTEM_BLOCKS..PROMPT_BLOCKS).map(|i| chain.push(&[number.to_le_bytes(), i.to_le_bytes()].concat()));
    system.into_iter().chain(own).collect()
}

/// A prompt that nobody has, not even its first block.
pub fn unknown(number: u64, blocks: usize) -> Vec<BlockHash> {
    let mut chain = Chain::new(HashKey::new(2), &number.to_le_bytes());
    (0..blocks).map(|i| chain.push(&i.to_le_bytes())).collect()
}

/// The index, and what it was filled with.
pub struct Filled {
    pub index: PrefixIndex,
    /// Prompts that one worker holds whole, and all workers the system prompt of.
    pub conversations: Vec<Vec<BlockHash>>,
    /// A prompt of which eight workers hold more than the system prompt, each another share.
    pub eight: Vec<BlockHash>,
    /// A prompt of which every worker holds another length.
    pub every: Vec<BlockHash>,
}

pub fn fill() -> Filled {
    let mut index = PrefixIndex::new(RESIDENCIES * 36);
    let every = unknown(u64::MAX, PROMPT_BLOCKS);
    let eight = conversation(u64::MAX);
    for worker in 0..WORKERS {
        index.place(WorkerId(worker), &every[..=worker as usize]);
    }
    for worker in 0..8 {
        index.place(WorkerId(worker * 111), &eight[..1000 * (worker as usize + 1)]);
    }
    let mut conversations = Vec::new();
    while index.len() < RESIDENCIES {
        let number = conversations.len() as u64;
        let chain = conversation(number);
        index.place(WorkerId(number as u32 % WORKERS), &chain);
        conversations.push(chain);
    }
    Filled { index, conversations, eight, every }
}

/// A thousand workers in the midst of their work.
pub fn candidates() -> Vec<Candidate> {
    let candidate = |worker: u32| {
        let load = LoadSnapshot {
            requests: u64::from(worker % 7),
            waiting_prefill_tokens: 4_000,
            pace: PaceSnapshot {
                backlog_ms: f64::from(worker * 7919 % 1000),
                arrivals_per_ms: 0.01,
                busy_share: f64::from(worker % 10) / 10.0,
            },
            ..LoadSnapshot::default()
        };
        Candidate::new(WorkerId(worker), load, 6.0, 1.0)
    };
    (0..WORKERS).map(candidate).collect()
}

/// The request behind a chain.
pub fn view(chain: &[BlockHash]) -> RequestView<'_> {
    RequestView {
        chain,
        prompt_tokens: 16 * chain.len() as u64 + 9,
        block_tokens: BLOCK_TOKENS,
        media: &[],
        session: None,
    }
}
