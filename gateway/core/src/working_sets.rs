//! Which sessions may go on where all of them together need more KV than the fleet has.
//!
//! Agents ask turn after turn, each with the whole conversation so far. As long as the caches hold what all
//! active sessions will ask for again, a turn costs what it adds. Above that each session evicts the others',
//! every turn is computed anew, and the fleet does a fraction of what it could: a cliff. So whole sessions
//! are paused between two turns, and the others go on with their caches.
//!
//! - **In and out:** a session is *in* from its first turn until its lease ends, which is as long as its next
//!   turn usually takes to come (`habit.rs`). The tokens of those that are in count at the worker where they
//!   are. One that is *out* comes in where it fits, or waits.
//! - **Order:** who began first comes in first, and is not sent out before those that began later
//!   (`queue.rs`). So sessions end one after the other, and none is begun, forgotten and begun again.
//! - **Growth:** sessions grow. Where those of a worker come to more than it holds, the one that began last
//!   has to go: its turn under way goes on, its next one waits. So sessions come in only below that, with
//!   room to grow ([`SetRules::fill`]).
//! - **Coming back:** it costs a prefill of all of a session's past. So that the workers have time for the
//!   others, only a part of it may go to that ([`SetRules::returns`]); sessions that are out wait until then.
//! - **Turns:** none waits longer than [`SetRules::longest_pause`]. Then it comes in, and the one that has
//!   been in for longest goes out: where there are far too many, they take turns, each with many turns in a
//!   row.
//! - **Only where it pays:** as long as the fleet could compute all prompts from their first token on, no
//!   session waits. Nor where sessions take their time: caches that wait for people who read serve fewer of
//!   them than prompts that are computed anew ([`WorkingSets::pays`]).
//!
//! After Kang et al., "ThunderAgent" (arXiv 2602.13692), where an agent program is paused between tools.

mod habit;
mod held_turn;
mod left;
mod openings;
mod queue;
mod room;

use std::time::Duration;

use self::{habit::Habit, openings::Openings, queue::Queues, room::Room};
pub use self::{held_turn::HeldTurn, left::Left};
use crate::index::WorkerId;
use crate::spread_map::SpreadMap;

/// Sessions that are remembered; beyond, the half of them that was heard of least recently is forgotten.
const SESSIONS_MAX: usize = 65_536;
/// How often it is looked at whose lease is over.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How many sessions may be in, and for how long others wait.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SetRules {
    /// The share of a worker's cache that sessions may have; the rest is for what is being computed, for
    /// sessions that have ended but are still there, and for requests of no session.
    pub share: f64,
    /// The share of that up to which sessions come in: those that are in grow.
    pub fill: f64,
    /// The share of the workers' prefill rate that may go to sessions that come back in, whose past is
    /// computed anew.
    pub returns: f64,
    /// The longest that a session waits between two turns.
    pub longest_pause: Duration,
    /// The longest that a session that says nothing is waited for.
    pub longest_lease: Duration,
    /// The share of the fleet's prefill rate from which on pauses may pay: what sessions ask for, all of it
    /// computed anew.
    pub pays_from: f64,
    /// The same while requests wait for a worker: what is asked is then no more than what is computed.
    pub pays_from_behind: f64,
    /// How many times as many tokens the caches have to serve as the fleet can compute, for pauses to pay.
    /// Without pauses some of a turn's past is found as well: with half of it, twice as many.
    pub turnover: f64,
}

impl Default for SetRules {
    fn default() -> Self {
        Self {
            share: 0.88,
            fill: 0.9,
            returns: 0.3,
            longest_pause: Duration::from_secs(60),
            longest_lease: Duration::from_secs(60),
            pays_from: 0.7,
            pays_from_behind: 0.4,
            turnover: 1.25,
        }
    }
}

/// By what a session is known. Some are never heard of again: whether those of a kind come back is learned
/// for each kind apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KnownBy {
    /// An agent's own name for it.
    Name,
    /// A key or a user, with the conversation's first message.
    Key,
    /// The conversation's first message alone.
    Opening,
}

/// A session's next turn, which asks to begin.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NextTurn {
    /// The session's name.
    pub session: u64,
    /// What it is from.
    pub known_by: KnownBy,
    /// Tokens of the prompt.
    pub prompt_tokens: f64,
    /// Of these, those that were not found where it would go.
    pub uncached_tokens: f64,
    /// Whether it is the session's first.
    pub is_first: bool,
    /// When it came.
    pub arrived: Duration,
}

/// A turn that has ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EndedTurn {
    /// The session's name.
    pub session: u64,
    /// Tokens of its conversation now, as far as is known.
    pub conversation_tokens: f64,
    /// When its answer's first token came, if that was seen.
    pub first_token: Option<Duration>,
}

/// A worker that a turn may go to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Home {
    /// Its name.
    pub worker: WorkerId,
    /// Tokens that its cache holds; `None`: unknown, and then it has room for all.
    pub capacity: Option<f64>,
    /// Prompt tokens that it computes in a second.
    pub tokens_per_s: f64,
}

