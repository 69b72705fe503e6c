//! What a model's requests ask of its workers, followed request by request. [`Demand`] is one request's part
//! of it, from its arrival until its answer's body is gone: undone wherever it ends. Where workers have
//! roles, it is first a demand for prefill and then one for decode (`demand/roles.rs`).

mod full_rate;
mod pool;
mod roles;

use std::{sync::Arc, time::Duration};

use keyway_core::autoscale::Watched;

pub(crate) use self::pool::Pool;
use self::roles::Legs;
use crate::config::Role;

/// Where a request is, and so what it counts as.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    /// No worker has it.
    Unsent,
    /// A worker has it; no first token yet.
    Sent { uncached: u64 },
    /// It has its first token.
    Running { uncached: u64, since: Duration },
}

/// One request's part. Counts until it is dropped.
#[derive(Debug)]
pub struct Demand {
    pool: Option<Arc<Pool>>,
    prompt_tokens: u64,
    /// Tokens of its answer, once they were counted.
    answer_tokens: u64,
    streamed: bool,
    /// Of a stream, whose first token is waited for.
    watched: Option<Watched>,
    stage: Stage,
    /// The workers that it counts at.
    at: Role,
    /// Where the model's workers had roles when it came.
    legs: Option<Box<Legs>>,
}

impl Demand {
    /// A request came: `pool` is its model's; `None`: no pool counts it.
    pub(crate) fn begin(
        pool: Option<Arc<Pool>>,
        prompt_tokens: u64,
        stream: bool,
        arrived: Duration,
    ) -> Self {
        let legs = pool.as_deref().and_then(|pool| Legs::begin(pool, prompt_tokens, arrived));
        let at = legs.as_ref().map_or(Role::Both, |legs| legs.answers());
        let mut watched = None;
        if let Some(pool) = &pool {
            let mut state = pool.of(at);
            state.arrivals.add(arrived, prompt_tokens as f64);
            state.waiting += 1;
            state.unsent_tokens += prompt_tokens as f64;
            watched = if stream { state.ttft.come(arrived) } else { None };
        }
        Self {
            pool,
            prompt_tokens,
            answer_tokens: 0,
            streamed: false,
            watched,
            stage: Stage::Unsent,
            at,
            legs,
        }
    }

    /// It goes to a worker of this role that has to compute this much of it; again, after a worker that gave
    /// no answer.
    pub fn sent(&mut self, uncached: u64, role: Role) {
        let first = self.stage == Stage::Unsent;
        self.leave_stage();
        self.stage = Stage::Sent { uncached };
        if self.legs.is_some() {
            self.is_answered_by(role, uncached);
            self.waits(uncached);
        } else if let Some(pool) = &self.pool {
            let mut state = pool.state.lock();
            state.waiting += 1;
            state.sent_tokens += uncached as f64;
            if first {
                state.learn_share(self.prompt_tokens, uncached);
            }
        }
    }

    /// A stream's first event came.
    pub fn stream_began(&mut self, now: Duration) {
        self.streamed = true;
        if let (Some(pool), Some(watched)) = (&self.pool, self.watched) {
            pool.of(self.at).ttft.first_token(now, watched);
        }
    }

    /// Its prompt is computed, and its answer begins.
    pub fn first_token(&mut self, now: Duration) {
        if let Stage::Sent { uncached } = self.stage {
            self.leave_stage();
            let uncached = if self.legs.is_some() { self.came_through(now) } else { uncached };
            self.stage = Stage::Running { uncached, since: now };
            if let Some(pool) = &self.pool {
                let mut state = pool.of(self.at);
                state.running += 1;
                if self.legs.is_none() {
                    state.full_rate.computed(uncached);
                }
                state.held_tokens += uncached as f64;
            }
        }
    }

    fn leave_stage(&mut self) {
        let Some(pool) = &self.pool else { return };
        let mut state = pool.of(self.at);
        match self.stage {
            Stage::Unsent => {
                state.waiting -= 1;
                state.unsent_tokens -= self.prompt_tokens as f64;
                drop(state);
                if self.legs.is_some() {
                    self.leave_others();
                }
            }
            Stage::Sent { uncached } => {
                state.waiting -= 1;
                state.sent_tokens -= uncached as f64;
            }
            Stage::Running { uncached, .. } => {
                state.running -= 1;
                state.held_tokens -= uncached as f64;
            }
        }
    }
}

impl Demand {
    /// Its answer has so many tokens.
    pub fn answered(&mut self, tokens: u64) {
        self.answer_tokens = tokens;
    }

    /// It ends now; a request that is only dropped does not say when.
    pub fn ended(&self, now: Duration) {
        if let (Some(pool), Stage::Running { since, .. }) = (&self.pool, self.stage) {
            let mut state = pool.of(self.at);
            let ran_s = now.saturating_sub(since).as_secs_f64();
            state.learn_run(ran_s);
            if self.answer_tokens > 1 {
                state.learn_answer(self.answer_tokens);
                // An answer that came in one piece has no time between its tokens.
                if self.streamed {
                    state.itl.add(now, ran_s / (self.answer_tokens - 1) as f64);
                }
            }
        }
    }
}

impl Drop for Demand {
    fn drop(&mut self) {
        self.leave_stage();
        if let (Some(pool), Some(watched)) = (&self.pool, self.watched) {
            let mut state = pool.of(self.at);
            // It is not told the time; the last sum was worked out a second ago at most.
            let now = state.held.at;
            state.ttft.gone(now, watched);
        }
    }
}
