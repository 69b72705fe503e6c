//! A limit on how many requests may be in flight at once that several gateways keep together. Each holds
//! slots of it, some ahead of need; those of a gateway that says nothing any more come back.

use std::time::Duration;

use crate::{lease::Dry, recent_use::RecentUse};

/// For how long a store that had no slot is believed: answers end all the time.
const BELIEVED: Duration = Duration::from_millis(100);

/// What a request is told that found no slot.
const COME_BACK_IN: Duration = Duration::from_secs(1);

/// What one gateway has of a limit on requests in flight.
#[derive(Debug)]
pub struct Slots {
    most: usize,
    held: usize,
    /// What it is to hold, where that is less: what it may be using is not taken from it.
    target: usize,
    /// Requests that found none here, since the last question.
    needed: usize,
    asking: bool,
    recent: RecentUse,
    /// Slots that nobody held, and when the store said so.
    free: Option<(usize, Duration)>,
}

/// What a gateway says to the store of its slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotsQuestion {
    /// Slots that it keeps in any case.
    pub kept: usize,
    /// Requests in flight here, and those that wait for a slot.
    pub need: usize,
    /// Slots that it wants besides.
    pub ahead: usize,
}

/// What the store says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotsAnswer {
    /// Slots that this gateway is to hold. Those that it kept are its own until it says otherwise.
    pub held: usize,
    /// Those that nobody holds.
    pub free: usize,
}

impl Slots {
    /// At most so many at once in all gateways together, of which none is here yet.
    pub fn at_most(most: usize, now: Duration) -> Self {
        Self { most, held: 0, target: 0, needed: 0, asking: false, recent: RecentUse::new(now), free: None }
    }

    /// How many requests may be in flight at once.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Whether one more may begin beside those in flight.
    pub fn has_one(&mut self, in_flight: usize, now: Duration) -> Result<(), Dry> {
        if in_flight < self.held {
            return Ok(());
        }
        let known = self.free.is_some_and(|(free, at)| free == 0 && now.saturating_sub(at) < BELIEVED);
        if known && !self.asking {
            return Err(Dry::Wait(COME_BACK_IN));
        }
        self.needed += 1;
        self.recent.wants(now);
        Err(Dry::Ask)
    }

    /// One more has begun.
    pub fn begins(&mut self, now: Duration) {
        self.recent.uses(1.0, now);
    }

    /// Whether one more may begin while the store is away: as far as this gateway's part, or what it held,
    /// goes.
    pub fn has_part(&self, in_flight: usize, gateways: usize) -> Result<(), Duration> {
        let part = (self.most / gateways.max(1)).max(1);
        if in_flight < part.max(self.held) { Ok(()) } else { Err(COME_BACK_IN) }
    }

    /// Whether nobody has asked for anything lately, and no slot is held.
    pub fn rests(&self, now: Duration) -> bool {
        self.recent.rests(now) && self.held == 0 && !self.asking
    }

    /// What to say to the store now.
    pub fn ask(&mut self, in_flight: usize, now: Duration) -> SlotsQuestion {
        let need = in_flight + std::mem::take(&mut self.needed);
        let ahead = (self.recent.ahead(now) as usize).min(self.most);
        // What is given back is not there for requests in the meantime.
        self.held = self.held.min(self.target).min(need + ahead).max(in_flight);
        self.asking = true;
        SlotsQuestion { kept: self.held, need, ahead }
    }

    /// The store has answered.
    pub fn take_answer(&mut self, answer: SlotsAnswer, now: Duration) {
        self.target = answer.held;
        self.held = self.held.max(answer.held);
        self.free = Some((answer.free, now));
        self.asking = false;
    }

    /// The store has not answered.
    pub fn gets_no_answer(&mut self) {
        self.asking = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_finds_no_slot_asks_for_one_and_believes_that_there_is_none() {
        let at = Duration::from_millis;
        let mut slots = Slots::at_most(4, at(0));
        assert_eq!(slots.has_one(0, at(0)), Err(Dry::Ask));
        assert_eq!(slots.ask(0, at(0)), SlotsQuestion { kept: 0, need: 1, ahead: 1 });
        slots.take_answer(SlotsAnswer { held: 1, free: 0 }, at(1));
        assert!(slots.has_one(0, at(1)).is_ok());
        slots.begins(at(1));
        assert_eq!(slots.has_one(1, at(50)), Err(Dry::Wait(COME_BACK_IN)));
        assert_eq!(slots.has_one(1, at(150)), Err(Dry::Ask), "one may have come back");
    }

    #[test]
    fn slots_are_given_back_when_nothing_needs_them() {
        let at = Duration::from_secs;
        let mut slots = Slots::at_most(4, at(0));
        slots.begins(at(0));
        slots.ask(1, at(0));
        slots.take_answer(SlotsAnswer { held: 2, free: 2 }, at(0));
        assert!(slots.has_one(1, at(1)).is_ok() && !slots.rests(at(9)));
        assert_eq!(slots.ask(1, at(9)), SlotsQuestion { kept: 1, need: 1, ahead: 0 });
        assert!(slots.has_one(1, at(9)).is_err(), "it is on its way back");
        slots.take_answer(SlotsAnswer { held: 1, free: 3 }, at(9));
        assert!(!slots.rests(at(20)), "one is in flight");
        // The first question still has the request that found none.
        for _ in 0..2 {
            slots.ask(0, at(20));
            slots.take_answer(SlotsAnswer { held: 0, free: 4 }, at(20));
        }
        assert!(slots.rests(at(20)));
    }

    #[test]
    fn what_may_be_in_use_is_given_back_by_who_has_it() {
        let at = Duration::from_millis;
        let mut slots = Slots::at_most(16, at(0));
        slots.begins(at(0));
        slots.ask(1, at(0));
        slots.take_answer(SlotsAnswer { held: 6, free: 4 }, at(1));
        // The question says one, and four more begin before its answer.
        for _ in 0..8 {
            slots.begins(at(40));
        }
        let kept = slots.ask(1, at(50)).kept;
        assert!(kept > 1);
        slots.take_answer(SlotsAnswer { held: 2, free: 0 }, at(51));
        assert!(slots.has_one(kept - 1, at(51)).is_ok(), "the store counts what was kept");
        assert_eq!(slots.ask(1, at(100)).kept, 2);
        assert!(slots.has_one(2, at(100)).is_err());
    }

    #[test]
    fn while_the_store_is_away_each_gateway_has_its_part() {
        let slots = Slots::at_most(9, Duration::ZERO);
        assert!(slots.has_part(3, 2).is_ok() && slots.has_part(4, 2).is_err());
        assert!(slots.has_part(0, 100).is_ok() && slots.has_part(1, 100).is_err());
    }
}
