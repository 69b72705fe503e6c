//! The index at its full size: 10 million residencies on 1,000 workers, prompts of 128k tokens (8,192
//! blocks). `match` is the search alone, `route` the same search and the choice among the 1,000, so that the
//! difference is the choice.
//!
//! `cargo bench -p keyway-core --bench index`
#![allow(missing_docs, reason = "Criterion's macros")]

mod support;

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use keyway_core::pick::{Candidate, Policy, Turn};
use keyway_core::waiting_room::Ahead;
use keyway_core::{LoadSnapshot, PromptViews, WorkerId, consider};
use keyway_wire::block_hash::BlockHash;

use self::support::{Filled, PROMPT_BLOCKS, candidates, fill, unknown, view};

fn bench(c: &mut Criterion) {
    let mut filled = fill();
    matches(c, &filled);
    routes(c, &filled);
    places(c, &mut filled);
    drop(filled);
    four_thousand(c);
}

/// The same search and choice among four times as many workers, which hold as much together.
fn four_thousand(c: &mut Criterion) {
    const MANY: u32 = 4_000;
    let filled = support::fill_of(MANY);
    let (mut group, ahead) = (c.benchmark_group("4,000 workers"), Ahead::default());
    let mut workers = support::candidates_of(MANY);
    let mut next = filled.conversations.iter().cycle();
    group.bench_function("match, one holder", |b| {
        b.iter(|| next.next().map(|chain| filled.index.lengths(black_box(chain))));
    });
    group.bench_function("route, one holder, busy workers", |b| {
        b.iter(|| {
            let chain = next.next()?;
            let (views, turn) = ([view(chain)], Turn { counter: 0, random: 7 });
            let views = PromptViews::of(&views, &[]);
            consider(Policy::Prefix, &views, &mut workers, &ahead, (Duration::ZERO, &turn), &filled.index)
        });
    });
    group.finish();
}

/// Prompts by how their prefixes are spread. Different ones each time, where there are, so that no cache of
/// the processor's knows them.
fn prompts(filled: &Filled) -> [(&'static str, Vec<&[BlockHash]>); 5] {
    let conversations: Vec<&[BlockHash]> = filled.conversations.iter().map(Vec::as_slice).collect();
    // New behind the system prompt.
    let turned: Vec<&[BlockHash]> =
        conversations.iter().map(|chain| &chain[..support::SYSTEM_BLOCKS]).collect();
    [
        ("one holder", conversations),
        ("eight holders", vec![&filled.eight]),
        ("eight holders, one block in fifty gone", vec![&filled.holes]),
        ("system prompt only", turned),
        ("a thousand lengths", vec![&filled.every]),
    ]
}

fn matches(c: &mut Criterion, filled: &Filled) {
    let mut group = c.benchmark_group("match");
    for (name, chains) in prompts(filled) {
        let mut next = chains.iter().cycle();
        group.bench_function(name, |b| {
            b.iter(|| next.next().map(|chain| filled.index.lengths(black_box(chain))));
        });
    }
    group.finish();
}

fn routes(c: &mut Criterion, filled: &Filled) {
    let mut group = c.benchmark_group("route");
    let (ahead, busy) = (Ahead::default(), candidates());
    let idle = busy.iter().map(|one| Candidate { load: LoadSnapshot::default(), ..*one }).collect();
    for (state, mut workers) in [("busy", busy), ("idle", idle)] {
        for (name, chains) in prompts(filled) {
            let mut next = chains.iter().cycle().enumerate();
            group.bench_function(format!("{name}, {state} workers"), |b| {
                b.iter(|| {
                    let (counter, chain) = next.next()?;
                    let turn = Turn { counter: counter as u64, random: 7 };
                    consider(
                        Policy::Prefix,
                        &PromptViews::of(&[view(chain)], &[]),
                        &mut workers,
                        &ahead,
                        (Duration::ZERO, &turn),
                        &filled.index,
                    )
                });
            });
        }
    }
    group.finish();
}

fn places(c: &mut Criterion, filled: &mut Filled) {
    let Filled { index, conversations, .. } = filled;
    let mut group = c.benchmark_group("place");
    let mut next = (0u32..).zip(conversations.iter().cycle());
    group.bench_function("held", |b| {
        b.iter(|| {
            let (number, chain) = next.next()?;
            // Where it was placed before.
            Some(index.place(WorkerId(number % conversations.len() as u32 % support::WORKERS), chain))
        });
    });
    let mut number = 0;
    let mut fresh = || {
        number += 1;
        unknown(number, PROMPT_BLOCKS)
    };
    group.bench_function("new", |b| {
        b.iter_batched(
            &mut fresh,
            |chain| drop(index.place(WorkerId(chain[0].0 as u32 % support::WORKERS), &chain)),
            BatchSize::SmallInput,
        );
    });
    let shared = unknown(u64::MAX - 1, 512);
    for worker in 1..support::WORKERS {
        index.place(WorkerId(worker), &shared);
    }
    group.bench_function("512 blocks that 999 others hold, and withdraw", |b| {
        b.iter(|| {
            let placement = index.place(WorkerId(0), &shared);
            index.withdraw(placement);
        });
    });
    for worker in (0..support::WORKERS).map(WorkerId) {
        index.set_capacity(worker, Some(index.resident(worker)));
    }
    group.bench_function("new, in place of the worker's least recent", |b| {
        b.iter_batched(
            &mut fresh,
            |chain| drop(index.place(WorkerId(chain[0].0 as u32 % support::WORKERS), &chain)),
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = bench
}
criterion_main!(benches);
