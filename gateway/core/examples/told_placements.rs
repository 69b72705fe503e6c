//! What it costs to tell and to hear placements: `cargo run --release -p keyway-core --example
//! told_placements`. Conversations of 12,000 prompt tokens on average in blocks of 16, which grow by
//! 1,500 a turn, on 64 workers; each gateway sends a part of 400 requests a second and hears the rest.
//! Time is one core's.
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "it measures, and prints what")]

use std::time::{Duration, Instant};

use keyway_core::told::{Heard, PlacementLog, Word, words};
use keyway_core::{Owner, PrefixIndex, WorkerId};
use keyway_wire::block_hash::BlockHash;

const WORKERS: u64 = 64;
const CONVERSATIONS: u64 = 2_000;
const TURNS: u64 = 15;
const BLOCKS_A_TURN: u64 = 94;
const REQUESTS_PER_S: u64 = 400;
/// Between two lines.
const LINE: Duration = Duration::from_millis(50);

fn main() {
    println!("gateways  bytes/request  teller µs/request  listener µs/request of others  bytes/s out  cores");
    for gateways in [2, 8, 16] {
        measure(gateways);
    }
}

fn index() -> PrefixIndex {
    let mut index = PrefixIndex::new(256 << 20);
    for worker in 0..WORKERS {
        index.set_capacity(WorkerId(worker as u32), Some(60_000));
    }
    index
}

fn chain(conversation: u64, turn: u64) -> Vec<BlockHash> {
    let name = |block: u64| (conversation << 20 | block).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..(turn + 1) * BLOCKS_A_TURN).map(|block| BlockHash(name(block))).collect()
}

/// One of so many gateways tells; one of the others listens, whose cost is each other's too.
fn measure(gateways: u64) {
    let (mut own, mut other, mut log, mut heard) =
        (index(), index(), PlacementLog::new(10 << 20), Heard::default());
    let (mut telling, mut hearing, mut bytes, mut requests) = (Duration::ZERO, Duration::ZERO, 0, 0_u64);
    let own_rate = REQUESTS_PER_S / gateways;
    let a_line = (own_rate * LINE.as_millis() as u64 / 1_000).max(1);
    let mut readers = vec![0; gateways as usize - 1];
    for turn in 0..TURNS {
        for conversation in (0..CONVERSATIONS).filter(|conversation| conversation % gateways == 0) {
            let chain = chain(conversation, turn);
            let now = Duration::from_nanos(requests * 1_000_000_000 / own_rate);
            let placement = own.place(WorkerId((conversation / gateways % WORKERS) as u32), &chain);
            let began = Instant::now();
            let told = log.placed(now, Owner::NOBODY, &chain, &placement);
            if let Some(told) = told {
                log.closed(now, told, true);
            }
            telling += began.elapsed();
            drop(placement);
            requests += 1;
            if !requests.is_multiple_of(a_line) {
                continue;
            }
            let began = Instant::now();
            let said = readers.iter_mut().map(|next| {
                let said = log.read(*next, now, 256 << 10);
                *next = said.next;
                said
            });
            let said = said.last().unwrap_or_default();
            telling += began.elapsed();
            bytes += said.bytes.len();
            let began = Instant::now();
            for word in words(&said.bytes).flatten() {
                let worker = if let Word::Placed { worker, .. } = &word { Some(*worker) } else { None };
                heard.take(&mut other, &word, worker);
            }
            hearing += began.elapsed();
        }
    }
    let each = |time: Duration| time.as_secs_f64() * 1e6 / requests as f64;
    let bytes_each = bytes as f64 / requests as f64;
    let others = (gateways - 1) as f64;
    let out = bytes_each * 4.0 / 3.0 * own_rate as f64 * others;
    let cores = (each(telling) * own_rate as f64 + each(hearing) * own_rate as f64 * others) / 1e6;
    println!(
        "{gateways:8}  {bytes_each:13.0}  {:17.1}  {:30.1}  {out:11.0}  {cores:.4}",
        each(telling),
        each(hearing)
    );
}
