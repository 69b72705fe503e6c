//! A limit on how much may come in a time that several gateways keep together. What is left of it is in a
//! store that all of them ask; each takes some of it ahead of need, so that its requests need not wait for
//! the store. A gateway tells the store sums since its start, never changes: a question or an answer that is
//! lost makes nothing wrong, and the next one sets it right. Time is the `Duration` since the start.

#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::{
    rate_limit::{RateLimit, Standing},
    recent_use::RecentUse,
};

/// For how long a store that had nothing left is believed to have no more than its limit has brought since.
/// Another gateway may have given something back.
const BELIEVED: Duration = Duration::from_millis(100);

/// What one gateway has of a limit.
#[derive(Debug)]
pub struct Lease {
    per_minute: f64,
    burst: f64,
    /// What was taken here, less what was given back.
    used: f64,
    /// What the store has granted since the start. Less than was used where something is owed.
    granted: f64,
    /// Wanted by requests that found nothing here, since the last question.
    needed: f64,
    /// A question that has no answer yet.
    asking: bool,
    recent: RecentUse,
    /// What was left at the store, and when it said so.
    left: Option<(f64, Duration)>,
    /// What this gateway goes by while the store is away, and one of how many parts that is.
    part: Option<(RateLimit, usize)>,
}

/// Why a request may not begin on what is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dry {
    /// The store may have more.
    Ask,
    /// The store has nothing: there will be enough after this time.
    Wait(Duration),
}

/// What a gateway says to the store of one limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LeaseQuestion {
    /// What it has used since its start.
    pub used: f64,
    /// What it was granted, as far as it knows. Where the store has forgotten it, only what is owed counts.
    pub granted: f64,
    /// What its waiting requests want.
    pub need: f64,
    /// What it wants besides, for requests to come.
    pub ahead: f64,
    /// What is left, as far as it knows, where the store has never heard of the limit.
    pub if_new: f64,
}

/// What the store says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LeaseAnswer {
    /// What it has granted this gateway, all in all.
    pub granted: f64,
    /// What is left for all; below 0 where they owe.
    pub left: f64,
}

impl Lease {
    /// So many a minute for all gateways together, of which none is here yet.
    pub fn per_minute(amount: f64, now: Duration) -> Self {
        Self {
            per_minute: amount,
            burst: RateLimit::burst_of(amount),
            used: 0.0,
            granted: 0.0,
            needed: 0.0,
            asking: false,
            recent: RecentUse::new(now),
            left: None,
            part: None,
        }
    }

    /// What may come in a minute, in the unit of the limit.
    pub fn amount(&self) -> f64 {
        self.per_minute
    }

    /// What may come at once.
    pub fn burst(&self) -> f64 {
        self.burst
    }

    fn per_second(&self) -> f64 {
        self.per_minute / 60.0
    }

    /// What is here; below 0 where it is owed.
    fn here(&self) -> f64 {
        self.granted - self.used
    }

    /// Whether one is here.
    pub fn holds_one(&self) -> bool {
        // Rounding must not make a wait that was long enough too short.
        self.here() + 1e-9 >= 1.0
    }

    /// What is left at the store by now, as far as it is known.
    fn left(&self, now: Duration) -> f64 {
        self.left.map_or(self.burst, |(left, at)| {
            (left + now.saturating_sub(at).as_secs_f64() * self.per_second()).min(self.burst)
        })
    }

    /// Whether one is here. If not, the next question is for `need` more, unless the store has nothing.
    pub fn has_one(&mut self, need: f64, now: Duration) -> Result<(), Dry> {
        if self.holds_one() {
            return Ok(());
        }
        let all = self.left(now) + self.here();
        let known = self.left.is_some_and(|(_, at)| now.saturating_sub(at) < BELIEVED);
        if known && all < 1.0 && !self.asking {
            let wait = Duration::try_from_secs_f64((1.0 - all) / self.per_second()).unwrap_or(Duration::MAX);
            return Err(Dry::Wait(wait.saturating_add(Duration::from_micros(1))));
        }
        self.needed += need.min(self.burst);
        self.recent.wants(now);
        Err(Dry::Ask)
    }

    /// Takes `amount`, of which one must be here; the rest may be owed.
    pub fn reserve(&mut self, amount: f64, now: Duration) -> Result<(), Dry> {
        self.has_one(amount, now)?;
        self.used += amount;
        self.recent.uses(amount, now);
        Ok(())
    }

    /// Takes `amount` in any case.
    pub fn extend(&mut self, amount: f64, now: Duration) {
        self.used += amount;
        self.recent.uses(amount, now);
    }

    /// What was `reserved` is given back, and what was `used` of it taken.
    pub fn settle(&mut self, reserved: f64, used: f64) {
        self.used += used - reserved;
    }

    /// What to go by while the store is away: a part of the limit, and of what was left, for each of so many
    /// gateways.
    pub fn part(&mut self, gateways: usize, now: Duration) -> &mut RateLimit {
        let (per_minute, left) = (self.per_minute, self.left(now));
        let gateways = gateways.max(1);
        let (part, parts) =
            self.part.get_or_insert_with(|| (RateLimit::part_of(per_minute, gateways, left, now), gateways));
        *parts = gateways;
        part.becomes_part_of(per_minute, gateways, now);
        part
    }

    /// Whether nobody has asked for anything lately, and nothing is here or owed.
    pub fn rests(&self, now: Duration) -> bool {
        self.recent.rests(now) && self.here() == 0.0 && !self.asking
    }

    /// What to say to the store now.
    pub fn ask(&mut self, now: Duration) -> LeaseQuestion {
        let (need, ahead) = (std::mem::take(&mut self.needed), self.recent.ahead(now).min(self.burst));
        // What is given back is not there for requests in the meantime.
        self.granted = self.granted.min(self.used + need + ahead);
        self.asking = true;
        LeaseQuestion { used: self.used, granted: self.granted, need, ahead, if_new: self.left(now) }
    }

    /// The store has answered. What came by this gateway's part is owed to it: it may have come at the store
    /// as well.
    pub fn take_answer(&mut self, answer: LeaseAnswer, now: Duration) {
        if let Some((mut part, parts)) = self.part.take() {
            self.used += (self.left(now) / parts as f64 - part.level(now)).max(0.0);
        }
        self.granted = answer.granted;
        self.left = Some((answer.left, now));
        self.asking = false;
    }

    /// The store has not answered.
    pub fn gets_no_answer(&mut self) {
        self.asking = false;
    }

    /// How much is left at `now`, here and at the store, and when the limit is full again.
    pub fn standing(&self, now: Duration) -> Standing {
        let left = (self.left(now) + self.here()).min(self.burst);
        let full_in = (self.burst - left) / self.per_second();
        Standing {
            per_minute: self.per_minute,
            left: left.max(0.0),
            full_in: Duration::try_from_secs_f64(full_in).unwrap_or(Duration::MAX),
        }
    }
}
