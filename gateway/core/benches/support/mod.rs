//! The index that the benchmarks ask: ten million residencies on a thousand workers, in the shape of a fleet
//! that serves long conversations below one system prompt. Measures nothing itself.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each benchmark uses a part of it")]

use keyway_core::kv_feed::Alone;
use keyway_core::pick::{Candidate, RequestView};
use keyway_core::{KvFeed, LoadSnapshot, PaceSnapshot, PrefixIndex, Recovery, TokenSpace, WorkerId};
use keyway_wire::block_hash::{BlockHash, Chain, HashKey};
use keyway_wire::kv_event::{BlockRemoved, BlockStored, EngineHash, EventBatch, Events, KvEvent, WireFormat};

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
    /// A prompt of which each of a thousand workers holds another length.
    pub every: Vec<BlockHash>,
    /// A prompt of which eight workers hold all blocks but one in fifty, each others.
    pub holes: Vec<BlockHash>,
}

pub fn fill() -> Filled {
    fill_of(WORKERS)
}

/// The same with as many residencies on so many workers.
pub fn fill_of(workers: u32) -> Filled {
    let mut index = PrefixIndex::new(RESIDENCIES * 36);
    let every = unknown(u64::MAX, PROMPT_BLOCKS);
    let eight = conversation(u64::MAX);
    for worker in 0..workers {
        index.place(WorkerId(worker), &eight[..SYSTEM_BLOCKS]);
    }
    for worker in 0..WORKERS {
        index.place(WorkerId(worker), &every[..=worker as usize]);
    }
    for worker in 0..8 {
        index.place(WorkerId(worker * 111), &eight[..1000 * (worker as usize + 1)]);
    }
    let (index, holes) = with_holes(index);
    let mut index = index;
    let mut conversations = Vec::new();
    while index.len() < RESIDENCIES {
        let number = conversations.len() as u64;
        let chain = conversation(number);
        index.place(WorkerId(number as u32 % workers), &chain);
        conversations.push(chain);
    }
    Filled { index, conversations, eight, every, holes }
}

/// The index with one more prompt, of which eight workers' events have stored all blocks and removed one in
/// fifty, each others; and that prompt.
fn with_holes(index: PrefixIndex) -> (PrefixIndex, Vec<BlockHash>) {
    const BLOCK: usize = BLOCK_TOKENS as usize;
    let key = HashKey::new(3);
    let token_ids: Vec<u32> = (0..(PROMPT_BLOCKS * BLOCK) as u32).collect();
    let name = |block: usize| EngineHash::Int(block as u64 + 1);
    let index = Alone::new(index);
    for worker in 0..8 {
        let mut feed = KvFeed::new(WorkerId(worker * 111), key, Recovery::Nothing, PROMPT_BLOCKS);
        let _ = index.run(feed.connected(&index));
        let stored = KvEvent::BlockStored(BlockStored {
            block_hashes: (0..PROMPT_BLOCKS).map(name).collect(),
            token_ids: token_ids.clone(),
            block_size: BLOCK as u32,
            ..BlockStored::default()
        });
        // One of each fifty, in an order of no order.
        let hole = |nth: usize| 50 * nth + (nth * 7919 + worker as usize * 31) % 50;
        let removed = KvEvent::BlockRemoved(BlockRemoved {
            block_hashes: (0..PROMPT_BLOCKS / 50).map(hole).map(name).collect(),
            ..BlockRemoved::default()
        });
        let batch = EventBatch { events: vec![stored, removed], ..EventBatch::default() };
        let batch = batch.encode(WireFormat::VllmMap);
        let _ = index.run(feed.live(&index, 0, Events::open(&batch)));
        assert_eq!(feed.stats().removed as usize, PROMPT_BLOCKS / 50);
    }
    let space = TokenSpace { block_size: BLOCK as u32, ..TokenSpace::default() };
    (index.0.into_inner(), space.chain(key, &token_ids))
}

/// A thousand workers in the midst of their work.
pub fn candidates() -> Vec<Candidate> {
    candidates_of(WORKERS)
}

/// So many.
pub fn candidates_of(workers: u32) -> Vec<Candidate> {
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
    (0..workers).map(candidate).collect()
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
