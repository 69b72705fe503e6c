//! What a residency costs in memory: growth of this process (Linux), beside what the index says of itself.
//! First of a freshly filled index, then after as many placements again as it has residencies, many times
//! over; and of an index together with all that is known of the workers whose KV events fill it. Fails above
//! the bars.
//!
//! `cargo run --release -p keyway-core --example index_memory`

use std::process::ExitCode;

use keyway_core::kv_feed::Alone;
use keyway_core::{KvFeed, PrefixIndex, Recovery, WorkerId};
use keyway_wire::block_hash::{BlockHash, Chain, HashKey};
use keyway_wire::kv_event::{BlockRemoved, BlockStored, EngineHash, EventBatch, Events, KvEvent, WireFormat};

/// Most bytes that a residency may take where one worker holds each block, of long prompts.
const BAR: f64 = 23.0;
/// Most bytes that it may take besides where events tell of it: the engine's name for it, and what is before
/// and behind it.
const ANNOUNCED_BAR: f64 = 40.0;
/// Times that every residency is replaced: at 1,000 prompts a second of 40 new blocks each an hour's worth is
/// 144 million.
const CHURN: usize = 14;
const BLOCKS: usize = 1000;
/// Of each turn of a conversation, which ends with so many [`BLOCKS`].
const TURN_BLOCKS: usize = 5;
/// Of such conversations in all.
const TURNS_BLOCKS: usize = 1_000_000;
/// Of an announced prompt, and tokens in each.
const ANNOUNCED_BLOCKS: u64 = 64;
const BLOCK_TOKENS: u64 = 16;

fn main() -> ExitCode {
    let met = [(10_000_000, 1), (1_250_000, 8)]
        .map(|(blocks, holders)| measure(blocks, holders, BLOCKS, CHURN) & announced(blocks, holders));
    let in_turns = measure(TURNS_BLOCKS, 1, TURN_BLOCKS, 1);
    if met.into_iter().all(|met| met) && in_turns { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Fills an index with so many blocks on so many workers each, which come in turns of so many, places as
/// many again so many times, and says whether the bar holds.
fn measure(blocks: usize, holders: usize, turn: usize, churn: usize) -> bool {
    let residencies = blocks * holders;
    let before = resident_bytes();
    let budget = residencies * BAR as usize;
    let mut index = PrefixIndex::new(budget);
    let place = |index: &mut PrefixIndex, number: usize| {
        let chain = chain(number as u64);
        for len in (turn..=BLOCKS).step_by(turn) {
            (0..holders).for_each(|worker| drop(index.place(WorkerId(worker as u32), &chain[..len])));
            index.settle();
        }
    };
    (0..blocks / BLOCKS).for_each(|number| place(&mut index, number));
    let filled = (resident_bytes() - before) / index.len() as f64;
    (0..churn * blocks / BLOCKS).for_each(|number| place(&mut index, blocks + number));
    let grown = resident_bytes() - before;
    println!(
        "{blocks} blocks on {holders}, {turn} a turn: {filled:.1} bytes a residency; after {churn} times as many {:.1}, {:.1} % of the budget",
        grown / index.len() as f64,
        100.0 * grown / budget as f64,
    );
    filled <= BAR && grown <= 1.05 * budget as f64 && index.len() >= residencies * 99 / 100
}

/// The same of workers whose events tell of so many blocks on each: caches that are full, then replaced once.
fn announced(blocks: usize, workers: usize) -> bool {
    let before = resident_bytes();
    let residencies = blocks * workers;
    let index = Alone::new(PrefixIndex::new(residencies * BAR as usize));
    let mut feeds: Vec<KvFeed> = (0..workers)
        .map(|worker| KvFeed::new(WorkerId(worker as u32), HashKey::new(3), Recovery::Nothing, blocks))
        .collect();
    for feed in &mut feeds {
        let _ = index.run(feed.connected(&index));
    }
    let kept = blocks as u64 / ANNOUNCED_BLOCKS;
    for number in 0..2 * kept {
        let batch = told(number, number.checked_sub(kept));
        for feed in &mut feeds {
            let _ = index.run(feed.live(&index, number, Events::open(&batch)));
        }
    }
    let index = index.0.into_inner();
    let grown = (resident_bytes() - before) / index.len() as f64;
    println!("{blocks} announced blocks on {workers}: {grown:.1} bytes each, with the index's");
    let known = feeds.iter().all(|feed| feed.stats().over_capacity == 0);
    grown <= BAR + ANNOUNCED_BAR
        && known
        && index.len() as u64 >= kept * ANNOUNCED_BLOCKS * workers as u64 * 99 / 100
}

/// A prompt is stored, and another one, from its end on, removed.
fn told(stored: u64, removed: Option<u64>) -> Vec<u8> {
    let names = |number: u64| {
        (0..ANNOUNCED_BLOCKS)
            .map(move |block| (number * ANNOUNCED_BLOCKS + block + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
            .map(EngineHash::Int)
    };
    let removed = removed.map(|number| {
        let block_hashes = names(number).rev().collect();
        KvEvent::BlockRemoved(BlockRemoved { block_hashes, ..BlockRemoved::default() })
    });
    let stored = KvEvent::BlockStored(BlockStored {
        block_hashes: names(stored).collect(),
        token_ids: (0..ANNOUNCED_BLOCKS * BLOCK_TOKENS).map(|i| (stored * 7919 + i) as u32).collect(),
        block_size: BLOCK_TOKENS as u32,
        ..BlockStored::default()
    });
    let events = removed.into_iter().chain([stored]).collect();
    EventBatch { ts: 1.0, events, data_parallel_rank: None }.encode(WireFormat::VllmMap)
}

/// A prompt of its own.
fn chain(number: u64) -> Vec<BlockHash> {
    let mut chain = Chain::new(HashKey::new(number), b"");
    (0..BLOCKS).map(|i| chain.push(&i.to_le_bytes())).collect()
}

/// Bytes of this process that are in memory.
fn resident_bytes() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: f64 =
        line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok()).unwrap_or(f64::NAN);
    kib * 1024.0
}
