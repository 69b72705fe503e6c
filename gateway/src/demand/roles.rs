//! A model whose workers have roles has three demands: on workers for prefill, for decode, and for both. A
//! request is in one of them at a time. To which workers it goes is known only when it is sent. So what
//! arrives is told to all three, and each learns which share of it comes to it, as it learns what caches
//! hold.

use std::{
    sync::atomic::{AtomicU8, Ordering::Relaxed},
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};

use super::{
    Demand, Stage,
    pool::{Pool, PoolState},
};
use crate::config::{Role, ScaleConfig};

const ALL: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

/// The demands on workers for a part of requests.
#[derive(Debug)]
pub(super) struct Roles {
    prefill: Mutex<PoolState>,
    decode: Mutex<PoolState>,
    /// Uncached tokens from which on a prompt is for a worker for prefill.
    prefill_from_tokens: u64,
    /// The roles of which there are workers, or for which the operator has rules: a bit for each of [`ALL`].
    known: AtomicU8,
}

/// What a request has been to workers of several roles.
#[derive(Debug, Clone, Copy)]
pub(super) struct Legs {
    /// When it came.
    arrived: Duration,
    /// Whose workers it waited for at first.
    waits_for: Role,
    /// Whose workers answer it: those for decode, or for both.
    answers: Role,
    /// What that worker would have had to compute, and holds in the end.
    own_uncached: u64,
    /// What a worker for prefill has computed, or was to.
    elsewhere: Option<u64>,
    /// Whether what became of it was learned.
    is_learned: bool,
}

impl Legs {
    /// Of a request that has just come and waits for a worker that answers; `None` where workers have no
    /// roles. Tells the demands that do not count it that it came.
    pub(super) fn begin(pool: &Pool, prompt_tokens: u64, arrived: Duration) -> Option<Box<Self>> {
        pool.roles.get()?;
        let answers = pool.answers();
        for role in ALL.into_iter().filter(|role| *role != answers) {
            let mut state = pool.of(role);
            state.arrivals.add(arrived, prompt_tokens as f64);
            state.unsent_tokens += prompt_tokens as f64;
        }
        Some(Box::new(Self {
            arrived,
            waits_for: answers,
            answers,
            own_uncached: 0,
            elsewhere: None,
            is_learned: false,
        }))
    }

    /// Whose workers answer it.
    pub(super) fn answers(&self) -> Role {
        self.answers
    }
}

impl Demand {
    /// Another worker than the one that answers computes its prompt: until then it is a demand for prefill.
    pub fn computes_elsewhere(&mut self) {
        let Stage::Sent { uncached } = self.stage else { return };
        if self.legs.is_none() || self.at == Role::Prefill {
            return;
        }
        self.leave_stage();
        self.goes_to_prefill(uncached);
        self.stage = Stage::Sent { uncached };
        self.waits(uncached);
    }

    /// Its prompt is computed, of which so many tokens were found cached: from now on it is a demand for
    /// decode.
    pub fn hand_over(&mut self, cached_tokens: u64, now: Duration) {
        let computed = self.prompt_tokens.saturating_sub(cached_tokens);
        let (Some(pool), Some(legs), Stage::Sent { .. }) = (&self.pool, &mut self.legs, self.stage) else {
            return;
        };
        if self.at != Role::Prefill {
            return;
        }
        legs.elsewhere = Some(computed);
        let answers = legs.answers;
        {
            let mut state = pool.of(Role::Prefill);
            state.full_rate.computed(computed);
            if let Some(watched) = self.watched {
                state.ttft.first_token(now, watched);
            }
        }
        // What is left of the time to first token is the other workers'.
        self.watched = self.watched.and_then(|_| pool.of(answers).ttft.come(now));
        self.leave_stage();
        (self.at, self.stage) = (answers, Stage::Sent { uncached: 0 });
        self.waits(0);
    }

    /// A worker of this role is to answer it.
    pub(super) fn is_answered_by(&mut self, role: Role, uncached: u64) {
        let (Some(pool), Some(legs)) = (self.pool.clone(), &mut self.legs) else { return };
        let answers = if role == Role::Both { Role::Both } else { Role::Decode };
        (legs.answers, legs.own_uncached, legs.elsewhere) = (answers, uncached, None);
        self.moves(answers);
        if pool.lacks_prefill(role, uncached) {
            self.goes_to_prefill(uncached);
        }
    }

