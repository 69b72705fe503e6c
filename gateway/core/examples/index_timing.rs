//! Times the index on this machine: matching and placing chains in an index of the size asked for. Figures for
//! people to read; nothing is asserted.

use std::hint::black_box;
use std::time::Instant;

use keyway_core::{PrefixIndex, WorkerId};
use keyway_wire::block_hash::{BlockHash, Chain, HashKey};

const WORKERS: u32 = 64;
const BLOCKS: usize = 8192;
const ROUNDS: u32 = 200;

fn main() {
    let residencies: usize = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(1_000_000);
    let mut index = PrefixIndex::new(residencies * 48);
    // Fill it to the brim with chains of their own on every worker.
    let mut seed = 0;
    while index.len() + BLOCKS < index.capacity() {
        index.place(WorkerId(seed as u32 % WORKERS), &chain(seed, BLOCKS));
        seed += 1;
    }
    println!("{} residencies of {} bytes each", index.len(), index.bytes() / index.capacity());

    let spare = index.capacity() / 2 / BLOCKS;
    let shared = chain(u64::MAX, BLOCKS);
    for worker in 0..WORKERS.min(spare as u32) {
        index.place(WorkerId(worker), &shared[..BLOCKS - 100 * worker as usize % BLOCKS]);
    }
    // A different chain each time, so that the processor's cache does not know it.
    let recent: Vec<_> = (seed - spare.min(64) as u64..seed).map(|seed| chain(seed, BLOCKS)).collect();
    let mut found = Vec::new();
    let mut next = recent.iter().cycle();
    time("match, one holder", || index.matched_into(black_box(next.next().unwrap_or(&shared)), &mut found));
    println!("  (length {:?})", found.first().map(|holder| holder.1));
    time("match, many holders of different lengths", || index.matched_into(black_box(&shared), &mut found));
    println!("  ({} holders)", found.len());
    let unknown = chain(u64::MAX - 1, BLOCKS);
    time("match, unknown", || index.matched_into(black_box(&unknown), &mut found));
    time("place, all held", || drop(index.place(WorkerId(1), black_box(&shared))));
    time("place and withdraw, all new", || {
        let placement = index.place(WorkerId(1), black_box(&unknown));
        index.withdraw(placement);
    });
}

fn chain(seed: u64, blocks: usize) -> Vec<BlockHash> {
    let mut chain = Chain::new(HashKey::new(seed), b"");
    (0..blocks).map(|i| chain.push(&i.to_le_bytes())).collect()
}

fn time(what: &str, mut work: impl FnMut()) {
    let start = Instant::now();
    for _ in 0..ROUNDS {
        work();
    }
    println!("{what}: {:.1} us", start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS));
}
