//! The order between those who share a room: higher priorities first, and among equals the owner that has
//! been served the fewest tokens for its weight (virtual token counters, Sheng et al., "Fairness in Serving
//! Large Language Models", OSDI 2024). An owner that comes back after a pause starts level with the others
//! but for a second's work of all workers: so no owner saves up, and one that asks for less than its share
//! does not queue for its own bursts beside one that asks for more. Without that second an owner has a fleet
//! of its share's size to itself, which at four fifths of it has queues where the whole had room. And while
//! an owner is about that has had less, workers are sent less beforehand of one that keeps asking for more
//! (`RESERVED`). The same is kept for an owner's own requests of a higher priority. In which order those of
//! one priority begin is not decided here.
//!
//! Several rooms may stand before the same workers. What each has served of its owners, and which of
//! their priorities wait, they tell each other ([`elsewhere`]), so that shares and priorities hold over
//! all of them.

pub mod elsewhere;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Owners that are remembered; beyond it those who do not wait are forgotten.
const OWNERS_MAX: usize = 4_096;
/// Seconds over which the room's outflow is measured: long against one prefill, short against a client's
/// patience.
const OUTFLOW_SPAN_S: f64 = 2.0;
/// What an owner may have had less than the others when it comes back, in seconds of the room's outflow: its
/// bursts, above what it has on the mean, go first up to here. Also for how long it can hold up the others.
const CREDIT_S: f64 = 1.0;
/// How much of what workers are sent beforehand is kept for owners who have had less. What is left bridges
/// the time until the next one reaches them, as the rest of the horizon need not.
pub(super) const RESERVED: f64 = 0.9;
/// Seconds for which an owner must have waited without a pause to be one that asks for more than its share:
/// others' bursts are over by then.
const PRESSES_S: f64 = 1.0;
/// Seconds since an owner's last request in which it is taken to come again.
const ABOUT_S: f64 = 10.0;
/// Requests that must have begun in it for the rate to be believed.
const OUTFLOW_SAMPLES_MIN: f64 = 8.0;

/// Whose request it is, and what it weighs.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Share {
    /// A number that the caller gives each owner, such as a tenant; 0 if it has none to tell apart.
    pub owner: u32,
    /// Its share among those of its priority who want more than there is, above 0.
    pub weight: f64,
    /// Higher ones go first, always. Requests of one owner may have several.
    pub priority: i32,
    /// Time to first token that this request wants; `None`: that of the room's rules.
    pub objective: Option<Duration>,
    /// Tokens of the request, as far as known when it comes.
    pub tokens: f64,
    /// Tokens that its owner has had besides and that are not charged yet: those of answers.
    pub owed: f64,
}

impl Default for Share {
    fn default() -> Self {
        Self { owner: 0, weight: 1.0, priority: 0, objective: None, tokens: 0.0, owed: 0.0 }
    }
}

/// What each owner has been served.
#[derive(Debug, Default)]
pub struct Fair {
    owners: BTreeMap<u32, Account>,
    /// What the owner that was served last has had.
    last: f64,
    /// Priorities of which requests wait in other rooms, and until when that is believed.
    waits_elsewhere: BTreeMap<i32, Duration>,
}

#[derive(Copy, Clone, Debug, Default)]
struct Account {
    /// Tokens for its weight, here and in other rooms.
    served: f64,
    /// Those of this room alone, since it began.
    own: f64,
    /// The highest priority of its requests that came of late, and when one of it came last.
    highest: Option<(i32, Duration)>,
    /// When it came last.
    came: Duration,
    /// The same two of this room alone.
    here: Option<Here>,
    /// When it came while none of its requests waited.
    waits_since: Duration,
    /// How fast its requests leave the room.
    outflow: Outflow,
}

/// How an owner came to this room of late.
#[derive(Copy, Clone, Debug)]
struct Here {
    highest: (i32, Duration),
    came: Duration,
}

impl Account {
    /// A request of this priority came to this room.
    fn comes_here(&mut self, priority: i32, now: Duration) {
        let stays = |here: &Here| here.highest.0 > priority && is_about(here.highest.1, now);
        let highest = self.here.filter(stays).map_or((priority, now), |here| here.highest);
        self.here = Some(Here { highest, came: now });
    }

