//! The step loop: who waits, who runs, how many tokens each step computes, and when it ends. Time is an
//! argument and only moves forward; nothing here sleeps. What a step costs is `profile.rs`'s, blocks are
//! `block_pool.rs`'s.
//!
//! A step serves the running requests in the order of their admission, one token for each that decodes and a
//! chunk for each whose prompt is not done, then admits waiting ones while the token budget lasts. When
//! blocks run out the request admitted last gives up its own and waits again, in front.

mod recording;
mod skip;

use std::collections::VecDeque;

use keyway_wire::block_hash::BlockHash;

use self::recording::Recording;
use super::{
    block_pool::{BlockPool, Change, Held},
    profile::{Profile, StepWork, pairs},
};

/// Engine time, in nanoseconds.
pub type Nanos = u64;

/// Names a request as long as it lives; a later request in the same slot has another serial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId {
    /// Small, and used again: an index for the caller's own tables.
    pub slot: u32,
    serial: u32,
}

/// A request as it is submitted.
#[derive(Debug)]
pub struct Submission {
    /// Prompt tokens, at least 1.
    pub prompt_tokens: u32,
    /// Tokens to generate, at least 1.
    pub output_tokens: u32,
    /// Names of the full blocks of the prompt and then of the answer, as far as they are known. A block
    /// beyond them is never cached.
    pub chain: Box<[BlockHash]>,
    /// Leading prompt tokens whose KV has come from another engine, less than all; 0: none has.
    pub fetched_tokens: u32,
}

/// Why a request is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It could never run, not even alone.
    #[error("prompt and answer need {tokens} tokens of KV, but there are only {kv_tokens}")]
    TooLong {
        /// KV tokens that it needs: prompt and answer without the answer's last token.
        tokens: u64,
        /// KV tokens that the engine has room for in all.
        kv_tokens: u64,
    },
}

/// A token came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// The request whose token it is.
    pub request: RequestId,
    /// When its step ended.
    pub at: Nanos,
    /// Its number, from 1.
    pub number: u32,
    /// Prompt tokens found in the prefix cache when the request was first admitted.
    pub cached_tokens: u32,
    /// Whether it was the last: the request is over.
    pub last: bool,
}

/// Who is told what comes out of the engine.
pub trait Listener {
    /// A token came out.
    fn token(&mut self, token: Token);

    /// Whether it is to be told of each token; otherwise of each request's first and last one, and maybe of
    /// others.
    fn hears_all(&self) -> bool {
        true
    }
}

/// What was counted since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Prompt tokens of admitted requests.
    pub queried_tokens: u64,
    /// Those of them that were cached.
    pub hit_tokens: u64,
    /// Requests that gave up their blocks.
    pub preemptions: u64,
    /// Cached blocks that were given to something else.
    pub evicted_blocks: u64,
    /// Tokens generated so far, also by requests that were cancelled later.
    pub generated_tokens: u64,
    /// Steps that have ended; the one under way is not counted.
    pub steps: u64,
}

/// One simulated engine: its requests, its KV blocks, and the step under way.
#[derive(Debug)]
pub struct Engine {
    profile: Profile,
    pool: BlockPool,
    requests: Vec<Slot>,
    unused: Vec<u32>,
    waiting: VecDeque<u32>,
    running: Vec<Running>,
    /// When the step under way ends.
    step_ends: Option<Nanos>,
    slowdown: f64,
    leaving: u32,
    totals: Totals,
    recording: Option<Recording>,
}

#[derive(Debug, Default)]
struct Slot {
    serial: u32,
    live: bool,
    cancelled: bool,
    prompt_tokens: u32,
    /// Tokens still to generate.
    left: u32,
    generated: u32,
    /// `None` until the first admission.
    cached_tokens: Option<u32>,
    /// Leading tokens whose KV has come with the request; 0 once it was admitted.
    fetched_tokens: u32,
    chain: Box<[BlockHash]>,
    blocks: Held,
}

