//! Sessions that wait between two turns: what the gateway asks its working sets at its places
//! (`gateway/src/routing/holding/pauses.rs`), with the simulation's requests and workers.

use std::time::Duration;

use keyway_core::{
    Policy, WorkerId,
    waiting_room::{Ahead, WorkerChooser as _},
    working_sets::{HeldTurn, Home, KnownBy, Left, NextTurn, SetRules, WorkingSets},
};

use super::{
    fleet::{FleetSetup, Workload},
    routing::{Arrival, Clerk},
};
use crate::{args::contender::Contender, random::splitmix};

/// A request's place in its session.
#[derive(Debug, Default)]
pub(super) struct InSession {
    /// The turn of a session that it is, if it is one.
    pub(super) turn: Option<HeldTurn>,
    /// The conversation that it may be the first turn of, if it is no session's.
    opens: Option<u64>,
    /// The session's name, where clients say it.
    pub(super) name: Option<u64>,
}

/// The sessions of a gateway, where it pauses any.
pub(super) fn working_sets(setup: &FleetSetup) -> Option<WorkingSets> {
    let pauses = setup.pauses && setup.hold && setup.policy == Contender::Ours(Policy::Prefix);
    pauses.then(|| WorkingSets::new(SetRules::default()))
}

// === impl InSession ===

impl InSession {
    /// Of a row, as a gateway tells them apart: by the name that a client gives and the conversation's first
    /// message, or by that alone from the second turn on.
    pub(super) fn of(workload: &Workload, setup: &FleetSetup, copy: u64, row: usize) -> Self {
        let Some(links) = &workload.trace.links else { return Self::default() };
        let link = &links[row];
        let session = splitmix(splitmix(copy) ^ u64::from(link.session));
        let conversation = splitmix(session ^ u64::from(link.agent) << 32);
        let (is_first, named) = (link.turn == 0, setup.names_sessions);
        let known_by = if named { KnownBy::Name } else { KnownBy::Opening };
        let is_known = named || !is_first;
        Self {
            turn: is_known.then(|| HeldTurn::new(conversation, known_by, is_first)),
            opens: (!is_known).then_some(conversation),
            name: named.then_some(session),
        }
    }
}

// === impl Clerk ===

impl Clerk<'_, '_> {
    /// The working sets of its gateway.
    fn sets(&mut self) -> Option<&mut WorkingSets> {
        self.run.gateways[self.gateway].sets.as_mut()
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.at)
    }

    fn home(&self, index: usize) -> Home {
        let setup = self.run.setup;
        let worker = setup.legs.prefill + index;
        let knows = setup.index_knows_capacity || setup.events;
        Home {
            worker: WorkerId(worker as u32),
            capacity: knows.then(|| setup.profile.kv_tokens() as f64),
            tokens_per_s: self.run.gateways[self.gateway].tokens_per_ms(worker) * 1e3,
        }
    }

    /// What the workers have left for sessions, where pauses pay for one as the request's.
    fn room_left(&mut self, arrival: &Arrival) -> Option<Left> {
        let known_by = arrival.in_session.turn.as_ref()?.known_by();
        let answering = self.run.setup.workers - self.run.setup.legs.prefill;
        let homes: Vec<_> = (0..answering).map(|i| self.home(i)).collect();
        let (now, others_wait, mut left) = (self.now(), self.others_wait, self.left);
        let look = |sets: &mut WorkingSets| sets.left(now, homes.into_iter(), others_wait);
        let pays = self.sets()?.left_where_it_pays(known_by, &mut left, look);
        self.left = left;
        pays
    }

    /// Notes what a conversation that is new here would add to what others have.
    pub(super) fn note_new(&mut self, arrival: &mut Arrival) {
        let Some(session) = arrival.in_session.turn.as_ref().map(HeldTurn::session) else { return };
        if self.room_left(arrival).is_none() || self.sets().is_none_or(|sets| sets.is_in(session)) {
            return;
        }
        let plan = self.quote(arrival, &Ahead::default());
        if let (Some((_, plan)), Some(turn)) = (plan, &mut arrival.in_session.turn) {
            turn.note_uncached(plan.uncached_tokens);
        }
    }

    /// The turn, if what it displaces of other sessions counts.
    pub(super) fn crowds(&mut self, arrival: &Arrival) -> Option<NextTurn> {
        self.room_left(arrival)?;
        arrival.next_turn()
    }

    /// Until when a turn waits because its session is paused.
    pub(super) fn session_waits_until(&mut self, arrival: &Arrival) -> Option<Duration> {
        let left = self.room_left(arrival)?;
        let (next, turn, now) = (arrival.next_turn()?, arrival.in_session.turn.as_ref()?, self.now());
        self.sets()?.holds(now, turn, &next, &left)
    }

    /// A request's session has its next turn at a worker, which computes so many tokens of it.
    pub(super) fn session_goes_on(&mut self, arrival: &Arrival, index: usize, uncached_tokens: u64) {
        let (now, home) = (self.now(), self.home(index));
        let Some(sets) = self.run.gateways[self.gateway].sets.as_mut() else { return };
        if let (Some(next), Some(turn)) = (arrival.next_turn(), &arrival.in_session.turn) {
            let paused = sets.goes_on(now, turn, &next, (home, uncached_tokens));
            self.left = None;
            self.run.paused(paused);
        } else if let Some(conversation) = arrival.in_session.opens {
            sets.opens(conversation, arrival.prompt_tokens.saturating_sub(uncached_tokens) as f64);
        }
    }
}
