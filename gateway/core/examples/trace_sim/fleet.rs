//! Replays a trace over a fleet, each request routed by the core as a gateway would, and sums up what came of it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use keyway_core::pick::pick_with;
use keyway_core::{Candidate, CostModel, Load, Policy, PrefixIndex, RequestView, Turn, WorkerId};

use crate::engine::Engine;
use crate::trace::Row;

/// What is replayed.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) workers: usize,
    /// Blocks of each worker's cache.
    pub(crate) cache_blocks: usize,
    /// Prompt tokens of a block.
    pub(crate) block_tokens: u64,
    /// Whether the index is told that number.
    pub(crate) capacity_known: bool,
    /// Prefill tokens a second of each worker.
    pub(crate) rate: f64,
    pub(crate) policy: Policy,
    pub(crate) model: CostModel,
}

/// What came of it.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) cached_tokens: u64,
    pub(crate) prompt_tokens: u64,
    /// Seconds to the first token, sorted.
    pub(crate) ttft: Vec<f64>,
    /// Prompt tokens sent to each worker.
    pub(crate) per_worker: Vec<u64>,
}

#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    LastToken,
    FirstToken,
    Arrival,
}

/// One run in virtual time.
struct Run<'a> {
    rows: &'a [Row],
    setup: Setup,
    index: PrefixIndex,
    engines: Vec<Engine>,
    loads: Vec<Load>,
    /// Worker and predicted uncached tokens of each request sent.
    sent: Vec<(usize, u64)>,
    /// Time, kind, request: a min-heap.
    events: BinaryHeap<Reverse<(u64, Event, usize)>>,
    random: u64,
    outcome: Outcome,
}

/// Replays `rows`, in order of arrival.
pub(crate) fn replay(rows: &[Row], setup: Setup) -> Outcome {
    let mut index = PrefixIndex::new(1 << 30);
    for worker in 0..setup.workers {
        index.set_capacity(WorkerId(worker as u32), setup.capacity_known.then_some(setup.cache_blocks));
    }
    let mut run = Run {
        rows,
        setup,
        index,
        engines: (0..setup.workers)
            .map(|_| Engine::new(setup.cache_blocks, setup.block_tokens, setup.rate))
            .collect(),
        loads: (0..setup.workers).map(|_| Load::default()).collect(),
        sent: vec![(0, 0); rows.len()],
        events: rows
            .iter()
            .enumerate()
            .map(|(i, row)| Reverse((row.arrival_us, Event::Arrival, i)))
            .collect(),
        random: 1,
        outcome: Outcome { per_worker: vec![0; setup.workers], ..Outcome::default() },
    };
    while let Some(Reverse((now, event, request))) = run.events.pop() {
        run.step(now, event, request);
    }
    run.outcome.ttft.sort_unstable_by(f64::total_cmp);
    run.outcome
}

impl Run<'_> {
    fn step(&mut self, now: u64, event: Event, request: usize) {
        let rows = self.rows;
        let row = &rows[request];
        match event {
            Event::Arrival => self.send(request),
            Event::FirstToken => {
                self.outcome.ttft.push((now - row.arrival_us) as f64 / 1e6);
                let (worker, uncached) = self.sent[request];
                self.loads[worker].first_token(uncached);
                let end = now + self.engines[worker].first_token(row);
                self.events.push(Reverse((end, Event::LastToken, request)));
            }
            Event::LastToken => {
                let (worker, _) = self.sent[request];
                self.engines[worker].last_token();
                self.loads[worker].end();
            }
        }
        let (worker, _) = self.sent[request];
        if let Some((next, cached, prefill_us)) = self.engines[worker].start_next(rows) {
            self.outcome.cached_tokens += cached;
            self.events.push(Reverse((now + prefill_us, Event::FirstToken, next)));
        }
    }

    fn send(&mut self, request: usize) {
        let row = &self.rows[request];
        let mut candidates: Vec<Candidate> = (0..self.setup.workers)
            .map(|worker| Candidate {
                worker: WorkerId(worker as u32),
                load: self.loads[worker].snapshot(),
                matched_blocks: 0,
                weight: 1.0,
            })
            .collect();
        for (worker, blocks) in self.index.matched(&row.chain) {
            candidates[worker.0 as usize].matched_blocks = blocks;
        }
        let view = RequestView {
            chain: &row.chain,
            prompt_tokens: row.prompt_tokens,
            block_tokens: self.setup.block_tokens as f64,
        };
        let turn = Turn { counter: request as u64, random: self.next_random() };
        let Some(pick) = pick_with(&self.setup.model, self.setup.policy, &view, &candidates, &turn) else {
            return;
        };
        self.index.place(WorkerId(pick.index as u32), &row.chain);
        self.loads[pick.index].start(pick.uncached_tokens);
        self.sent[request] = (pick.index, pick.uncached_tokens);
        self.outcome.per_worker[pick.index] += row.prompt_tokens;
        self.outcome.prompt_tokens += row.prompt_tokens;
        self.engines[pick.index].enqueue(request);
    }

    /// xorshift64*: enough for a reproducible coin.
    fn next_random(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
}

impl Outcome {
    /// Share of the prompt tokens that was cached.
    pub(crate) fn cached_ratio(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens as f64
    }

    /// The largest worker's prompt tokens against the mean.
    pub(crate) fn imbalance(&self) -> f64 {
        let largest = self.per_worker.iter().max().copied().unwrap_or(0) as f64;
        largest * self.per_worker.len() as f64 / self.prompt_tokens as f64
    }

    pub(crate) fn ttft_mean(&self) -> f64 {
        self.ttft.iter().sum::<f64>() / self.ttft.len() as f64
    }

    /// Seconds that this share of the requests stayed within.
    pub(crate) fn ttft_quantile(&self, share: f64) -> f64 {
        let at = (share * self.ttft.len() as f64).ceil() as usize;
        self.ttft[at.clamp(1, self.ttft.len()) - 1]
    }
}
