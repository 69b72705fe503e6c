//! One limit of a tenant: kept by this gateway alone, or together with others by a store.

use std::time::Duration;

use keyway_core::{Dry, Lease, RateLimit, Slots, Standing};

use crate::{
    error::Error,
    store::{About, LimitAnswer, Rule},
};

/// A limit on what comes in a time.
#[derive(Debug)]
pub(super) enum Limit {
    Own(RateLimit),
    Shared(Lease),
}

/// By what a limit that gateways share is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Judge {
    /// What the store has granted.
    Store,
    /// One of so many parts of the limit, as the store is away.
    Part(usize),
}

/// Why a request may not begin now.
#[derive(Debug)]
pub(super) enum Denied {
    /// The store may have more.
    Ask,
    Over(Error),
}

impl Limit {
    pub(super) fn per_minute(amount: f64, is_shared: bool, now: Duration) -> Self {
        if is_shared {
            Self::Shared(Lease::per_minute(amount, now))
        } else {
            Self::Own(RateLimit::per_minute(amount, now))
        }
    }

    /// What decides: this gateway's own count, or what the store has granted.
    fn own(&mut self, judge: Judge, now: Duration) -> Result<&mut RateLimit, &mut Lease> {
        match self {
            Self::Own(limit) => Ok(limit),
            Self::Shared(lease) => match judge {
                Judge::Part(gateways) if !lease.holds_one() => Ok(lease.part(gateways, now)),
                _ => Err(lease),
            },
        }
    }

    /// Whether one is left. Where the store is to be asked, then for `need`.
    pub(super) fn has_one(&mut self, need: f64, judge: Judge, now: Duration) -> Result<(), Dry> {
        match self.own(judge, now) {
            Ok(limit) => limit.wait(1.0, now).map_err(Dry::Wait),
            Err(lease) => lease.has_one(need, now),
        }
    }

    /// Takes `amount`, of which one must be left.
    pub(super) fn reserve(&mut self, amount: f64, judge: Judge, now: Duration) -> Result<(), Dry> {
        match self.own(judge, now) {
            Ok(limit) => limit.reserve(amount, now).map_err(Dry::Wait),
            Err(lease) => lease.reserve(amount, now),
        }
    }

    /// Takes `amount` in any case. `by` is asked where the limit is shared.
    pub(super) fn extend(&mut self, amount: f64, by: impl FnOnce() -> (Judge, Duration)) {
        match self {
            Self::Own(limit) => limit.extend(amount),
            Self::Shared(lease) => match by() {
                (Judge::Store, now) => lease.extend(amount, now),
                (Judge::Part(gateways), now) => lease.part(gateways, now).extend(amount),
            },
        }
    }

    /// What was `reserved` is given back, and what was `used` of it taken. `by` is asked where the limit is
    /// shared.
    pub(super) fn settle(&mut self, reserved: f64, used: f64, by: impl FnOnce() -> (Judge, Duration)) {
        match self {
            Self::Own(limit) => limit.settle(reserved, used),
            Self::Shared(lease) => match by() {
                (Judge::Store, _) => lease.settle(reserved, used),
                (Judge::Part(gateways), now) => lease.part(gateways, now).settle(reserved, used),
            },
        }
    }

    /// As the tenant is told: of the whole limit, however it is kept.
    pub(super) fn standing(&mut self, judge: Judge, now: Duration) -> Standing {
        let whole = if let Self::Shared(lease) = self { Some(lease.amount()) } else { None };
        let standing = match self.own(judge, now) {
            Ok(limit) => limit.standing(now),
            Err(lease) => lease.standing(now),
        };
        Standing { per_minute: whole.unwrap_or(standing.per_minute), ..standing }
    }

    /// What the store is asked now; `None`: it has no part in it.
    pub(super) fn ask(
        &mut self,
        about: impl Fn(keyway_core::LeaseQuestion, Rule) -> About,
        now: Duration,
    ) -> Option<About> {
        let Self::Shared(lease) = self else { return None };
        let rule = Rule { per_minute: lease.amount(), burst: lease.burst() };
        Some(about(lease.ask(now), rule))
    }

    /// What became of the question; `None`: it has no answer.
    pub(super) fn take(&mut self, answer: Option<LimitAnswer>, now: Duration) {
        let Self::Shared(lease) = self else { return };
        match answer {
            Some(answer) => lease.take_answer(answer.of_lease(), now),
            None => lease.gets_no_answer(),
        }
    }

    /// Whether the store need not be asked until the next request.
    pub(super) fn rests(&self, now: Duration) -> bool {
        match self {
            Self::Own(_) => true,
            Self::Shared(lease) => lease.rests(now),
        }
    }
}

/// Whether one more request may be in flight.
pub(super) fn has_slot(slots: &mut Slots, in_flight: usize, judge: Judge, now: Duration) -> Result<(), Dry> {
    match judge {
        Judge::Store => slots.has_one(in_flight, now),
        Judge::Part(gateways) => slots.has_part(in_flight, gateways).map_err(Dry::Wait),
    }
}

impl Denied {
    /// `over` says of which limit, where the store has no more.
    pub(super) fn of(dry: Dry, over: impl Fn(Duration) -> Error) -> Self {
        match dry {
            Dry::Ask => Self::Ask,
            Dry::Wait(retry_after) => Self::Over(over(retry_after)),
        }
    }
}
