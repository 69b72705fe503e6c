//! Who runs in the next step: decodes first, then prefills in pieces, then newcomers, within a budget of
//! tokens. Knows sequences and blocks; never tensors, clients or time.
//!
//! - Ranked by priority, then by arrival. A newcomer is admitted once its first blocks are free; a better one
//!   waiting is never overtaken.
//! - When blocks run out, the worst-ranked running sequence is preempted: its blocks are freed, and it waits
//!   again at its rank to be computed again (its full blocks are still cached, unless others needed them).
//! - The best-ranked running sequence never yields to another, gets at least a token in every step, and alone
//!   it always fits; so everything ends.
//! - Equal prompts that arrive together compute their common prefix once: what the step computes is promised,
//!   and newcomers of the same step are admitted behind it. While a prefill takes the whole budget no
//!   newcomer is admitted, so a promise is made and kept within one step, and no sequence ever waits for one
//!   that may leave.
//! - Prefixes that are held for other workers (`holds.rs`) yield to who runs, and to who waits while nothing
//!   runs.
//!
//! Next: `block_manager.rs`, where the blocks come from.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::engine::backend::Chunk;
use crate::engine::block_manager::{BlockId, BlockManager, BlockTable, CacheChange, Damage, Lookup};
use crate::engine::holds::Holds;
use crate::engine::sequence::{Rank, Sequence};
use crate::limits::SCORED_TOKENS_PER_STEP_MAX;

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
    /// Its place in [`Scheduler::running`] when the step was planned.
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
    /// Of those whose KV came from elsewhere: tokens that were not cached here before, and how many of them
    /// came.
    pub(crate) external_wanted: usize,
    pub(crate) external_tokens: usize,
}

impl Plan {
    /// Counts a prompt that is admitted for the first time. For the client, what another worker computed for
    /// it counts as not cached, and what that had cached as cached, as in vLLM.
    fn count(&mut self, sequence: &mut Sequence, cached: usize) {
        let found = cached.min(sequence.prompt_len);
        let (mut own, mut told) = (found, found);
        if let Some(imported) = sequence.imported.take() {
            own = found.min(imported.local_tokens);
            told = if imported.was_cached { found } else { own };
            self.external_wanted += sequence.prompt_len - own;
            self.external_tokens += found - own;
        }
        sequence.cached_tokens = Some(told);
        self.admitted_tokens += sequence.prompt_len;
        self.cached_tokens += own;
    }
}

/// All live sequences, waiting or running, and the blocks of their KV.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: StepLimits,
    blocks: BlockManager,
    /// Sequences without blocks, the best-ranked first: newcomers, and those that are to be computed again.
    waiting: BTreeMap<Rank, Sequence>,
    /// In the order of admission.
    running: Vec<Sequence>,
    plan: Plan,
    scored: ScoredBudget,
    /// Prefixes that are held for others.
    holds: Holds,
    /// How many sequences were added so far, which ranks equal priorities.
    arrivals: u64,
}

/// What is left in a step of the rows of logits for prompts that are scored.
#[derive(Debug)]
struct ScoredBudget(usize);

impl Default for ScoredBudget {
    fn default() -> Self {
        Self(SCORED_TOKENS_PER_STEP_MAX)
    }
}

impl ScoredBudget {
    /// How many of the sequence's remaining tokens may run.
    fn tokens(&self, sequence: &Sequence, budget: usize) -> usize {
        let most = if sequence.is_scoring() { self.0.min(budget) } else { budget };
        sequence.remaining().min(most)
    }

    fn spend(&mut self, sequence: &Sequence, tokens: usize) {
        if sequence.is_scoring() {
            self.0 -= tokens;
        }
    }
}

impl Scheduler {
    pub(crate) fn new(limits: StepLimits, blocks: BlockManager) -> Self {
        let (waiting, running) = (BTreeMap::new(), Vec::new());
        let (plan, scored, holds) = (Plan::default(), ScoredBudget::default(), Holds::default());
        Self { limits, blocks, waiting, running, plan, scored, holds, arrivals: 0 }
    }