    /// Its answer begins: what workers of each role had to do with it is learned. Returns what the one that
    /// answers holds of its prompt.
    pub(super) fn came_through(&mut self, now: Duration) -> u64 {
        let (Some(pool), Some(legs)) = (self.pool.clone(), &mut self.legs) else { return 0 };
        let (answers, own, elsewhere) = (legs.answers, legs.own_uncached, legs.elsewhere);
        if self.at == Role::Prefill {
            // The other worker has done what these should have: it was no time of its own.
            if let Some(watched) = self.watched.take() {
                pool.of(Role::Prefill).ttft.first_token(now, watched);
            }
            self.at = answers;
        }
        let own_computed = if elsewhere.is_some() { 0 } else { own };
        if !std::mem::replace(&mut legs.is_learned, true) {
            for role in ALL {
                let computed = match role {
                    Role::Prefill => elsewhere.unwrap_or(0),
                    _ if role == answers => own_computed,
                    _ => 0,
                };
                let had_part = role == answers || (role == Role::Prefill && elsewhere.is_some());
                pool.of(role).learn_part(self.prompt_tokens, computed, had_part);
            }
        }
        pool.of(answers).full_rate.computed(own_computed);
        own
    }

    /// It has left the room of those that no worker has, in which it was for all.
    pub(super) fn leave_others(&self) {
        let (Some(pool), Some(legs)) = (&self.pool, &self.legs) else { return };
        for role in ALL.into_iter().filter(|role| *role != legs.waits_for) {
            pool.of(role).unsent_tokens -= self.prompt_tokens as f64;
        }
    }

    fn goes_to_prefill(&mut self, uncached: u64) {
        if let Some(legs) = &mut self.legs {
            legs.elsewhere = Some(uncached);
        }
        self.moves(Role::Prefill);
    }

    /// It counts at workers of another role from now on, whose it is how long it waits.
    fn moves(&mut self, to: Role) {
        let (Some(pool), Some(legs)) = (&self.pool, &self.legs) else { return };
        if self.at == to {
            return;
        }
        if let Some(watched) = self.watched.take() {
            pool.of(self.at).ttft.leave(watched);
            self.watched = pool.of(to).ttft.come(legs.arrived);
        }
        self.at = to;
    }

    /// It has come to the workers that it counts at.
    pub(super) fn waits(&self, uncached: u64) {
        if let Some(pool) = &self.pool {
            let mut state = pool.of(self.at);
            state.waiting += 1;
            state.sent_tokens += uncached as f64;
            state.came = true;
        }
    }
}

impl Pool {
    /// From now on the model's workers have roles, and this is one of them. Returns whether it is the first.
    pub(crate) fn has_role(&self, scale: &ScaleConfig, role: Role) -> bool {
        let mut is_news = false;
        let roles = self.roles.get_or_init(|| {
            is_news = true;
            self.state.lock().by_role = true;
            // Until workers for decode are seen to compute prompts, these are for others.
            let state = |role, share| {
                let mut state = PoolState::new(scale.of(&self.model, Some(role)));
                (state.by_role, state.uncached_share) = (true, share);
                Mutex::new(state)
            };
            Roles {
                prefill: state(Role::Prefill, 1.0),
                decode: state(Role::Decode, 0.0),
                prefill_from_tokens: scale.prefill_from_tokens,
                known: AtomicU8::new(0),
            }
        });
        roles.known.fetch_or(1 << role as u8, Relaxed);
        is_news
    }

    /// The roles that have a sum of their own; `None` where workers have no roles, and there is one for all.
    pub(crate) fn parts(&self) -> Vec<Option<Role>> {
        let Some(roles) = self.roles.get() else { return vec![None] };
        let known = roles.known.load(Relaxed);
        ALL.into_iter().filter(|role| known & (1 << *role as u8) != 0).map(Some).collect()
    }

    /// Whose workers a request waits for that has none: those who answer.
    pub(crate) fn answers(&self) -> Role {
        if self.roles.get().is_none() {
            return Role::Both;
        }
        let has = |role| self.of(role).last.is_some_and(|(seen, _)| seen.ready + seen.starting > 0);
        if !has(Role::Decode) && has(Role::Both) { Role::Both } else { Role::Decode }
    }

    /// The demand on workers of a role; on all of them where they have none.
    pub(crate) fn of(&self, role: Role) -> MutexGuard<'_, PoolState> {
        match (self.roles.get(), role) {
            (Some(roles), Role::Prefill) => roles.prefill.lock(),
            (Some(roles), Role::Decode) => roles.decode.lock(),
            _ => self.state.lock(),
        }
    }

    /// Whether a prompt is one that a worker for prefill would compute if there were any: that is what asks
    /// for the first one.
    fn lacks_prefill(&self, role: Role, uncached: u64) -> bool {
        let is_long = |roles: &Roles| role == Role::Decode && uncached >= roles.prefill_from_tokens;
        self.roles.get().is_some_and(is_long)
            && self.of(Role::Prefill).last.is_none_or(|(seen, _)| seen.ready == 0)
    }
}
