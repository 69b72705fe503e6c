//! Sessions that wait between two turns, where all of them together need more KV cache than the workers have:
//! [`keyway_core::working_sets`] with the gateway's requests and workers.

use std::time::Duration;

use keyway_core::{
    index::WorkerId,
    waiting_room::Ahead,
    working_sets::{EndedTurn, HeldTurn, Home, Left, NextTurn},
};

use super::{Counter, Held, Holding, Roster};
use crate::{fleet::Worker, prompt::request::RequestInfo};

/// A request as a turn of its session; `None` if it belongs to none that is known.
pub(super) fn turn_of(request: &RequestInfo) -> Option<HeldTurn> {
    let (name, known_by) = request.conversation()?;
    Some(HeldTurn::new(name, known_by, !request.talk.goes_on))
}

impl Holding {
    /// A turn of a session has ended.
    pub(in crate::routing) fn turn_ended(&self, now: Duration, turn: &EndedTurn) {
        self.sets.lock().ended(now, turn);
    }

    /// A request has left that waited.
    pub(super) fn turn_leaves(&self, held: &Held) {
        if let Some(turn) = &held.turn {
            self.sets.lock().leaves(turn.session());
        }
    }

    /// What a worker's cache held is gone.
    pub(in crate::routing) fn cache_is_gone(&self, worker: WorkerId) {
        self.sets.lock().lost(worker);
    }

    /// Sessions that have a turn under way, or whose next one is expected.
    pub(in crate::routing) fn sessions(&self) -> usize {
        self.sets.lock().count_in()
    }
}

impl Held {
    /// The turn of its session that it is, if it is one.
    pub(super) fn next_turn(&self) -> Option<NextTurn> {
        Some(self.turn.as_ref()?.next(self.setting.prompt_tokens, self.entered))
    }
}

impl Counter<'_> {
    /// What the workers that a request may go to have left for sessions, where pauses pay for one as its;
    /// `None` where they do not, or it has none.
    fn room_left(&mut self, held: &Held) -> Option<Left> {
        let known_by = held.turn.as_ref().filter(|_| self.pauses)?.known_by();
        let roster = self.roster(&held.setting);
        let Roster { left, candidate_set, workers, worker_of, .. } = &mut self.rosters[roster];
        let mut sets = self.router.holding.sets.lock();
        sets.left_where_it_pays(known_by, left, |sets| {
            let both = worker_of.iter().zip(candidate_set.candidates());
            let homes = both.map(|(&at, candidate)| home(&workers[at], candidate.tokens_per_ms * 1e3));
            sets.left(self.now, homes, self.others_wait)
        })
    }

    /// Notes what a conversation that is new here would add to what others have.
    pub(super) fn note_new(&mut self, held: &mut Held) {
        let Some(name) = held.turn.as_ref().map(HeldTurn::session) else { return };
        if self.room_left(held).is_none() || self.router.holding.sets.lock().is_in(name) {
            return;
        }
        let plan = self.plan(held, &Ahead::default());
        if let (Some(plan), Some(turn)) = (plan, &mut held.turn) {
            turn.note_uncached(plan.pick.uncached_tokens);
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
        self.router.holding.sets.lock().holds(self.now, turn, &next, &left)
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
        let begins_at = (home(worker, tokens_per_s), uncached_tokens);
        let paused = self.router.holding.sets.lock().goes_on(self.now, turn, &next, begins_at);
        self.rosters.iter_mut().for_each(|roster| roster.left = None);
        if let Some(paused) = paused {
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
