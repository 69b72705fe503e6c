//! One release of the waiting room: 256 requests wait in front of 1,000 workers, over an index of full size.
//! Each prompt is cached on one worker, as follow-up turns are.
//!
//! `cargo bench -p keyway-core --bench waiting_room`
#![allow(missing_docs, reason = "Criterion's macros")]

mod support;

use std::mem::take;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use keyway_core::pick::{Candidate, Pick, Policy, Turn};
use keyway_core::waiting_room::{Ahead, WorkerChooser};
use keyway_core::{
    CandidateSet, PrefixIndex, PromptViews, Quote, RoomRules, WaitingRoom, WorkerId, consider, quote,
};
use keyway_wire::block_hash::BlockHash;

use self::support::{candidates, fill, view};

const WAITING: usize = 256;

/// A desk without a fleet behind it.
struct Clerk<'a> {
    index: &'a PrefixIndex,
    candidate_set: CandidateSet,
    begun: usize,
}

impl WorkerChooser<&[BlockHash]> for Clerk<'_> {
    type Plan = Pick;

    fn least_excess_ms(&mut self, _: &&[BlockHash], ahead: &Ahead) -> f64 {
        self.candidate_set.least_excess_ms(ahead)
    }

    fn is_open(&mut self, _: &&[BlockHash], worker: WorkerId, ahead: &Ahead) -> bool {
        self.candidate_set.is_open(worker, ahead)
    }

    fn quote(&mut self, chain: &&[BlockHash], ahead: &Ahead) -> Option<(Quote, Pick)> {
        let mut workers = self.candidate_set.candidates().to_vec();
        let (view, turn) = (view(chain), Turn { counter: 0, random: 7 });
        let pick = consider(
            Policy::Prefix,
            &PromptViews::of(&[view], &[]),
            &mut workers,
            ahead,
            (Duration::ZERO, &turn),
            self.index,
        )?;
        Some((quote(Policy::Prefix, true, view.prompt_tokens, &workers, &pick), pick))
    }

    fn begin(&mut self, _: &[BlockHash], plan: Option<Pick>) {
        let Some(pick) = plan else { return };
        self.begun += 1;
        let mut load = self.candidate_set.candidates()[pick.index].load;
        load.pace.backlog_ms += pick.cost.own_ms.max(1000.0);
        self.candidate_set.update(pick.index, load);
    }
}

fn bench(c: &mut Criterion) {
    let filled = fill();
    let mut group = c.benchmark_group("release");
    let rules = RoomRules::default();
    // Workers from this number on have a backlog below the horizon.
    for (name, open_from) in [("nobody is open", 1000), ("one worker opens", 999), ("half are open", 500)] {
        let workers: Vec<Candidate> = candidates()
            .into_iter()
            .map(|mut one| {
                let closed = (one.worker.0 as usize) < open_from;
                one.load.pace.backlog_ms = if closed { 900.0 + one.load.pace.backlog_ms } else { 0.0 };
                one
            })
            .collect();
        let room = || {
            let mut room = WaitingRoom::new(rules);
            for chain in filled.conversations.iter().take(WAITING) {
                room.enter(Duration::ZERO, Some(20.0), chain.as_slice());
            }
            room
        };
        let release = |room: &mut WaitingRoom<_>, workers, ms| {
            let candidate_set = CandidateSet::new(workers, rules.horizon_ms);
            let mut clerk = Clerk { index: &filled.index, candidate_set, begun: 0 };
            room.release(Duration::from_millis(ms), &mut clerk);
            clerk.begun
        };
        group.bench_function(format!("{name}, all are quoted"), |b| {
            let setup = || (room(), workers.clone());
            b.iter_batched_ref(
                setup,
                |(room, workers)| release(room, take(workers), 10),
                BatchSize::LargeInput,
            );
        });
        group.bench_function(format!("{name}, a millisecond later"), |b| {
            let setup = || {
                let mut room = room();
                release(&mut room, workers.clone(), 10);
                (room, workers.clone())
            };
            b.iter_batched_ref(
                setup,
                |(room, workers)| release(room, take(workers), 11),
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = bench
}
criterion_main!(benches);
