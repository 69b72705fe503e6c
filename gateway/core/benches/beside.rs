//! The index beside `smg-radix-tree`, one workload for both: what a residency takes, how long a match takes,
//! and how many blocks are stored and removed a second.
//!
//! Each side runs in a process of its own, one after the other and several times in turn, so that neither
//! lies in what the other has freed. Blocks a second are of CPU time, so that what else the machine does says
//! little; a match is timed as a request sees it. The median of the rounds is printed.
//!
//! `cargo bench -p keyway-core --bench beside`; `-- --residencies 100000000 --rounds 1` for other sizes.
#![allow(missing_docs, reason = "a benchmark of its own")]
#![allow(
    clippy::print_stdout,
    clippy::panic,
    clippy::expect_used,
    reason = "a program that prints what it measures"
)]

use std::hint::black_box;
use std::process::Command;
use std::time::Instant;

use keyway_core::kv_feed::Alone;
use keyway_core::{KvFeed, PrefixIndex, Recovery, TokenSpace, WorkerId};
use keyway_wire::block_hash::{BlockHash, HashKey};
use keyway_wire::kv_event::{BlockRemoved, BlockStored, EngineHash, EventBatch, Events, KvEvent, WireFormat};
use radix_tree::{Config, HolderId, OverlapScratch, RadixTree};

/// Blocks that one event stores at most.
const BATCH: usize = 8;
/// How many workers hold a prefix, and such prefixes' share of all residencies.
const SHARING: [(usize, f64); 3] = [(1, 0.50), (8, 0.35), (64, 0.15)];
const MIXED_WORKERS: usize = 256;
/// Blocks of a prefix that workers share, spread evenly over the logarithm, and those behind it that each has
/// for itself.
const SHARED_BLOCKS: (f64, f64) = (8.0, 512.0);
const OWN_BLOCKS: (u64, u64) = (4, 64);
/// The other workload: prompts of 128k tokens in blocks of 16 that one worker holds, behind what all hold.
const LONG_WORKERS: usize = 1000;
const LONG_BLOCKS: usize = 8192;
const SYSTEM_BLOCKS: usize = 64;
/// Searches that are timed.
const SEARCHES: usize = 20_000;
/// Blocks of one message of events, tokens of each, and messages that are known at a time.
const EVENT_BLOCKS: u64 = 64;
const BLOCK_TOKENS: u64 = 16;
const KEPT: u64 = 16_384;
/// Messages that are made at a time: few, as their memory counts.
const MADE_TOGETHER: usize = 64;

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
struct Random(u64);

impl Random {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.word() % end as u64) as usize
    }

    /// Names of so many new blocks, each of one: the upper bits of a name say how many it spans.
    fn blocks(&mut self, count: usize) -> Vec<u64> {
        (0..count).map(|_| self.word() >> 4 | 1).collect()
    }
}

/// A prompt's blocks, and who holds which of its beginning.
struct Prompt {
    shared: Vec<u64>,
    holders: Vec<(usize, Vec<u64>)>,
}

/// Prompts of both kinds until so many residencies are reached.
fn mixed(residencies: usize) -> Vec<Prompt> {
    let mut random = Random(1);
    let mut prompts = Vec::new();
    for (holders, share) in SHARING {
        let mut left = (residencies as f64 * share) as isize;
        while left > 0 {
            let (least, most) = (SHARED_BLOCKS.0.ln(), SHARED_BLOCKS.1.ln());
            let part = random.word() as f64 / u64::MAX as f64;
            let shared = random.blocks((least + part * (most - least)).exp() as usize);
            let first = random.below(MIXED_WORKERS);
            let holders = (0..holders).map(|i| {
                let own = OWN_BLOCKS.0 + random.word() % (OWN_BLOCKS.1 - OWN_BLOCKS.0 + 1);
                ((first + 7 * i) % MIXED_WORKERS, random.blocks(own as usize))
            });
            let holders: Vec<_> = holders.collect();
            left -= holders.iter().map(|(_, own)| (shared.len() + own.len()) as isize).sum::<isize>();
            prompts.push(Prompt { shared, holders });
        }
    }
    for at in (1..prompts.len()).rev() {
        prompts.swap(at, random.below(at + 1));
    }
    prompts
}

fn long(residencies: usize) -> Vec<Prompt> {
    let mut random = Random(2);
    let shared = random.blocks(SYSTEM_BLOCKS);
    let of_all =
        Prompt { shared: shared.clone(), holders: (0..LONG_WORKERS).map(|at| (at, Vec::new())).collect() };
    let count = residencies / (LONG_BLOCKS - SYSTEM_BLOCKS);
    let own = (0..count).map(|i| Prompt {
        shared: shared.clone(),
        holders: vec![(i % LONG_WORKERS, random.blocks(LONG_BLOCKS - SYSTEM_BLOCKS))],
    });
    std::iter::once(of_all).chain(own).collect()
}

