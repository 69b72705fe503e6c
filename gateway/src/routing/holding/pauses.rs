//! Sessions that wait between two turns, where all of them together need more KV cache than the workers have:
//! [`keyway_core::working_sets`] with the gateway's requests and workers.

use std::{cell::Cell, time::Duration};

use keyway_core::{
    index::WorkerId,
    pick::Candidate,
    waiting_room::Ahead,
    working_sets::{EndedTurn, Home, KnownBy, Left, NextTurn},
};

use super::{Counter, Held, Holding, Roster};
use crate::{fleet::Worker, prompt::request::RequestInfo};

/// A request as a turn of its session.
#[derive(Debug)]
pub(super) struct SessionTurn {
    /// The session's conversation.
    name: u64,
    known_by: KnownBy,
    /// Whether it is the first.
    is_first: bool,
    /// Tokens that would be computed where it would go, if the session is new.
    uncached_tokens: f64,
    /// Whether it was found to wait because its session is paused.
    paused: Cell<bool>,
}

impl SessionTurn {
    /// `None` if the request belongs to no session that is known.
    pub(super) fn of(request: &RequestInfo) -> Option<Self> {
        let (name, known_by) = request.conversation()?;
        let is_first = !request.talk.goes_on;
        Some(Self { name, known_by, is_first, uncached_tokens: 0.0, paused: Cell::new(false) })
    }
}

impl Holding {
    /// A turn of a session has ended.
    pub(in crate::routing) fn turn_ended(&self, now: Duration, turn: &EndedTurn) {
        self.sets.lock().ended(now, turn);
    }

    /// What a worker's cache held is gone.
    pub(in crate::routing) fn cache_is_gone(&self, worker: WorkerId) {
        self.sets.lock().lost(worker);
    }

    /// Sessions that have a turn under way, or whose next one is expected.
    pub(in crate::routing) fn sessions(&self) -> usize {
        self.sets.lock().count_in()
    }

    /// Notes what of other sessions a turn would displace at each worker.
    pub(super) fn displace(&self, turn: &NextTurn, candidates: &mut [Candidate]) {
        let sets = self.sets.lock();
        for candidate in candidates {
            candidate.crowded_tokens = sets.displaced(candidate.drawn_as, turn);
        }
    }
}

impl Held {
    /// The turn of its session that it is, if it is one.
    pub(super) fn next_turn(&self) -> Option<NextTurn> {
        let SessionTurn { name, known_by, is_first, uncached_tokens, .. } = self.turn.as_ref()?;
        Some(NextTurn {
            session: *name,
            known_by: *known_by,
            prompt_tokens: self.setting.prompt_tokens as f64,
            uncached_tokens: *uncached_tokens,
            is_first: *is_first,
            arrived: self.entered,
        })
    }
}

impl Counter<'_> {
    /// What the workers that a request may go to have left for sessions, where pauses pay for one as its;
    /// `None` where they do not, or it has none.
    fn room_left(&mut self, held: &Held) -> Option<Left> {
        let known_by = held.turn.as_ref().filter(|_| self.pauses)?.known_by;
        let roster = self.roster(&held.setting);
        let Roster { left, candidate_set, workers, worker_of, .. } = &mut self.rosters[roster];
        let mut sets = self.router.holding.sets.lock();
        let left = left.get_or_insert_with(|| {
            let both = worker_of.iter().zip(candidate_set.candidates());
            let homes = both.map(|(&at, candidate)| home(&workers[at], candidate.tokens_per_ms * 1e3));
            sets.left(self.now, homes, self.others_wait)
        });
        sets.pays(known_by, left).then_some(*left)
    }

    /// Notes what a conversation that is new here would add to what others have.
    pub(super) fn note_new(&mut self, held: &mut Held) {
        let Some(name) = held.turn.as_ref().map(|turn| turn.name) else { return };
        if self.room_left(held).is_none() || self.router.holding.sets.lock().is_in(name) {
            return;
        }
        let plan = self.plan(held, &Ahead::default());
        if let (Some(plan), Some(turn)) = (plan, &mut held.turn) {
            turn.uncached_tokens = plan.pick.uncached_tokens as f64;
        }
    }

    /// The turn, if what it displaces of other sessions counts.
    pub(super) fn crowds(&mut self, held: &Held) -> Option<NextTurn> {
        self.room_left(held)?;
        held.next_turn()
    }

    /// Until when a turn waits because its session is paused.
    pub(super) fn session_waits_until(&mut self, held: &Held) -> Option<Duration> {
        let left = self.room_left(held)?;
        let (next, turn) = (held.next_turn()?, held.turn.as_ref()?);
        let until = self.router.holding.sets.lock().waits_until(self.now, &next, &left);
        turn.paused.set(turn.paused.get() || until.is_some());
        until
    }

    /// A request's session has its next turn at a worker.
    pub(super) fn session_goes_on(
        &mut self,
        held: &Held,
        worker: &Worker,
        tokens_per_s: f64,
        uncached_tokens: u64,
    ) {
        if !self.pauses {
            return;
        }
        let (Some(next), Some(turn)) = (held.next_turn(), &held.turn) else {
            if let Some(conversation) = held.opens {
                let found = held.setting.prompt_tokens.saturating_sub(uncached_tokens);
                self.router.holding.sets.lock().opens(conversation, found as f64);
            }
            return;
        };
        let next = NextTurn { uncached_tokens: uncached_tokens as f64, ..next };
        self.router.holding.sets.lock().began(self.now, &next, home(worker, tokens_per_s));
        self.rosters.iter_mut().for_each(|roster| roster.left = None);
        if turn.paused.get() {
            let paused = self.now.saturating_sub(held.entered);
            self.router.metrics.session_pause.observe(paused.as_secs_f64());
        }
    }
}

/// A worker as sessions see it.
fn home(worker: &Worker, tokens_per_s: f64) -> Home {
    let capacity = worker.residency.capacity.lock().whole().map(|tokens| tokens as f64);
    Home { worker: worker.id, capacity, tokens_per_s }
}

#[cfg(test)]
mod tests;