    /// Queues a newcomer behind all of its priority.
    pub(crate) fn add(&mut self, mut sequence: Sequence) {
        sequence.rank.arrival = self.arrivals;
        self.arrivals += 1;
        self.waiting.insert(sequence.rank, sequence);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    pub(crate) fn waiting_len(&self) -> usize {
        self.waiting.len()
    }

    /// Tokens still to be computed before each live sequence's next one: of those that wait, what is not
    /// cached now; of those whose prefill has begun, the rest. Decodes have none.
    pub(crate) fn uncached_tokens(&mut self) -> usize {
        let blocks = &self.blocks;
        let waiting = self.waiting.values_mut().map(|sequence| {
            let reuse = sequence.reusable();
            let Sequence { tokens, lookup, salt, .. } = sequence;
            tokens.len() - blocks.cached_tokens(lookup, tokens, salt, reuse)
        });
        let prefills = self.running.iter().filter(|s| s.computed < s.prompt_len || s.remaining() > 1);
        waiting.sum::<usize>() + prefills.map(Sequence::remaining).sum::<usize>()
    }

    pub(crate) fn running(&self) -> &[Sequence] {
        &self.running
    }

    /// The plan's parts beside the sequences they point at.
    pub(crate) fn planned_mut(&mut self) -> (&[Planned], &mut [Sequence]) {
        (&self.plan.parts, &mut self.running)
    }

    /// The sequence of this rank, which stood at `place` among the running ones when a plan was made; `None`
    /// if it is gone. Those in front may have left since, or it was preempted.
    pub(crate) fn find(&mut self, rank: Rank, place: usize) -> Option<&mut Sequence> {
        let end = self.running.len().min(place + 1);
        match self.running[..end].iter().rposition(|sequence| sequence.rank == rank) {
            Some(place) => Some(&mut self.running[place]),
            None => self.waiting.get_mut(&rank),
        }
    }

    pub(crate) fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    pub(crate) fn holds(&self) -> &Holds {
        &self.holds
    }

    /// The held prefixes, and the blocks they are of.
    pub(crate) fn holds_mut(&mut self) -> (&mut Holds, &mut BlockManager) {
        (&mut self.holds, &mut self.blocks)
    }

    /// Holds the prompt of the sequence of this rank beyond its end, if that is asked for and it has no token
    /// yet; tells its client. To be called once the prompt is computed.
    pub(crate) fn keep_prompt(&mut self, rank: Rank, place: usize) {
        let Some(sequence) = self.find(rank, place) else { return };
        let Some(holder) = sequence.keeper.take() else { return };
        let prompt = sequence.tokens[..sequence.prompt_len].to_vec();
        let salt = Arc::clone(&sequence.salt);
        let hold = self.holds.keep(&mut self.blocks, (&prompt, &salt), holder);
        if let (Some(hold), Some(sequence)) = (hold, self.find(rank, place)) {
            sequence.kept(hold);
        }
    }

    /// Records changes of the prefix cache from now on; see [`BlockManager::record_changes`].
    pub(crate) fn record_changes(&mut self) {
        self.blocks.record_changes();
    }

    /// What changed in the prefix cache since the last call; see [`BlockManager::take_changes`].
    pub(crate) fn take_changes(&mut self) -> Vec<CacheChange> {
        self.blocks.take_changes()
    }

    #[cfg(test)]
    pub(crate) fn blocks_mut(&mut self) -> &mut BlockManager {
        &mut self.blocks
    }

    /// Those who wait, the best-ranked first.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> impl Iterator<Item = &Sequence> {
        self.waiting.values()
    }

    /// The plan last made.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The block tables of the plan's parts: one of each cache group, part by part.
    pub(crate) fn tables(&self) -> Vec<&[BlockId]> {
        let mut tables = Vec::with_capacity(self.plan.parts.len() * self.blocks.groups());
        for part in &self.plan.parts {
            tables.extend(self.running[part.sequence].table.tables());
        }
        tables
    }