/// The sessions, and what they take of each worker.
#[derive(Debug)]
pub struct WorkingSets {
    rules: SetRules,
    sessions: SpreadMap<u64, Session>,
    rooms: SpreadMap<WorkerId, Room>,
    openings: Openings,
    queues: Queues,
    /// By kind of session.
    habits: [Habit; 3],
    /// When the next lease ends, at the earliest.
    next_end: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Session {
    known_by: KnownBy,
    home: WorkerId,
    /// Tokens of its prompts that others have too: they are no part of what it needs.
    shared: f64,
    /// Tokens that its next turn begins with, without these.
    tokens: f64,
    is_in: bool,
    in_flight: u32,
    /// When its first turn came that is known.
    since: Duration,
    /// When its last turn began.
    began: Duration,
    /// When its last turn ended.
    ended: Duration,
    /// Until when its next turn is waited for.
    lease: Duration,
}

impl WorkingSets {
    /// No session yet.
    pub fn new(rules: SetRules) -> Self {
        Self {
            rules,
            sessions: SpreadMap::default(),
            rooms: SpreadMap::default(),
            openings: Openings::default(),
            queues: Queues::default(),
            habits: Default::default(),
            next_end: Duration::MAX,
        }
    }

    /// Goes by other rules from now on.
    pub fn set_rules(&mut self, rules: SetRules) {
        self.rules = rules;
    }

    /// Sessions that are in.
    pub fn count_in(&self) -> usize {
        self.rooms.values().map(|room| room.inside.len()).sum()
    }

    /// Whether a session is in: its turns begin as they come.
    pub fn is_in(&self, session: u64) -> bool {
        self.sessions.get(&session).is_some_and(|session| session.is_in)
    }

    /// Tokens that sessions take of a worker.
    pub fn taken(&self, worker: WorkerId) -> f64 {
        self.rooms.get(&worker).map_or(0.0, |room| room.taken)
    }

    /// Tokens that a worker has left for a session that is not there; infinitely many where no session is.
    pub fn free(&self, worker: WorkerId) -> f64 {
        self.rooms.get(&worker).map_or(f64::INFINITY, |room| room.free(&self.rules))
    }

    /// Tokens that will be computed again if a turn goes to a worker: what it displaces of other sessions
    /// there, and, of a session that is in elsewhere, what it has there. The index may have lost sight of
    /// that: while sessions evicted each other's, it learned that caches hold little.
    pub fn displaced(&self, worker: WorkerId, turn: &NextTurn) -> f64 {
        let own = self.sessions.get(&turn.session).filter(|own| own.is_in);
        let (here, elsewhere) = match own {
            Some(own) if own.home == worker => (own.tokens, 0.0),
            Some(own) => (0.0, own.tokens),
            None => (0.0, 0.0),
        };
        let need = self.need(turn);
        elsewhere + (need - self.free(worker) - here).clamp(0.0, need)
    }

    /// Tokens that a turn needs at a worker for itself.
    fn need(&self, turn: &NextTurn) -> f64 {
        let own = |shared: f64| (turn.prompt_tokens - shared).max(0.0);
        let known = self.sessions.get(&turn.session);
        known.map_or_else(|| own(self.shared(turn)), |session| own(session.shared).max(session.tokens))
    }

    /// Tokens that a session that is new shares with others. What a later turn than its first finds is its
    /// own past as well.
    fn shared(&self, turn: &NextTurn) -> f64 {
        let found = (turn.prompt_tokens - turn.uncached_tokens).max(0.0);
        if turn.is_first { found } else { self.openings.of(turn.session).min(found) }
    }

    /// A conversation begins whose later turns are a session's: it found so many tokens of its prompt.
    pub fn opens(&mut self, conversation: u64, found_tokens: f64) {
        self.openings.shared(found_tokens);
        self.openings.remember(conversation, found_tokens);
    }

    /// A turn that waited is gone.
    pub fn leaves(&mut self, session: u64) {
        self.queues.leave(session);
    }

    /// A turn begins at a worker.
    pub fn began(&mut self, now: Duration, turn: &NextTurn, home: Home) {
        if self.sessions.len() >= SESSIONS_MAX && !self.sessions.contains_key(&turn.session) {
            self.forget_half();
        }
        self.queues.leave(turn.session);
        let comes_back = self.sessions.get(&turn.session).is_some_and(|session| !session.is_in);
        let (rules, gap_s) = (self.rules, self.habits[turn.known_by as usize].mean_s);
        let room = self.room(home);
        room.asked.add(turn.prompt_tokens, now);
        if comes_back {
            room.came_back(now, &rules, turn.uncached_tokens, gap_s);
        }
        let moves = self.sessions.get(&turn.session).is_some_and(|session| session.home != home.worker);
        if moves {
            self.send_out(turn.session);
        }
        let fresh = Session {
            known_by: turn.known_by,
            home: home.worker,
            shared: self.shared(turn),
            tokens: 0.0,
            is_in: false,
            in_flight: 0,
            since: turn.arrived,
            began: now,
            ended: Duration::MAX,
            lease: Duration::MAX,
        };
        if turn.is_first {
            self.openings.shared(fresh.shared);
        }
        let session = self.sessions.entry(turn.session).or_insert(fresh);
        let after = turn.arrived.checked_sub(session.ended).filter(|_| session.in_flight == 0);
        if let Some(after) = after.filter(|after| *after <= self.rules.longest_lease) {
            self.habits[turn.known_by as usize].returned(now, after.as_secs_f64());
        }
        session.in_flight += 1;
        (session.lease, session.home, session.began) = (Duration::MAX, home.worker, now);
        let had = if session.is_in { session.tokens } else { 0.0 };
        session.tokens = (turn.prompt_tokens - session.shared).max(session.tokens);
        let (more, comes_in) = (session.tokens - had, !std::mem::replace(&mut session.is_in, true));
        let room = self.room(home);
        room.add(more);
        if comes_in {
            room.inside.push(turn.session);
        }
        let waited = now.saturating_sub(turn.arrived) >= self.rules.longest_pause;
        self.make_room(home.worker, waited.then_some(turn.session));
    }

