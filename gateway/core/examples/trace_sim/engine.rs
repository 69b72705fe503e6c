//! A worker in virtual time: an LRU cache of prefix blocks, first come first served prefill, then decoding that
//! slows the prefill of others a little. Written apart from the index, so that neither hides the other's faults.

use std::collections::{BTreeMap, HashMap, VecDeque};

use keyway_wire::block_hash::BlockHash;

use crate::trace::Row;

/// Microseconds between two tokens of one stream.
const INTER_TOKEN_US: u64 = 25_000;
/// What each stream that decodes adds to the time of a prefill, as a share of it.
const DECODE_SLOWDOWN: f64 = 0.005;

/// An exact LRU cache of at most `capacity` blocks. A request's head is more recent than its tail.
#[derive(Debug)]
pub(crate) struct Cache {
    capacity: usize,
    clock: u64,
    used_at: HashMap<BlockHash, u64>,
    by_use: BTreeMap<u64, BlockHash>,
}

impl Cache {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, clock: 0, used_at: HashMap::new(), by_use: BTreeMap::new() }
    }

    /// Uses a chain, and says how many of its leading blocks were there.
    pub(crate) fn use_chain(&mut self, chain: &[BlockHash]) -> usize {
        let held = chain.iter().take_while(|block| self.used_at.contains_key(block)).count();
        for &block in chain.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.used_at.insert(block, self.clock) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(self.clock, block);
        }
        while self.used_at.len() > self.capacity {
            if let Some((_, block)) = self.by_use.pop_first() {
                self.used_at.remove(&block);
            }
        }
        held
    }
}

/// Cached prompt tokens when `row` finds `blocks` of its chain: the last token is always computed.
pub(crate) fn cached_tokens(row: &Row, blocks: usize, block_tokens: u64) -> u64 {
    (blocks as u64 * block_tokens).min(row.prompt_tokens - 1)
}

/// One worker.
#[derive(Debug)]
pub(crate) struct Engine {
    cache: Cache,
    block_tokens: u64,
    /// Prefill tokens a second.
    rate: f64,
    queue: VecDeque<usize>,
    prefilling: Option<usize>,
    decoding: u32,
}

impl Engine {
    pub(crate) fn new(cache_blocks: usize, block_tokens: u64, rate: f64) -> Self {
        let cache = Cache::new(cache_blocks);
        Self { cache, block_tokens, rate, queue: VecDeque::new(), prefilling: None, decoding: 0 }
    }

    pub(crate) fn enqueue(&mut self, request: usize) {
        self.queue.push_back(request);
    }

    /// Starts the next prefill if none runs: (request, its cached tokens, microseconds to its first token).
    pub(crate) fn start_next(&mut self, rows: &[Row]) -> Option<(usize, u64, u64)> {
        if self.prefilling.is_some() {
            return None;
        }
        let request = self.queue.pop_front()?;
        self.prefilling = Some(request);
        let row = &rows[request];
        let cached = cached_tokens(row, self.cache.use_chain(&row.chain), self.block_tokens);
        let seconds = (row.prompt_tokens - cached) as f64 / self.rate;
        let slowdown = 1.0 + DECODE_SLOWDOWN * f64::from(self.decoding);
        Some((request, cached, (seconds * slowdown * 1e6).ceil() as u64))
    }

    /// The prefill that ran gave its first token: microseconds until the last one.
    pub(crate) fn first_token(&mut self, row: &Row) -> u64 {
        self.prefilling = None;
        self.decoding += 1;
        row.output_tokens.saturating_sub(1) * INTER_TOKEN_US
    }

    pub(crate) fn last_token(&mut self) {
        self.decoding -= 1;
    }
}