    /// The plan as a backend takes it, with its own `tables`.
    pub(crate) fn chunks<'a>(&'a self, tables: &'a [&'a [BlockId]]) -> Vec<Chunk<'a>> {
        let mut chunks = Vec::with_capacity(self.plan.parts.len());
        for (part, tables) in self.plan.parts.iter().zip(tables.chunks_exact(self.blocks.groups())) {
            let sequence = &self.running[part.sequence];
            let (start, end) = (sequence.computed, sequence.computed + part.tokens);
            let known = sequence.tokens.len();
            // A prompt that is scored wants the logits behind each of its tokens, so each is a chunk of its
            // own.
            let stride = if sequence.is_scoring() { 1 } else { part.tokens };
            for start in (start..end).step_by(stride) {
                let wants_logits = stride == 1 && sequence.is_scoring() || start + stride == known;
                let tokens = &sequence.tokens[start..start + stride];
                chunks.push(Chunk { tokens, start, tables, wants_logits });
            }
        }
        chunks
    }

    /// Lets go of sequences whose clients are gone.
    pub(crate) fn remove_aborted(&mut self) {
        self.waiting.retain(|_, s| !s.aborted());
        self.remove_running(Sequence::aborted);
    }

    /// Lets go of sequences that ended.
    pub(crate) fn remove_finished(&mut self) {
        self.remove_running(|s| s.finish.is_some());
        // A sequence that was preempted in this plan may have got its token since.
        if self.plan.preempted > 0 {
            self.waiting.retain(|_, s| s.finish.is_none());
        }
    }

    /// Ends all sequences, with the reason why the planned step was not carried out. What it was to compute
    /// is promised to be there and is not, so everything cached is forgotten.
    pub(crate) fn fail_all(&mut self, reason: &str) {
        for sequence in self.running.drain(..).chain(std::mem::take(&mut self.waiting).into_values()) {
            sequence.break_off(reason.to_owned());
        }
        self.plan = Plan::default();
        self.holds.forget();
        self.blocks.clear();
    }

    /// Puts every running sequence back to the queue, to be computed again: all KV is lost. Returns how many
    /// they are.
    pub(crate) fn recompute_all(&mut self) -> usize {
        // What was being drawn is drawn again.
        for sequence in self.running.iter_mut().chain(self.waiting.values_mut()) {
            sequence.expect_no_more();
        }
        let lost = self.running.len();
        for mut sequence in self.running.drain(..) {
            sequence.table = BlockTable::default();
            sequence.computed = 0;
            self.waiting.insert(sequence.rank, sequence);
        }
        self.plan = Plan::default();
        self.holds.forget();
        self.blocks.clear();
        lost
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

    /// Makes the plan of the next step. Empty only if nothing is left to run before a token that is being
    /// drawn is known. The step must be carried out and committed: blocks are promised.
    pub(crate) fn schedule(&mut self) {
        let mut parts = std::mem::take(&mut self.plan.parts);
        parts.clear();
        self.plan = Plan { parts, ..Plan::default() };
        let mut budget = loop {
            match self.plan_running() {
                Some(budget) => break budget,
                // Who was planned on may be gone: the whole plan is made again.
                None if self.holds.drop_oldest(&mut self.blocks) => {}
                None => self.preempt_worst(),
            }
        };
        for part in &self.plan.parts {
            promise(&mut self.blocks, &mut self.running[part.sequence], part.tokens);
        }
        // A sequence that was preempted in this step would come back at once and be preempted again.
        if self.plan.preempted == 0 {
            self.admit(&mut budget);
        }
        let waits = |s: &Sequence| s.known().len() < s.tokens.len();
        debug_assert!(!self.plan.parts.is_empty() || self.is_idle() || self.running.iter().any(waits));
    }

    /// Plans those who run: one token of each decode, then the prefills. Returns the budget left, or `None`
    /// where blocks have run out.
    fn plan_running(&mut self) -> Option<usize> {
        self.plan.parts.clear();
        self.scored = ScoredBudget::default();
        let mut budget = self.limits.max_batched_tokens;
        let mut prefills = Vec::new();
        for i in 0..self.running.len() {
            if self.running[i].remaining() > 1 {
                prefills.push(i);
            } else {
                self.plan_part(i, &mut budget)?;
            }
        }
        for i in prefills {
            self.plan_part(i, &mut budget)?;
        }
        Some(budget)
    }

    /// Plans as much of one sequence as the budget allows; `None` where blocks have run out.
    fn plan_part(&mut self, i: usize, budget: &mut usize) -> Option<()> {
        let sequence = &mut self.running[i];
        let tokens = self.scored.tokens(sequence, *budget);
        if tokens > 0 {
            let covered = self.blocks.cover(&mut sequence.table, sequence.computed + tokens);
            covered.then_some(())?;
            self.plan.parts.push(Planned { sequence: i, tokens });
            *budget -= tokens;
            self.scored.spend(&self.running[i], tokens);
        }
        Some(())
    }

    fn admit(&mut self, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.limits.max_running {
            let Some(mut next) = self.waiting.first_entry() else { return };
            let sequence = next.get_mut();
            if self.scored.tokens(sequence, *budget) == 0 {
                return;
            }
            let reuse = sequence.reusable();
            let table = &mut sequence.table;
            let Some(cached) = self.blocks.admit(table, &sequence.tokens, &sequence.salt, *budget, reuse)
            else {
                // What runs gives blocks back; what is held may not while nothing runs.
                if self.running.is_empty() && self.holds.drop_oldest(&mut self.blocks) {
                    continue;
                }
                return;
            };
            let mut sequence = next.remove();
            sequence.computed = cached;
            sequence.lookup = Lookup::default();
            if sequence.cached_tokens.is_none() {
                self.plan.count(&mut sequence, cached);
            }
            let tokens = self.scored.tokens(&sequence, *budget);
            promise(&mut self.blocks, &mut sequence, tokens);
            self.plan.parts.push(Planned { sequence: self.running.len(), tokens });
            *budget -= tokens;
            self.scored.spend(&sequence, tokens);
            self.running.push(sequence);
        }
    }

    fn preempt_worst(&mut self) {
        let worst = self.running.iter().enumerate().max_by_key(|(_, sequence)| sequence.rank);
        if let Some((worst, _)) = worst {
            let mut sequence = self.running.remove(worst);
            self.blocks.release(&mut sequence.table);
            sequence.computed = 0;
            self.waiting.insert(sequence.rank, sequence);
            self.plan.preempted += 1;
        }
    }

    /// Takes note that the planned step is carried out, or started, and that all its tokens are known: their
    /// KV is computed before that of any later step. Of those who ended meanwhile it is forgotten.
    pub(crate) fn commit(&mut self) {
        for part in &self.plan.parts {
            let sequence = &mut self.running[part.sequence];
            if sequence.finish.is_some() {
                continue;
            }
            let start = sequence.computed;
            sequence.computed += part.tokens;
            let tokens = &sequence.tokens[..sequence.computed];
            self.blocks.commit(&mut sequence.table, tokens, start, &sequence.salt);
        }
    }

    /// The integrity check of blocks and tables.
    pub(crate) fn check(&self) -> Result<(), Damage> {
        if let Some(sequence) = self.waiting.values().find(|s| !s.table.is_empty()) {
            return Err(Damage::WaitingHolds { tokens: sequence.tokens.len() });
        }
        self.blocks.check(self.running.iter().map(|s| (&s.table, s.computed)).chain(self.holds.tables()))
    }
}

/// Lets others of the same step share what the next `tokens` of `sequence` will fill, as far as they are
/// known.
fn promise(blocks: &mut BlockManager, sequence: &mut Sequence, tokens: usize) {
    let (start, end) = (sequence.computed, sequence.computed + tokens);
    if end <= sequence.known().len() {
        blocks.promise(&mut sequence.table, &sequence.tokens[..end], start, &sequence.salt);
    }
}