    /// The highest priority of its requests, of which one may come again.
    fn highest_about(&self, now: Duration) -> Option<i32> {
        self.highest.filter(|(_, came)| is_about(*came, now)).map(|(priority, _)| priority)
    }

    fn priority(&self) -> i32 {
        self.highest.map_or(0, |(priority, _)| priority)
    }
}

/// What those who are about have had at least, by their priority, the highest first.
#[derive(Debug)]
pub struct Least(Vec<(i32, f64)>);

impl Fair {
    /// A request came, or wants to; `waiting` are the others. An owner of which no request waits has had at
    /// most `credit` less from now on than the one that has had the least of those that wait, or than the one
    /// served last.
    pub fn come_back(
        &mut self,
        share: &Share,
        waiting: impl Iterator<Item = Share> + Clone,
        (now, credit): (Duration, f64),
    ) {
        let is_back = !waiting.clone().any(|other| other.owner == share.owner);
        let least = || waiting.clone().map(|other| self.of(other.owner)).fold(f64::INFINITY, f64::min);
        let back = is_back.then(least);
        self.comes(share, back, (now, credit)).comes_here(share.priority, now);
        if self.owners.len() > OWNERS_MAX {
            let present: BTreeSet<u32> = waiting.map(|other| other.owner).chain([share.owner]).collect();
            self.owners.retain(|owner, _| present.contains(owner));
        }
    }

    /// A request came to this room or to another one. `back`: what the owner that has had the least of those
    /// that wait here has had, if of this owner none does.
    fn comes(&mut self, share: &Share, back: Option<f64>, (now, credit): (Duration, f64)) -> &mut Account {
        let account = self.owners.entry(share.owner).or_default();
        account.came = now;
        if account.highest_about(now).is_none_or(|highest| share.priority >= highest) {
            account.highest = Some((share.priority, now));
        }
        if let Some(least) = back {
            account.waits_since = now;
            let level = if least.is_finite() { least } else { self.last };
            account.served = account.served.max(level - credit);
        }
        account
    }

    /// Whom a part of the workers' time is kept for.
    pub fn least(&self, now: Duration) -> Least {
        if self.owners.len() < 2 {
            return Least(Vec::new());
        }
        let about = self.owners.values().filter(|account| is_about(account.came, now));
        let mut least: Vec<(i32, f64)> = about.map(|account| (account.priority(), account.served)).collect();
        // By priority, then by what they have had; of each priority the first, unless a higher one has had
        // less.
        least.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.total_cmp(&b.1)));
        let mut so_far = f64::INFINITY;
        least.retain(|(_, served)| {
            let less = *served < so_far;
            so_far = so_far.min(*served);
            less
        });
        Least(least)
    }

    /// Whether a part of the workers is kept from this owner, which waits: it asks for more than its share,
    /// and an owner of its priority or a higher one is about that has had less, or its own requests of a
    /// higher one are.
    pub fn is_greedy(&self, share: &Share, least: &Least, now: Duration) -> bool {
        if self.yields_elsewhere(share, now) {
            return true;
        }
        let Some(account) = self.owners.get(&share.owner) else { return false };
        let others = least.0.iter().take_while(|(priority, _)| *priority >= share.priority).last();
        let own_are_higher = account.highest_about(now).is_some_and(|highest| highest > share.priority);
        (own_are_higher || others.is_some_and(|(_, served)| *served < account.served))
            && now.saturating_sub(account.waits_since).as_secs_f64() >= PRESSES_S
    }

    /// Tokens of this request's owner were served.
    pub fn charge(&mut self, share: &Share, tokens: f64) {
        self.charged(share, tokens);
    }

    /// The owner's account, once they are charged to it.
    fn charged(&mut self, share: &Share, tokens: f64) -> &mut Account {
        let account = self.owners.entry(share.owner).or_default();
        let tokens = tokens / share.weight.max(f64::MIN_POSITIVE);
        account.served += tokens;
        account.own += tokens;
        self.last = account.served;
        account
    }

    /// A request of this owner began, of which workers compute so many tokens.
    pub fn began(&mut self, now: Duration, share: &Share, computed: f64) {
        let begun = Begun { requests: 1.0, tokens: share.tokens, charged: computed };
        let account = self.charged(share, computed);
        let waited = account.outflow.at.is_some_and(|last| account.waits_since <= last);
        account.outflow.note(now, waited, begun);
    }

    /// Time until so many tokens of this owner's will have left, where that is known: others that come later
    /// may go first.
    pub fn time_for(&self, share: &Share, tokens: f64) -> Option<Duration> {
        self.owners.get(&share.owner)?.outflow.time_for(tokens)
    }

    fn of(&self, owner: u32) -> f64 {
        self.owners.get(&owner).map_or(0.0, |account| account.served)
    }

    /// Puts `waiting`, which are in the order that each owner wants, into the order between owners.
    pub fn arrange<T>(&self, waiting: &mut Vec<T>, share: impl Fn(&T) -> Share) {
        let first = waiting.first().map(&share).unwrap_or_default();
        let alone = |item: &T| share(item).owner == first.owner && share(item).priority == first.priority;
        if waiting.iter().all(alone) {
            return;
        }
        // Each owner's queues, by priority.
        let mut queues: BTreeMap<Reverse<i32>, BTreeMap<u32, VecDeque<T>>> = BTreeMap::new();
        // How much each will have been served when its next one's turn comes.
        let mut served: BTreeMap<u32, f64> = BTreeMap::new();
        for item in waiting.drain(..) {
            let Share { owner, priority, .. } = share(&item);
            served.entry(owner).or_insert_with(|| self.of(owner));
            queues.entry(Reverse(priority)).or_default().entry(owner).or_default().push_back(item);
        }
        for mut queues in queues.into_values() {
            let had = |served: &BTreeMap<u32, f64>, owner: &u32| served.get(owner).copied().unwrap_or(0.0);
            while let Some(&owner) = queues.keys().min_by(|a, b| had(&served, a).total_cmp(&had(&served, b)))
            {
                let Some(item) = queues.get_mut(&owner).and_then(VecDeque::pop_front) else {
                    queues.remove(&owner);
                    continue;
                };
                let Share { tokens, weight, .. } = share(&item);
                *served.entry(owner).or_default() += tokens / weight.max(f64::MIN_POSITIVE);
                waiting.push(item);
            }
        }
    }
}