/// An index of either side.
trait Side {
    fn store(&mut self, worker: usize, parent: Option<u64>, blocks: &[u64]);
    fn remove(&mut self, worker: usize, blocks: &[u64]);
    /// The longest match, of all workers' matches.
    fn longest(&mut self, chain: &[u64]) -> u32;
    fn residencies(&self) -> usize;
}

struct Ours {
    index: PrefixIndex,
    chain: Vec<BlockHash>,
}

impl Side for Ours {
    fn store(&mut self, worker: usize, parent: Option<u64>, blocks: &[u64]) {
        self.chain.clear();
        self.chain.extend(blocks.iter().copied().map(BlockHash));
        let stored = self.index.store_run(WorkerId(worker as u32), parent.map(BlockHash), &self.chain);
        assert_eq!(stored, blocks.len());
    }

    fn remove(&mut self, worker: usize, blocks: &[u64]) {
        self.chain.clear();
        self.chain.extend(blocks.iter().copied().map(BlockHash));
        self.index.drop_blocks(WorkerId(worker as u32), &self.chain);
    }

    fn longest(&mut self, chain: &[u64]) -> u32 {
        self.chain.clear();
        self.chain.extend(chain.iter().copied().map(BlockHash));
        let began = now();
        let found = self.index.matched(black_box(&self.chain));
        LAST.set(nanoseconds_since(began));
        found.iter().map(|(_, blocks)| *blocks).max().unwrap_or(0)
    }

    fn residencies(&self) -> usize {
        self.index.len()
    }
}

struct Peer {
    tree: RadixTree,
    workers: Vec<HolderId>,
    blocks: Vec<(u64, u64)>,
    scratch: OverlapScratch,
    found: Vec<radix_tree::Overlap>,
}

impl Peer {
    fn new(workers: usize) -> Self {
        let mut tree = RadixTree::new(Config::default());
        let workers = (0..workers).map(|worker| tree.create_holder(&format!("worker {worker}"))).collect();
        Self { tree, workers, blocks: Vec::new(), scratch: OverlapScratch::default(), found: Vec::new() }
    }
}

impl Side for Peer {
    /// The engine's name of a block is another than the gateway's.
    fn store(&mut self, worker: usize, parent: Option<u64>, blocks: &[u64]) {
        self.blocks.clear();
        self.blocks.extend(blocks.iter().map(|block| (engine_name(*block), *block)));
        self.tree.store(self.workers[worker], parent.map(engine_name), &self.blocks).expect("a known parent");
    }

    fn remove(&mut self, worker: usize, blocks: &[u64]) {
        let names: Vec<u64> = blocks.iter().copied().map(engine_name).collect();
        self.tree.remove(self.workers[worker], &names);
    }

    fn longest(&mut self, chain: &[u64]) -> u32 {
        let began = now();
        self.tree.overlap(black_box(chain), &mut self.scratch, &mut self.found);
        LAST.set(nanoseconds_since(began));
        self.found.iter().map(|found| found.depth).max().unwrap_or(0)
    }

    fn residencies(&self) -> usize {
        self.tree.stats().holder_blocks as usize
    }
}

thread_local! {
    /// What the last search took.
    static LAST: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

fn engine_name(block: u64) -> u64 {
    block.rotate_left(32) ^ 0x5555_5555
}

#[allow(clippy::disallowed_methods, reason = "a benchmark measures time that passes")]
fn now() -> Instant {
    Instant::now()
}

#[allow(clippy::disallowed_methods, reason = "a benchmark measures time that passes")]
fn nanoseconds_since(began: Instant) -> u64 {
    began.elapsed().as_nanos() as u64
}

/// CPU time of this process's one thread, in seconds (Linux).
fn cpu_s() -> f64 {
    let text = std::fs::read_to_string("/proc/self/schedstat").expect("Linux");
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds") / 1e9
}

/// Bytes of this process that are in memory (Linux).
fn resident_bytes() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
    line.trim().trim_end_matches("kB").trim().parse::<f64>().expect("kilobytes") * 1024.0
}

