//! What a residency costs in memory: growth of this process (Linux), beside what the index says of itself. First of a
//! freshly filled index, then after as many placements again as it has residencies, many times over. Fails above the bar.
//!
//! `cargo run --release -p keyway-core --example index_memory`

use std::process::ExitCode;

use keyway_core::{PrefixIndex, WorkerId};
use keyway_wire::block_hash::{BlockHash, Chain, HashKey};

/// Most bytes that a residency may take.
const BAR: f64 = 48.0;
/// Times that every residency is replaced: at 1,000 prompts a second of 40 new blocks each an hour's worth is 144 million.
const CHURN: usize = 14;
const BLOCKS: usize = 1000;

fn main() -> ExitCode {
    let met = [(10_000_000, 1), (1_250_000, 8)].map(|(blocks, holders)| measure(blocks, holders));
    if met.into_iter().all(|met| met) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Fills an index with so many blocks on so many workers each, churns it, and says whether the bar holds.
fn measure(blocks: usize, holders: usize) -> bool {
    let residencies = blocks * holders;
    let before = resident_bytes();
    let budget = residencies * BAR as usize;
    let mut index = PrefixIndex::new(budget);
    let place = |index: &mut PrefixIndex, number: usize| {
        let chain = chain(number as u64);
        (0..holders).for_each(|worker| drop(index.place(WorkerId(worker as u32), &chain)));
    };
    (0..blocks / BLOCKS).for_each(|number| place(&mut index, number));
    let filled = (resident_bytes() - before) / index.len() as f64;
    (0..CHURN * blocks / BLOCKS).for_each(|number| place(&mut index, blocks + number));
    let grown = resident_bytes() - before;
    println!(
        "{blocks} blocks on {holders}: {filled:.1} bytes a residency; after {CHURN} times as many {:.1}, {:.1} % of the budget",
        grown / index.len() as f64,
        100.0 * grown / budget as f64,
    );
    filled <= BAR && grown <= 1.05 * budget as f64 && index.len() >= residencies * 99 / 100
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
