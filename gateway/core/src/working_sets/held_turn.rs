//! A request as a turn of its session, from when it came until it begins: what is asked of the sessions on
//! the way, by the gateway and by a simulator alike.

use std::{cell::Cell, time::Duration};

use super::{Home, KnownBy, Left, NextTurn, WorkingSets};
use crate::candidate::Candidate;

/// A request that waits, as a turn of its session.
#[derive(Debug)]
pub struct HeldTurn {
    session: u64,
    known_by: KnownBy,
    is_first: bool,
    uncached_tokens: f64,
    /// Whether it was found to wait because its session is paused.
    paused: Cell<bool>,
}

impl HeldTurn {
    /// One that has just come.
    pub fn new(session: u64, known_by: KnownBy, is_first: bool) -> Self {
        Self { session, known_by, is_first, uncached_tokens: 0.0, paused: Cell::new(false) }
    }

    /// The session's name.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// What its session is known by.
    pub fn known_by(&self) -> KnownBy {
        self.known_by
    }

    /// Notes how many tokens would be computed where it would go, if its session is new.
    pub fn note_uncached(&mut self, tokens: u64) {
        self.uncached_tokens = tokens as f64;
    }

    /// As the sessions see it: with so many tokens of its prompt, arrived then.
    pub fn next(&self, prompt_tokens: u64, arrived: Duration) -> NextTurn {
        NextTurn {
            session: self.session,
            known_by: self.known_by,
            prompt_tokens: prompt_tokens as f64,
            uncached_tokens: self.uncached_tokens,
            is_first: self.is_first,
            arrived,
        }
    }
}

impl WorkingSets {
    /// What the workers that a request may go to have left for sessions, where pauses pay for one of this
    /// kind; `None` where they do not. `known` is what `look` found for these workers, and must be forgotten
    /// when a turn begins.
    pub fn left_where_it_pays(
        &mut self,
        kind: KnownBy,
        known: &mut Option<Left>,
        look: impl FnOnce(&mut Self) -> Left,
    ) -> Option<Left> {
        let left = *known.get_or_insert_with(|| look(self));
        self.pays(kind, &left).then_some(left)
    }

    /// Until when a request waits because its session is paused, where pauses pay.
    pub fn holds(
        &mut self,
        now: Duration,
        held: &HeldTurn,
        next: &NextTurn,
        left: &Left,
    ) -> Option<Duration> {
        let until = self.waits_until(now, next, left);
        held.paused.set(held.paused.get() || until.is_some());
        until
    }

    /// Notes what of other sessions a turn would displace at each worker.
    pub fn displace(&self, turn: &NextTurn, candidates: &mut [Candidate]) {
        for candidate in candidates {
            candidate.crowded_tokens = self.displaced(candidate.drawn_as, turn);
        }
    }

    /// A request's turn begins at a worker, which computes so many tokens of it. Returns how long it was
    /// paused, if it was.
    pub fn goes_on(
        &mut self,
        now: Duration,
        held: &HeldTurn,
        next: &NextTurn,
        (home, uncached_tokens): (Home, u64),
    ) -> Option<Duration> {
        self.began(now, &NextTurn { uncached_tokens: uncached_tokens as f64, ..*next }, home);
        held.paused.get().then(|| now.saturating_sub(next.arrived))
    }
}