/// Whether one that came then is taken to come again.
fn is_about(came: Duration, now: Duration) -> bool {
    now.saturating_sub(came).as_secs_f64() < ABOUT_S
}

/// How fast requests leave a room in which a request always waits: what its workers can take.
#[derive(Copy, Clone, Debug, Default)]
pub struct Outflow {
    at: Option<Duration>,
    seconds: f64,
    begun: Begun,
}

/// Requests that left the room to begin: at one release, or faded over some seconds in [`Outflow`].
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Begun {
    /// How many requests began; a fraction where they are faded.
    pub requests: f64,
    /// Their tokens, as they said when they came.
    pub tokens: f64,
    /// Tokens of them that workers compute; in the room's own sums divided by their owners' weights.
    pub charged: f64,
}

impl Outflow {
    /// So much began at `now`; `waited` says whether a request waited since the last time.
    pub fn note(&mut self, now: Duration, waited: bool, begun: Begun) {
        let since = self.at.replace(now).map_or(0.0, |at| now.saturating_sub(at).as_secs_f64());
        if !waited {
            return;
        }
        let fade = (-since / OUTFLOW_SPAN_S).exp();
        self.seconds = self.seconds * fade + since;
        self.begun.requests = self.begun.requests * fade + begun.requests;
        self.begun.tokens = self.begun.tokens * fade + begun.tokens;
        self.begun.charged = self.begun.charged * fade + begun.charged;
    }

    fn is_known(&self) -> bool {
        self.begun.requests >= OUTFLOW_SAMPLES_MIN && self.begun.tokens > 0.0 && self.seconds > 0.0
    }

    /// Tokens that an owner may have had less than the others; none while the outflow is not known.
    pub fn credit(&self) -> f64 {
        if self.is_known() { CREDIT_S * self.begun.charged / self.seconds } else { 0.0 }
    }

    /// Time until `tokens` will have left, where that is known.
    pub fn time_for(&self, tokens: f64) -> Option<Duration> {
        self.is_known().then(|| {
            Duration::try_from_secs_f64(tokens * self.seconds / self.begun.tokens).unwrap_or(Duration::MAX)
        })
    }
}

#[cfg(test)]
pub(super) mod tests;
