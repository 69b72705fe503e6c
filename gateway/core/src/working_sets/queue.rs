//! Turns whose sessions are paused, in the order in which these began: who began first comes in first.
//!
//! A session that has just begun is small and fits almost anywhere. If whatever fits came in, the large ones,
//! which are nearly done, would wait for as long as a pause may be. So room is kept for those before.

use std::{
    collections::{BTreeMap, BinaryHeap},
    time::Duration,
};

use crate::spread_map::SpreadMap;

/// A turn that has not been asked about for so long waits no more, whoever did not say so.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(10);

/// When a session began, and its name.
pub(super) type Age = (Duration, u64);

/// Those who wait, by the workers that they may go to.
#[derive(Debug, Default)]
pub(super) struct Queues {
    queues: SpreadMap<u64, BTreeMap<Age, Waiting>>,
    /// Where each session waits.
    places: SpreadMap<u64, (u64, Age)>,
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    need: f64,
    /// When it was last asked about.
    asked: Duration,
}

/// What is kept of some workers' room for those who wait for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Kept {
    /// The last for whom room is kept, or who was found some.
    pub(super) last: Option<Age>,
    /// The most tokens that a worker has left for one who began later.
    pub(super) spare: f64,
}

impl Queues {
    /// Whether no session waits.
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// A session waits for room at these workers.
    pub(super) fn wait(&mut self, among: u64, age: Age, need: f64, now: Duration) {
        if let Some(old) = self.places.insert(age.1, (among, age)).filter(|old| *old != (among, age)) {
            self.take(old);
        }
        self.queues.entry(among).or_default().insert(age, Waiting { need, asked: now });
    }

    /// A session waits no more.
    pub(super) fn leave(&mut self, session: u64) {
        if let Some(place) = self.places.remove(&session) {
            self.take(place);
        }
    }

    fn take(&mut self, (among, age): (u64, Age)) {
        if let Some(queue) = self.queues.get_mut(&among) {
            queue.remove(&age);
            if queue.is_empty() {
                self.queues.remove(&among);
            }
        }
    }

    /// Keeps room of workers that have so much left for those who wait, the first first: what each needs
    /// where most is left, or all of that where it is too little.
    pub(super) fn keep(&mut self, among: u64, now: Duration, free: impl Iterator<Item = f64>) -> Kept {
        // Numbers that are not negative are in the order of their bits.
        let bits = |tokens: f64| tokens.max(0.0).to_bits();
        let mut free: BinaryHeap<u64> = free.map(bits).collect();
        let (mut last, mut forgotten) = (None, Vec::new());
        for (age, waiting) in self.queues.get(&among).into_iter().flatten() {
            if now.saturating_sub(waiting.asked) > FORGOTTEN_AFTER {
                forgotten.push(age.1);
                continue;
            }
            let Some(most) = free.pop().map(f64::from_bits).filter(|most| *most > 0.0) else { break };
            last = Some(*age);
            free.push(bits(most - waiting.need));
        }
        for session in forgotten {
            self.leave(session);
        }
        Kept { last, spare: free.peek().map_or(0.0, |most| f64::from_bits(*most)) }
    }
}
