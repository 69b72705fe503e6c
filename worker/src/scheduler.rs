//! Who runs in the next step: decodes first, then prefills in pieces, then newcomers, within a budget of tokens.
//! Knows sequences and blocks; never tensors, clients or time.
//!
//! - First come, first served. A newcomer is admitted once all blocks of its prompt are free, so that only a decode can
//!   run out of blocks.
//! - Then the youngest running sequence is preempted: its blocks are freed, and it waits at the head of the queue to
//!   be computed again (its full blocks are still cached, unless somebody needs them).
//! - The oldest sequence never yields to a younger one, and alone it always fits; so everything ends.
//!
//! Next: `block_manager.rs`, where the blocks come from.

use std::collections::VecDeque;

use crate::block_manager::{BlockManager, CacheChange};
use crate::sequence::Sequence;

/// What bounds one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepLimits {
    /// Tokens of a step, over all sequences; at least `max_running`.
    pub(crate) max_batched_tokens: usize,
    /// Sequences that hold blocks at the same time.
    pub(crate) max_running: usize,
}

/// One sequence's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Planned {
    /// Place in [`Scheduler::running`].
    pub(crate) sequence: usize,
    /// How many of its remaining tokens run.
    pub(crate) tokens: usize,
}

/// What a step computes.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) parts: Vec<Planned>,
    /// Sequences preempted to make room.
    pub(crate) preempted: usize,
    /// Prompt tokens of sequences admitted for the first time, and how many of them were cached.
    pub(crate) admitted_tokens: usize,
    pub(crate) cached_tokens: usize,
}

/// All live sequences.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: StepLimits,
    blocks: BlockManager,
    waiting: VecDeque<Sequence>,
    /// In the order of admission.
    running: Vec<Sequence>,
    plan: Plan,
}

impl Scheduler {
    pub(crate) fn new(limits: StepLimits, blocks: BlockManager) -> Self {
        Self { limits, blocks, waiting: VecDeque::new(), running: Vec::new(), plan: Plan::default() }
    }

    /// Queues a newcomer.
    pub(crate) fn add(&mut self, sequence: Sequence) {
        self.waiting.push_back(sequence);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    pub(crate) fn waiting_len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn running(&self) -> &[Sequence] {
        &self.running
    }

    /// The plan's parts beside the sequences they point at.
    pub(crate) fn planned_mut(&mut self) -> (&[Planned], &mut [Sequence]) {
        (&self.plan.parts, &mut self.running)
    }

    pub(crate) fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    /// Records changes of the prefix cache from now on; see [`BlockManager::record_changes`].
    pub(crate) fn record_changes(&mut self) {
        self.blocks.record_changes();
    }

    /// What changed in the prefix cache since the last call; see [`BlockManager::take_changes`].
    pub(crate) fn take_changes(&mut self) -> Vec<CacheChange> {
        self.blocks.take_changes()
    }

    /// The plan last made.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Lets go of sequences whose clients are gone.
    pub(crate) fn remove_aborted(&mut self) {
        self.waiting.retain(|s| !s.aborted());
        self.remove_running(Sequence::aborted);
    }

    /// Lets go of sequences that ended.
    pub(crate) fn remove_finished(&mut self) {
        self.remove_running(|s| s.finish.is_some());
    }

    fn remove_running(&mut self, leaves: impl Fn(&Sequence) -> bool) {
        let blocks = &mut self.blocks;
        self.running.retain_mut(|sequence| {
            let leaves = leaves(sequence);
            if leaves {
                blocks.release(&mut sequence.table);
            }
            !leaves
        });
    }

    /// Makes the plan of the next step. Empty only if nothing is left to run.
    pub(crate) fn schedule(&mut self) {
        self.plan.parts.clear();
        self.plan = Plan { parts: std::mem::take(&mut self.plan.parts), ..Plan::default() };
        let mut budget = self.limits.max_batched_tokens;
        self.plan_decodes(&mut budget);
        self.plan_prefills(&mut budget);
        // Whoever was preempted in this step would come back at once and be preempted again.
        if self.plan.preempted == 0 {
            self.admit(&mut budget);
        }
        debug_assert!(!self.plan.parts.is_empty() || self.is_idle());
    }

    fn plan_decodes(&mut self, budget: &mut usize) {
        let mut i = 0;
        // The victim is the last one, so parts planned before it stay valid.
        while i < self.running.len() && *budget > 0 {
            let sequence = &mut self.running[i];
            if sequence.remaining() == 1 {
                if !self.blocks.grow(&mut sequence.table, sequence.tokens.len()) {
                    self.preempt_last();
                    continue;
                }
                self.plan.parts.push(Planned { sequence: i, tokens: 1 });
                *budget -= 1;
            }
            i += 1;
        }
    }

    fn plan_prefills(&mut self, budget: &mut usize) {
        for (i, sequence) in self.running.iter().enumerate() {
            let tokens = sequence.remaining().min(*budget);
            if sequence.remaining() > 1 && tokens > 0 {
                self.plan.parts.push(Planned { sequence: i, tokens });
                *budget -= tokens;
            }
        }
    }

    fn admit(&mut self, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.limits.max_running {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            let Some(cached) = self.blocks.admit(&mut sequence.table, &sequence.tokens, &sequence.salt)
            else {
                self.waiting.push_front(sequence);
                return;
            };
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(cached);
                self.plan.admitted_tokens += sequence.prompt_len;
                self.plan.cached_tokens += cached;
            }
            sequence.computed = cached;
            let tokens = sequence.remaining().min(*budget);
            self.plan.parts.push(Planned { sequence: self.running.len(), tokens });
            *budget -= tokens;
            self.running.push(sequence);
        }
    }

    fn preempt_last(&mut self) {
        if let Some(mut sequence) = self.running.pop() {
            self.blocks.release(&mut sequence.table);
            sequence.computed = 0;
            self.waiting.push_front(sequence);
            self.plan.preempted += 1;
        }
    }

    /// Takes note that the planned tokens' KV is computed: full blocks can be found by others from now on.
    pub(crate) fn computed(&mut self) {
        for part in &self.plan.parts {
            let sequence = &mut self.running[part.sequence];
            sequence.computed += part.tokens;
            let tokens = &sequence.tokens[..sequence.computed];
            self.blocks.register(&mut sequence.table, tokens, &sequence.salt);
        }
    }

    /// The integrity check of blocks and tables.
    pub(crate) fn check(&self) -> Result<(), String> {
        if let Some(sequence) = self.waiting.iter().find(|s| !s.table.blocks().is_empty()) {
            return Err(format!("a waiting sequence of {} tokens holds blocks", sequence.tokens.len()));
        }
        self.blocks.check(self.running.iter().map(|s| &s.table))
    }
}
