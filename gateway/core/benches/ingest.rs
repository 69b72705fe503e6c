//! KV events from the bytes of a message to the index of full size: each message stores a prompt of 64 blocks
//! of 16 tokens and removes one that is 256 messages old, as an engine does whose cache is full. Throughput
//! is in stored blocks a second on one core; as many are removed.
//!
//! And how long a request may have to wait for the index while a worker says as much at once as it can: the
//! longest moment that a feed had it.
//!
//! `cargo bench -p keyway-core --bench ingest`
#![allow(missing_docs, reason = "Criterion's macros")]

mod support;

use std::cell::RefCell;
use std::future::ready;
use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use keyway_core::kv_feed::{Alone, Moments};
use keyway_core::{KvFeed, PrefixIndex, Recovery, WorkerId};
use keyway_wire::block_hash::HashKey;
use keyway_wire::kv_event::{BlockRemoved, BlockStored, EngineHash, EventBatch, Events, KvEvent, WireFormat};

const BLOCKS: u64 = 64;
const BLOCK_TOKENS: u64 = 16;
/// Messages until a prompt's blocks are removed.
const KEPT: u64 = 256;
/// Different messages; more than are kept.
const MESSAGES: u64 = 2048;

/// The message that stores prompt `number` and removes the one that is due.
fn message(number: u64, format: WireFormat) -> Vec<u8> {
    let names = |number: u64| -> Vec<EngineHash> {
        let name = |block: u64| (number * BLOCKS + block + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        // From the last block to the first, as engines evict, costs the same as in this order.
        (0..BLOCKS).map(|block| EngineHash::Int(name(block))).collect()
    };
    let stored = BlockStored {
        block_hashes: names(number),
        token_ids: (0..BLOCKS * BLOCK_TOKENS).map(|i| ((number * 7919 + i * 31) % 128_000) as u32).collect(),
        block_size: BLOCK_TOKENS as u32,
        medium: Some("GPU".into()),
        ..BlockStored::default()
    };
    let due = (number + MESSAGES - KEPT) % MESSAGES;
    let mut gone = names(due);
    gone.reverse();
    let removed = BlockRemoved { block_hashes: gone, medium: Some("GPU".into()), ..BlockRemoved::default() };
    let events = vec![KvEvent::BlockRemoved(removed), KvEvent::BlockStored(stored)];
    EventBatch { ts: 1.0, events, data_parallel_rank: None }.encode(format)
}

/// An index that says how long it was had at a time.
struct Timed<'a> {
    index: &'a Alone,
    moments: RefCell<Vec<Duration>>,
}

impl Moments for Timed<'_> {
    #[allow(clippy::disallowed_methods, reason = "a benchmark measures time that passes")]
    fn moment<T>(&self, f: impl FnOnce(&mut PrefixIndex) -> T) -> T {
        let began = Instant::now();
        let outcome = self.index.moment(f);
        self.moments.borrow_mut().push(began.elapsed());
        outcome
    }

    fn between(&self) -> impl Future<Output = ()> + Send {
        ready(())
    }
}

/// Half a million blocks that are stored, uprooted and cleared by one event each.
fn longest_moments(index: &Alone) {
    const ALL: u64 = 1 << 19;
    let names = |of: Range<u64>| -> Vec<EngineHash> {
        of.map(|i| EngineHash::Int((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))).collect()
    };
    let store = |of: Range<u64>| {
        KvEvent::BlockStored(BlockStored {
            token_ids: of.clone().map(|i| i as u32).collect(),
            block_hashes: names(of),
            block_size: 1,
            ..BlockStored::default()
        })
    };
    let remove = |of: Range<u64>| {
        KvEvent::BlockRemoved(BlockRemoved { block_hashes: names(of), ..BlockRemoved::default() })
    };
    let mut feed = KvFeed::new(WorkerId(8), HashKey::new(3), Recovery::Nothing, ALL as usize);
    let _ = index.run(feed.connected(index));
    let said = [
        ("stored", store(0..ALL)),
        ("uprooted", remove(0..1)),
        ("rooted again", store(0..1)),
        ("removed from the first on", remove(0..ALL)),
        ("stored again", store(0..ALL)),
        ("cleared", KvEvent::AllBlocksCleared),
    ];
    for (seq, (what, event)) in (0..).zip(said) {
        let payload = EventBatch { events: vec![event], ..EventBatch::default() }.encode(WireFormat::VllmMap);
        let timed = Timed { index, moments: RefCell::default() };
        let _ = index.run(feed.live(&timed, seq, Events::open(&payload)));
        let mut moments = timed.moments.into_inner();
        moments.sort_unstable();
        let of = |share: usize| moments[(moments.len() - 1) * share / 1000].as_secs_f64() * 1e6;
        let sum = moments.iter().sum::<Duration>().as_secs_f64() * 1e3;
        println!(
            "{ALL} blocks {what}: had {} times, {sum:.0} ms in all; median {:.0} µs, 99.9 % {:.0} µs, longest {:.0} µs",
            moments.len(),
            of(500),
            of(999),
            of(1000)
        );
    }
}

fn bench(c: &mut Criterion) {
    let index = Alone::new(support::fill().index);
    let mut group = c.benchmark_group("ingest");
    group.throughput(Throughput::Elements(BLOCKS));
    for (name, format) in [("vLLM map", WireFormat::VllmMap), ("SGLang array", WireFormat::SglangArray)] {
        let messages: Vec<Vec<u8>> = (0..MESSAGES).map(|number| message(number, format)).collect();
        let mut feed = KvFeed::new(WorkerId(7), HashKey::new(3), Recovery::Nothing, 1 << 19);
        let _ = index.run(feed.connected(&index));
        let mut seq = 0;
        group.bench_function(name, |b| {
            b.iter(|| {
                let payload = &messages[(seq % MESSAGES) as usize];
                let _ = index.run(feed.live(&index, seq, Events::open(black_box(payload))));
                seq += 1;
            });
        });
        let stats = feed.stats();
        assert_eq!((stats.batches, stats.malformed + stats.orphans + stats.over_capacity), (seq, 0));
        group.bench_function(format!("{name}, decoding alone"), |b| {
            b.iter(|| {
                seq += 1;
                EventBatch::decode(black_box(&messages[(seq % MESSAGES) as usize]))
            });
        });
    }
    group.finish();
    longest_moments(&index);
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = bench
}
criterion_main!(benches);
