//! The order between those who share a room: higher priorities first, and among equals whoever has been served the fewest
//! tokens for its weight (virtual token counters, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
//! Who comes back after a pause starts level with those who wait, so that nobody saves up. In which order one owner's own
//! requests begin is not decided here.

use std::collections::BTreeMap;
use std::time::Duration;

/// Owners that are remembered; beyond it those who do not wait are forgotten.
const OWNERS_MAX: usize = 4_096;
/// Seconds over which the room's outflow is measured: long against one prefill, short against a client's patience.
const OUTFLOW_SPAN_S: f64 = 2.0;
/// Requests that must have begun in it for the rate to be believed.
const OUTFLOW_SAMPLES_MIN: f64 = 8.0;

/// Whose request it is, and what it weighs.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Share {
    /// Names the owner.
    pub owner: u32,
    /// Its share among those of its priority who want more than there is, above 0.
    pub weight: f64,
    /// Higher ones go first, always.
    pub priority: i32,
    /// Tokens of the request, as far as known when it comes.
    pub tokens: f64,
    /// Tokens that its owner has had besides and that nobody charged yet: those of answers.
    pub owed: f64,
}

impl Default for Share {
    fn default() -> Self {
        Self { owner: 0, weight: 1.0, priority: 0, tokens: 0.0, owed: 0.0 }
    }
}

/// What each owner has been served.
#[derive(Debug, Default)]
pub struct Fair {
    served: BTreeMap<u32, f64>,
}

impl Fair {
    /// A request came; `waiting` are the others.
    pub fn enter(&mut self, share: &Share, waiting: impl Iterator<Item = Share>) {
        let (mut least, mut waits) = (f64::INFINITY, Vec::new());
        for other in waiting {
            least = least.min(self.of(other.owner));
            waits.push(other.owner);
        }
        if !waits.contains(&share.owner) && least.is_finite() {
            let served = self.served.entry(share.owner).or_default();
            *served = served.max(least);
        }
        if share.owed > 0.0 {
            self.charge(share, share.owed);
        }
        if self.served.len() > OWNERS_MAX {
            self.served.retain(|owner, _| *owner == share.owner || waits.contains(owner));
        }
    }

    /// Tokens of this request's owner were served.
    pub fn charge(&mut self, share: &Share, tokens: f64) {
        *self.served.entry(share.owner).or_default() += tokens / share.weight.max(f64::MIN_POSITIVE);
    }

    fn of(&self, owner: u32) -> f64 {
        self.served.get(&owner).copied().unwrap_or(0.0)
    }

    /// Puts `waiting`, which are in the order that each owner wants, into the order between owners.
    pub fn arrange<T>(&self, waiting: &mut Vec<T>, share: impl Fn(&T) -> Share) {
        let first = waiting.first().map(&share).unwrap_or_default();
        let alone = |item: &T| share(item).owner == first.owner && share(item).priority == first.priority;
        if waiting.iter().all(alone) {
            return;
        }
        // Each owner's queue, and how much it will have been served when its head's turn comes.
        let mut queues: BTreeMap<(i32, u32), (f64, std::collections::VecDeque<T>)> = BTreeMap::new();
        for item in waiting.drain(..) {
            let Share { owner, priority, .. } = share(&item);
            let queue =
                queues.entry((-priority, owner)).or_insert_with(|| (self.of(owner), Vec::new().into()));
            queue.1.push_back(item);
        }
        while let Some(&(priority, _)) = queues.keys().next() {
            let of_it = queues.range_mut((priority, u32::MIN)..=(priority, u32::MAX));
            let Some((&key, (served, queue))) = of_it.min_by(|a, b| a.1.0.total_cmp(&b.1.0)) else { break };
            if let Some(item) = queue.pop_front() {
                let Share { tokens, weight, .. } = share(&item);
                *served += tokens / weight.max(f64::MIN_POSITIVE);
                waiting.push(item);
            }
            if queue.is_empty() {
                queues.remove(&key);
            }
        }
    }
}

/// How fast requests leave a room in which somebody always waits: what its workers can take.
#[derive(Debug, Default)]
pub struct Outflow {
    at: Option<Duration>,
    seconds: f64,
    tokens: f64,
    requests: f64,
}

impl Outflow {
    /// So much began at `now`; `waited` says whether somebody waited since the last time.
    pub fn note(&mut self, now: Duration, waited: bool, tokens: f64, requests: f64) {
        let since = self.at.replace(now).map_or(0.0, |at| now.saturating_sub(at).as_secs_f64());
        if !waited {
            return;
        }
        let fade = (-since / OUTFLOW_SPAN_S).exp();
        self.seconds = self.seconds * fade + since;
        self.tokens = self.tokens * fade + tokens;
        self.requests = self.requests * fade + requests;
    }

    /// Time until `tokens` will have left, where that is known.
    pub fn time_for(&self, tokens: f64) -> Option<Duration> {
        let known = self.requests >= OUTFLOW_SAMPLES_MIN && self.tokens > 0.0;
        known.then(|| {
            Duration::try_from_secs_f64(tokens * self.seconds / self.tokens).unwrap_or(Duration::MAX)
        })
    }
}

#[cfg(test)]
mod tests;