/// Stores all prompts, as many at a time as engines do at once, some blocks each in turn.
fn fill(side: &mut dyn Side, prompts: &[Prompt]) -> usize {
    let mut stored = 0;
    for window in prompts.chunks(64) {
        // Who stores what, and how far that is.
        let mut under_way: Vec<(&Prompt, usize, usize)> = window
            .iter()
            .flat_map(|prompt| (0..prompt.holders.len()).map(move |at| (prompt, at, 0)))
            .collect();
        let mut random = Random(window.len() as u64);
        while !under_way.is_empty() {
            let at = random.below(under_way.len());
            let (prompt, holder, done) = &mut under_way[at];
            let (worker, own) = &prompt.holders[*holder];
            let shared = prompt.shared.len();
            let parent = done
                .checked_sub(1)
                .map(|last| *prompt.shared.get(last).unwrap_or_else(|| &own[last - shared]));
            let next = if *done < shared { &prompt.shared[*done..] } else { &own[*done - shared..] };
            let next = &next[..next.len().min(BATCH)];
            if next.is_empty() {
                under_way.swap_remove(at);
                continue;
            }
            side.store(*worker, parent, next);
            stored += next.len();
            *done += next.len();
        }
    }
    stored
}

fn say(name: &str, value: f64) {
    println!("{name}\t{value}");
}

/// Fills, searches, removes what lies behind the shared prefixes, and stores it again.
fn run(make: &dyn Fn() -> Box<dyn Side>, prompts: &[Prompt], name: &str) {
    let before = resident_bytes();
    let mut side = make();
    let began = cpu_s();
    let stored = fill(&mut *side, prompts);
    say(&format!("{name}: blocks stored a second, millions"), stored as f64 / (cpu_s() - began) / 1e6);
    say(&format!("{name}: bytes a residency"), (resident_bytes() - before) / side.residencies() as f64);
    let mut random = Random(3);
    let mut took = Vec::with_capacity(SEARCHES);
    let mut chain = Vec::with_capacity(LONG_BLOCKS);
    for _ in 0..SEARCHES {
        let prompt = &prompts[random.below(prompts.len())];
        let (_, own) = &prompt.holders[random.below(prompt.holders.len())];
        chain.clear();
        chain.extend(prompt.shared.iter().chain(own).copied());
        assert_eq!(side.longest(&chain) as usize, chain.len());
        took.push(LAST.get() as f64 / 1e3);
    }
    took.sort_unstable_by(f64::total_cmp);
    say(&format!("{name}: match, median, µs"), took[SEARCHES / 2]);
    say(&format!("{name}: match, p99, µs"), took[SEARCHES * 99 / 100]);
    let began = cpu_s();
    let mut removed = 0;
    let mut backwards = Vec::new();
    for prompt in prompts {
        for (worker, own) in &prompt.holders {
            backwards.clear();
            backwards.extend(own.iter().rev());
            side.remove(*worker, &backwards);
            removed += own.len();
        }
    }
    say(&format!("{name}: blocks removed a second, millions"), removed as f64 / (cpu_s() - began) / 1e6);
    let began = cpu_s();
    for prompt in prompts {
        for (worker, own) in &prompt.holders {
            let mut parent = prompt.shared.last().copied();
            for blocks in own.chunks(BATCH) {
                side.store(*worker, parent, blocks);
                parent = blocks.last().copied();
            }
        }
    }
    say(&format!("{name}: blocks stored again a second, millions"), removed as f64 / (cpu_s() - began) / 1e6);
}