    /// A turn that had begun has ended.
    pub fn ended(&mut self, now: Duration, turn: &EndedTurn) {
        let Some(known) = self.sessions.get_mut(&turn.session) else { return };
        let habit = &mut self.habits[known.known_by as usize];
        habit.ended.add(1.0, now);
        known.in_flight = known.in_flight.saturating_sub(1);
        known.ended = now;
        let since = |then: Duration| now.saturating_sub(then).as_secs_f64();
        let mut lease = now;
        if let Some(room) = self.rooms.get_mut(&known.home) {
            room.answered(since(turn.first_token.unwrap_or(known.began)), since(known.began));
            lease = now + habit.lease(now, (&self.rules, room));
        }
        if known.in_flight == 0 {
            known.lease = lease;
            if lease <= now {
                return self.send_out(turn.session);
            }
            self.next_end = self.next_end.min(lease);
        }
        let grown = (turn.conversation_tokens - known.shared - known.tokens).max(0.0);
        known.tokens += grown;
        let (home, is_in) = (known.home, known.is_in);
        if let Some(room) = self.rooms.get_mut(&home).filter(|_| is_in) {
            room.add(grown);
            self.make_room(home, None);
        }
    }

    /// A worker is gone, or its cache is: what sessions had there they have no more.
    pub fn lost(&mut self, worker: WorkerId) {
        self.rooms.remove(&worker);
        for session in self.sessions.values_mut().filter(|session| session.home == worker) {
            session.is_in = false;
        }
    }

    fn room(&mut self, home: Home) -> &mut Room {
        let room = self.rooms.entry(home.worker).or_insert_with(|| Room::new(home));
        room.home = home;
        room
    }

    /// Takes a session out of the room that it is in.
    fn send_out(&mut self, name: u64) {
        let Some(session) = self.sessions.get_mut(&name) else { return };
        let was_in = std::mem::replace(&mut session.is_in, false);
        if let Some(room) = self.rooms.get_mut(&session.home).filter(|_| was_in) {
            room.add(-session.tokens);
            room.inside.retain(|other| *other != name);
        }
    }

    /// Sends sessions of a worker out until the rest fits: the last that began, or, where one has waited for
    /// as long as may be (`keeps`), the one that has been in for longest. One always stays.
    fn make_room(&mut self, worker: WorkerId, keeps: Option<u64>) {
        while let Some(room) = self.rooms.get(&worker) {
            let fits = room.most(&self.rules).is_none_or(|most| room.taken <= most);
            if fits || room.inside.len() < 2 {
                return;
            }
            let goes = match keeps {
                Some(name) => room.inside.iter().find(|other| **other != name),
                None => room.inside.iter().max_by_key(|name| self.sessions.get(name).map(|one| one.since)),
            };
            let Some(&goes) = goes else { return };
            self.send_out(goes);
        }
    }

    /// Sends those out whose next turn is waited for no longer.
    fn end_leases(&mut self, now: Duration) {
        if now < self.next_end {
            return;
        }
        let (mut over, mut next) = (Vec::new(), Duration::MAX);
        for name in self.rooms.values().flat_map(|room| &room.inside) {
            match self.sessions.get(name).map(|session| session.lease) {
                Some(lease) if lease > now => next = next.min(lease),
                _ => over.push(*name),
            }
        }
        for name in over {
            self.send_out(name);
        }
        // Leases that end close together end together, so that not each of many looks at all.
        self.next_end = next.max(now + LOOK_EVERY);
    }

    /// Forgets those that were heard of least recently and have nothing under way.
    fn forget_half(&mut self) {
        let idle = self.sessions.values().filter(|session| session.in_flight == 0);
        let mut ended: Vec<Duration> = idle.map(|session| session.ended).collect();
        if ended.is_empty() {
            return;
        }
        let middle = ended.len() / 2;
        let (_, &mut limit, _) = ended.select_nth_unstable(middle);
        let is_old = |session: &&Session| session.in_flight == 0 && session.ended <= limit;
        let old = self.sessions.iter().filter(|(_, session)| is_old(session)).map(|(name, _)| *name);
        for name in old.collect::<Vec<_>>() {
            self.send_out(name);
            self.sessions.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests;