/// What a step touches of a running request; the rest is in its slot.
#[derive(Debug)]
struct Running {
    slot: u32,
    /// Tokens whose KV is computed.
    computed: u32,
    /// Tokens known: prompt and generated ones. The step that computes the last of them gives the next.
    known: u32,
    /// Tokens that the step under way computes.
    scheduled: u32,
    /// Tokens that its blocks have room for.
    room: u32,
    /// Computed tokens at which its next block is full.
    name_at: u32,
}

// === impl Engine ===

impl Engine {
    /// An idle engine with an empty cache.
    pub fn new(profile: Profile) -> Self {
        Self {
            pool: BlockPool::new(profile.kv_blocks),
            profile,
            requests: Vec::new(),
            unused: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            step_ends: None,
            slowdown: 1.0,
            leaving: 0,
            totals: Totals::default(),
            recording: None,
        }
    }

    /// Keeps a list of what happens to the cache from now on, for [`Engine::take_changes`].
    #[must_use]
    pub fn recording(mut self) -> Self {
        self.recording = Some(Recording::default());
        self
    }

    /// Takes a request in at `now`. The engine must have been advanced to `now`.
    pub fn submit(&mut self, now: Nanos, submission: Submission) -> Result<RequestId, Refusal> {
        let Submission { prompt_tokens, output_tokens, chain, fetched_tokens } = submission;
        let tokens = u64::from(prompt_tokens) + u64::from(output_tokens) - 1;
        let kv_tokens = self.profile.kv_tokens();
        if tokens > kv_tokens {
            return Err(Refusal::TooLong { tokens, kv_tokens });
        }
        let slot = self.unused.pop().unwrap_or_else(|| {
            self.requests.push(Slot::default());
            self.requests.len() as u32 - 1
        });
        let request = &mut self.requests[slot as usize];
        request.serial = request.serial.wrapping_add(1);
        (request.live, request.cancelled) = (true, false);
        (request.prompt_tokens, request.left, request.generated) = (prompt_tokens, output_tokens, 0);
        (request.cached_tokens, request.chain) = (None, chain);
        request.fetched_tokens = fetched_tokens.min(prompt_tokens - 1);
        let id = RequestId { slot, serial: request.serial };
        self.waiting.push_back(slot);
        if self.step_ends.is_none() {
            self.schedule(now);
        }
        Ok(id)
    }