/// The message that stores prompt `number` and removes the one that is due.
fn message(number: u64) -> Vec<u8> {
    let names = |number: u64| -> Vec<EngineHash> {
        let name = |block: u64| (number * EVENT_BLOCKS + block + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (0..EVENT_BLOCKS).map(|block| EngineHash::Int(name(block))).collect()
    };
    let token = |i: u64| ((number * 7919 + i * 31) % 128_000) as u32;
    let stored = KvEvent::BlockStored(BlockStored {
        block_hashes: names(number),
        token_ids: (0..EVENT_BLOCKS * BLOCK_TOKENS).map(token).collect(),
        block_size: BLOCK_TOKENS as u32,
        ..BlockStored::default()
    });
    let removed = number.checked_sub(KEPT).map(|number| {
        let block_hashes = names(number).into_iter().rev().collect();
        KvEvent::BlockRemoved(BlockRemoved { block_hashes, ..BlockRemoved::default() })
    });
    let events = removed.into_iter().chain([stored]).collect();
    EventBatch { ts: 1.0, events, data_parallel_rank: None }.encode(WireFormat::VllmMap)
}

/// Tells of as many blocks as a large worker's cache has, then replaces them twice.
fn told(take: &mut dyn FnMut(u64, &[u8])) {
    let before = resident_bytes();
    let (mut spent, mut messages) = (0.0, Vec::new());
    for first in (0..3 * KEPT).step_by(MADE_TOGETHER) {
        messages.clear();
        messages.extend((first..).take(MADE_TOGETHER).map(message));
        let began = cpu_s();
        for (number, message) in (first..).zip(&messages) {
            take(number, message);
        }
        spent += if first < KEPT { 0.0 } else { cpu_s() - began };
        if first + MADE_TOGETHER as u64 == KEPT {
            let blocks = (KEPT * EVENT_BLOCKS) as f64;
            say("KV events, one worker: bytes a block", (resident_bytes() - before) / blocks);
        }
    }
    let name = "KV events, one worker: blocks stored a second while as many are removed, millions";
    say(name, (2 * KEPT * EVENT_BLOCKS) as f64 / spent / 1e6);
}

fn told_ours() {
    let index = Alone::new(sized_for((KEPT * EVENT_BLOCKS) as usize));
    let mut feed = KvFeed::new(WorkerId(7), HashKey::new(3), Recovery::Nothing, 1 << 22);
    let _ = index.run(feed.connected(&index));
    told(&mut |number, message| {
        let _ = index.run(feed.live(&index, number, Events::open(message)));
    });
    let stats = feed.stats();
    assert_eq!((stats.batches, stats.malformed + stats.orphans + stats.over_capacity), (3 * KEPT, 0));
}

/// The same events, read and named by the same code, for the peer to keep.
fn told_peer() {
    let mut peer = Peer::new(8);
    let key = HashKey::new(3);
    let space = TokenSpace { salt: b"", adapter: None, block_size: BLOCK_TOKENS as u32 };
    told(&mut |_, message| {
        for event in Events::open(message).expect("a message") {
            match event {
                Ok(Some(KvEvent::BlockStored(event))) => {
                    let chain = space.chain(key, &event.token_ids);
                    peer.blocks.clear();
                    let names = event.block_hashes.iter().map(EngineHash::short);
                    peer.blocks.extend(names.zip(chain.iter().map(|block| block.0)));
                    peer.tree.store(peer.workers[7], None, &peer.blocks).expect("no parent");
                }
                Ok(Some(KvEvent::BlockRemoved(event))) => {
                    let names: Vec<u64> = event.block_hashes.iter().map(EngineHash::short).collect();
                    peer.tree.remove(peer.workers[7], &names);
                }
                _ => {}
            }
        }
    });
}

/// An index with room for so many residencies and hardly more.
fn sized_for(residencies: usize) -> PrefixIndex {
    let mut bytes = residencies * 8;
    loop {
        let index = PrefixIndex::new(bytes);
        if index.capacity() >= residencies {
            return index;
        }
        bytes += bytes / 50;
    }
}

/// One side of one workload.
fn measure(side: &str, workload: &str, residencies: usize) {
    let is_ours = side == "ours";
    if workload == "events" {
        return if is_ours { told_ours() } else { told_peer() };
    }
    let (prompts, workers) = match workload {
        "mixed" => (mixed(residencies), MIXED_WORKERS),
        _ => (long(residencies), LONG_WORKERS),
    };
    let all = prompts.iter().map(|prompt| {
        let own = prompt.holders.iter().map(|(_, own)| own.len()).sum::<usize>();
        prompt.shared.len() * prompt.holders.len() + own
    });
    let all: usize = all.sum();
    let make = || -> Box<dyn Side> {
        if is_ours {
            Box::new(Ours { index: sized_for(all), chain: Vec::new() })
        } else {
            Box::new(Peer::new(workers))
        }
    };
    run(&make, &prompts, workload);
}

/// The number behind an option.
fn option(name: &str, default: usize) -> usize {
    let mut rest = std::env::args().skip_while(|argument| argument != name);
    rest.nth(1).map_or(default, |value| value.parse().expect("a number"))
}

fn main() {
    let residencies = option("--residencies", 10_000_000);
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--side") {
        return measure(&arguments[at + 1], &arguments[at + 2], residencies);
    }
    let own = std::env::current_exe().expect("this program");
    for workload in ["mixed", "long", "events"] {
        let mut rows: Vec<(String, [Vec<f64>; 2])> = Vec::new();
        for _ in 0..option("--rounds", 3) {
            for (at, side) in ["ours", "theirs"].into_iter().enumerate() {
                let size = residencies.to_string();
                let run =
                    Command::new(&own).args(["--side", side, workload, "--residencies", &size]).output();
                let run = run.expect("another process");
                assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
                for line in String::from_utf8_lossy(&run.stdout).lines() {
                    let (name, value) = line.split_once('\t').expect("a name and a value");
                    let known = rows.iter().position(|(known, _)| known == name).unwrap_or(rows.len());
                    if known == rows.len() {
                        rows.push((name.to_owned(), Default::default()));
                    }
                    rows[known].1[at].push(value.parse().expect("a number"));
                }
            }
        }
        for (name, both) in rows {
            let [ours, theirs] = both.map(|mut values| {
                values.sort_unstable_by(f64::total_cmp);
                values[values.len() / 2]
            });
            println!("{name}: Keyway {ours:.2}, smg-radix-tree {theirs:.2}");
        }
    }
}
