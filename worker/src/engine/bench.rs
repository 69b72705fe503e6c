//! A scheduler without an engine around it, for `benches/scheduler.rs`: what a step costs before any tensor
//! moves. Not part of the library's interface.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use crate::engine::backend::CacheGroup;
use crate::engine::block_manager::{BlockManager, GroupRules};
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::{Scheduler, StepLimits};
use crate::engine::sequence::{Generation, GenerationRequest, Sequence};

const BLOCK_SIZE: usize = 16;

/// A load on the scheduler: how many sequences there are, how long they are, and what they share.
#[derive(Debug, Clone)]
pub struct Case {
    /// Sequences at a time.
    pub running: usize,
    /// Length of prompts, in tokens.
    pub prompt: usize,
    /// Leading tokens of the prompt that all have in common.
    pub shared: usize,
    /// Tokens after which a sequence ends, and another comes.
    pub output: usize,
    /// Tokens of a step at most.
    pub budget: usize,
    /// The cache groups of an imagined model; each sequence has a block table for each.
    pub groups: Vec<CacheGroup>,
}

/// A scheduler that is kept busy with a case.
#[derive(Debug)]
pub struct SchedulerBench {
    case: Case,
    scheduler: Scheduler,
    generations: Vec<Generation>,
    slots: Arc<Semaphore>,
    random: fastrand::Rng,
}

impl SchedulerBench {
    /// With room for everything, and all sequences waiting.
    pub fn new(case: Case) -> Self {
        let rules = GroupRules::new(&case.groups, BLOCK_SIZE);
        let blocks = case.running * rules.blocks_needed(case.prompt + case.output, case.budget);
        let blocks = BlockManager::new(blocks, BLOCK_SIZE, rules, 1);
        let limits = StepLimits { max_batched_tokens: case.budget, max_running: case.running };
        let mut bench = Self {
            scheduler: Scheduler::new(limits, blocks),
            generations: Vec::new(),
            slots: Arc::new(Semaphore::new(2 * case.running)),
            random: fastrand::Rng::with_seed(1),
            case,
        };
        for _ in 0..bench.case.running {
            bench.add();
        }
        bench
    }

    /// Sequences that hold blocks.
    pub fn running(&self) -> usize {
        self.scheduler.running().len()
    }

    fn add(&mut self) {
        let shared = (0..self.case.shared as u32).map(|i| i % 997);
        let own = self.case.shared..self.case.prompt - self.random.usize(0..BLOCK_SIZE);
        let random = &mut self.random;
        let prompt = shared.chain(own.map(|_| random.u32(..))).collect();
        let request = GenerationRequest {
            prompt,
            max_tokens: self.case.output,
            ignore_eos: true,
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            ..GenerationRequest::default()
        };
        let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() else { return };
        let (sequence, generation) = Sequence::new(request, slot, Instant::now());
        self.scheduler.add(sequence);
        self.generations.push(generation);
    }

    /// Makes one step with tokens out of the air; returns the time of all but them and their clients, and the
    /// number of tokens it planned.
    pub fn step(&mut self) -> (Duration, usize) {
        let begin = Instant::now();
        self.scheduler.remove_aborted();
        self.scheduler.schedule();
        let tables = self.scheduler.tables();
        let chunks = std::hint::black_box(self.scheduler.chunks(&tables));
        let planned = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        drop(chunks);
        self.scheduler.commit();
        let first = begin.elapsed();

        let (parts, sequences) = self.scheduler.planned_mut();
        for part in parts {
            if sequences[part.sequence].remaining() == 0 {
                sequences[part.sequence].push(self.random.u32(..), false, None);
            }
        }
        let begin = Instant::now();
        self.scheduler.remove_finished();
        let time = first + begin.elapsed();

        let mut context = Context::from_waker(Waker::noop());
        self.generations.retain_mut(|generation| {
            loop {
                match generation.poll_next(&mut context) {
                    std::task::Poll::Ready(Some(_)) => {}
                    std::task::Poll::Ready(None) => break false,
                    std::task::Poll::Pending => break true,
                }
            }
        });
        while self.generations.len() < self.case.running {
            self.add();
        }
        (time, planned)
    }
}