    /// Ends a request whose client has left; `false` if it is over already. A running one keeps its blocks
    /// until the step under way ends.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let request = self.requests.get_mut(id.slot as usize);
        let Some(request) = request.filter(|r| r.live && r.serial == id.serial && !r.cancelled) else {
            return false;
        };
        if let Some(at) = self.waiting.iter().position(|&slot| slot == id.slot) {
            self.waiting.remove(at);
            self.forget(id.slot);
        } else {
            request.cancelled = true;
            self.leaving += 1;
        }
        true
    }

    /// When something will happen next, if nothing is submitted before.
    pub fn next_event_at(&self) -> Option<Nanos> {
        self.step_ends
    }

    /// Does all that ends until `now`, and included.
    pub fn advance(&mut self, now: Nanos, listener: &mut impl Listener) {
        let skips = !listener.hears_all();
        while let Some(at) = self.step_ends.filter(|&at| at <= now) {
            if skips && self.skip_steps(at, now) {
                continue;
            }
            self.finish_step(at, listener);
            self.schedule(at);
        }
    }

    /// What happened to the cache since the last call, in order; nothing unless [`Engine::recording`].
    pub fn take_changes(&mut self) -> Vec<Change<RequestId>> {
        self.recording.as_mut().map(|recording| std::mem::take(&mut recording.changes)).unwrap_or_default()
    }

    /// Whether [`Engine::take_changes`] has something.
    pub fn has_changes(&self) -> bool {
        self.recording.as_ref().is_some_and(|recording| !recording.changes.is_empty())
    }

    /// Whether a block of this name is cached, wherever in a chain it is; only if [`Engine::recording`].
    pub fn holds(&self, block: BlockHash) -> bool {
        self.recording.as_ref().is_some_and(|recording| recording.holds(block))
    }

    /// Goes on after the caller did not advance it for a while: the step under way ends at `now` or later,
    /// and nothing was done in between.
    pub fn resume(&mut self, now: Nanos) {
        self.step_ends = self.step_ends.map(|at| at.max(now));
    }

    /// Steps scheduled from now on take `factor` times as long.
    pub fn slow_down(&mut self, factor: f64) {
        self.slowdown = factor;
    }

    /// The speed and bounds it was made with, which [`Engine::slow_down`] does not change.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Its KV blocks and the prefix cache over them.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The counters since the engine was made.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Requests that are admitted and hold KV blocks.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests that wait to be admitted, preempted ones among them.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Prompt tokens that are yet to be computed, cached ones left out as far as they are cached now.
    pub fn pending_prefill_tokens(&self) -> u64 {
        let of_waiting = |&slot: &u32| {
            let request = &self.requests[slot as usize];
            let cached = self.pool.cached(&request.chain) as u64 * u64::from(self.profile.block_tokens);
            u64::from(request.prompt_tokens).saturating_sub(cached)
        };
        let of_running = |run: &Running| match self.requests[run.slot as usize].generated {
            0 => u64::from(run.known - run.computed),
            _ => 0,
        };
        self.waiting.iter().map(of_waiting).sum::<u64>() + self.running.iter().map(of_running).sum::<u64>()
    }

    fn finish_step(&mut self, at: Nanos, listener: &mut impl Listener) {
        self.totals.steps += 1;
        let mut running = std::mem::take(&mut self.running);
        running.retain_mut(|run| {
            run.computed += std::mem::take(&mut run.scheduled);
            if self.leaving > 0 && self.requests[run.slot as usize].cancelled {
                self.leaving -= 1;
                self.end(run.slot);
                return false;
            }
            if run.computed < run.known {
                return true;
            }
            run.known += 1;
            self.totals.generated_tokens += 1;
            let request = &mut self.requests[run.slot as usize];
            request.generated += 1;
            request.left -= 1;
            let last = request.left == 0;
            listener.token(Token {
                request: RequestId { slot: run.slot, serial: request.serial },
                at,
                number: request.generated,
                cached_tokens: request.cached_tokens.unwrap_or(0),
                last,
            });
            if last {
                self.end(run.slot);
            }
            !last
        });
        self.running = running;
    }

    /// Puts the next step together, at `at`; without work there is none.
    fn schedule(&mut self, at: Nanos) {
        let (mut work, mut budget) = (StepWork::default(), self.profile.token_budget);
        let mut i = 0;
        let mut preempted = false;
        while i < self.running.len() && budget > 0 {
            let run = &self.running[i];
            let tokens = (run.known - run.computed).min(budget);
            if run.computed + tokens > run.room && !self.make_room(i, tokens, &mut preempted) {
                break; // It was the last, and has given up its own blocks.
            }
            self.run(i, tokens, &mut work);
            budget -= tokens;
            i += 1;
        }
        while !preempted && budget > 0 && self.running.len() < self.profile.running_max as usize {
            match self.waiting.front().copied() {
                Some(slot) if self.admit(slot, &mut budget, &mut work) => _ = self.waiting.pop_front(),
                _ => break,
            }
        }
        self.step_ends = (work.sequences > 0).then(|| {
            let ns = self.profile.cost.of(&work) * self.slowdown;
            at + ns.round() as Nanos
        });
    }

    /// Notes that the next step computes `tokens` of the running request number `i`, and names the blocks it
    /// fills.
    fn run(&mut self, i: usize, tokens: u32, work: &mut StepWork) {
        let run = &mut self.running[i];
        run.scheduled = tokens;
        let request = &mut self.requests[run.slot as usize];
        work.sequences += 1;
        if tokens == 1 && request.generated > 0 {
            work.decodes += 1;
            work.decode_context += u64::from(run.computed);
        } else {
            work.prefill_tokens += u64::from(tokens);
            work.prefill_pairs += pairs(run.computed, tokens);
        }
        let filled = run.computed + tokens;
        if filled < run.name_at {
            return;
        }
        let block_tokens = self.profile.block_tokens;
        let first = run.name_at / block_tokens - 1;
        run.name_at = (filled / block_tokens + 1) * block_tokens;
        let full = (filled / block_tokens).min(request.chain.len() as u32);
        if first >= full {
            return;
        }
        debug_assert_eq!(request.blocks.named(), first, "in order");
        let names = &request.chain[first as usize..full as usize];
        self.pool.name(&mut request.blocks, names);
        if let Some(recording) = &mut self.recording {
            recording.stored(RequestId { slot: run.slot, serial: request.serial }, first, names);
        }
    }

    /// Gives the running request number `i` room for `tokens` more, at the cost of those admitted after it.
    fn make_room(&mut self, i: usize, tokens: u32, preempted: &mut bool) -> bool {
        let block_tokens = self.profile.block_tokens;
        loop {
            let run = &mut self.running[i];
            let missing = (run.computed + tokens).saturating_sub(run.room).div_ceil(block_tokens);
            let there = missing.min(self.pool.available());
            run.room += there * block_tokens;
            let slot = run.slot;
            self.take(slot, there);
            if there == missing {
                return true;
            }
            *preempted = true;
            let Some(victim) = self.running.pop() else { return false };
            self.totals.preemptions += 1;
            self.release(victim.slot);
            self.waiting.push_front(victim.slot);
            if self.running.len() == i {
                return false;
            }
        }
    }

    /// Starts a waiting request if blocks for its first chunk are there.
    fn admit(&mut self, slot: u32, budget: &mut u32, work: &mut StepWork) -> bool {
        let block_tokens = self.profile.block_tokens;
        let request = &mut self.requests[slot as usize];
        let known = request.prompt_tokens + request.generated;
        // The last token is computed always, for its logits.
        let reusable = ((known - 1) / block_tokens) as usize;
        let chain = &request.chain[..reusable.min(request.chain.len())];
        let released = self.pool.find(chain, &mut request.blocks);
        let hits = request.blocks.named();
        let cached = hits * block_tokens;
        let computed = cached.max(request.fetched_tokens);
        let tokens = (known - computed).min(*budget);
        let blocks = (computed + tokens).div_ceil(block_tokens);
        if blocks - hits + released > self.pool.available() {
            request.blocks.clear();
            return false;
        }
        self.pool.claim(&request.blocks);
        if request.cached_tokens.is_none() {
            request.cached_tokens = Some(computed);
            self.totals.queried_tokens += u64::from(known);
            self.totals.hit_tokens += u64::from(cached);
        }
        request.fetched_tokens = 0;
        self.take(slot, blocks - hits);
        self.running.push(Running {
            slot,
            computed,
            known,
            scheduled: 0,
            room: blocks * block_tokens,
            name_at: cached + block_tokens,
        });
        self.run(self.running.len() - 1, tokens, work);
        *budget -= tokens;
        true
    }

    /// Gives a request blocks for what it is to compute, no more than are available.
    fn take(&mut self, slot: u32, count: u32) {
        let (evicted, recording) = (&mut self.totals.evicted_blocks, &mut self.recording);
        self.pool.take(&mut self.requests[slot as usize].blocks, count, |names| {
            *evicted += names.len() as u64;
            if let Some(recording) = recording {
                recording.removed(names);
            }
        });
    }

    fn release(&mut self, slot: u32) {
        self.pool.release(&mut self.requests[slot as usize].blocks);
    }

    fn end(&mut self, slot: u32) {
        self.release(slot);
        self.forget(slot);
    }

    fn forget(&mut self, slot: u32) {
        let request = &mut self.requests[slot as usize];
        request.live = false;
        request.chain = Box::default();
        self.unused.push(slot);
    }
}
