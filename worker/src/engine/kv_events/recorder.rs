//! From the engine's thread to the publisher's task, without ever waiting: a bounded list of steps behind a
//! lock that either side holds for a moment only. Where the list would outgrow its bound, its steps are
//! merged into one.
//!
//! Merging loses no state: of each block it keeps the removal that came first and the storage that came last.
//! What a follower has and what the cache holds bound both, so a merged step is never longer than twice the
//! number of blocks.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::IntCounter;
use tokio::sync::Notify;

use crate::engine::block_manager::CacheChange;
use crate::limits::kv_events_pending_max;

/// What changed in one step of the engine.
#[derive(Debug)]
pub(crate) struct Step {
    /// When the step was recorded, in seconds since 1970; of merged steps, the last one.
    pub(crate) at: f64,
    pub(crate) changes: Vec<CacheChange>,
}

#[derive(Debug)]
struct Shared {
    pending: Mutex<Pending>,
    changed: Notify,
    /// Changes at which steps are merged.
    changes_max: usize,
    merged: IntCounter,
}

#[derive(Debug, Default)]
struct Pending {
    steps: VecDeque<Step>,
    /// Changes of all steps.
    changes: usize,
    closed: bool,
}

/// The engine's end. Dropping it ends the publisher.
#[derive(Debug)]
pub(crate) struct Recorder(Arc<Shared>);

/// The publisher's end, which waits for steps and takes them in their order.
#[derive(Debug)]
pub(crate) struct Follower(Arc<Shared>);

/// Both ends, for a cache of `num_blocks`; `merged` counts steps that did not get a batch of their own.
pub(crate) fn channel(num_blocks: usize, merged: IntCounter) -> (Recorder, Follower) {
    let shared = Arc::new(Shared {
        pending: Mutex::default(),
        changed: Notify::new(),
        changes_max: kv_events_pending_max(num_blocks),
        merged,
    });
    (Recorder(Arc::clone(&shared)), Follower(shared))
}

impl Shared {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        // A thread that panicked left whole steps behind.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recorder {
    /// Takes a step's changes, in order. Does nothing without any.
    pub(crate) fn record(&self, changes: Vec<CacheChange>) {
        if changes.is_empty() {
            return;
        }
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let mut pending = self.0.pending();
        pending.changes += changes.len();
        pending.steps.push_back(Step { at, changes });
        if pending.changes > self.0.changes_max {
            self.0.merged.inc_by(pending.merge() as u64);
        }
        drop(pending);
        self.0.changed.notify_one();
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.0.pending().closed = true;
        self.0.changed.notify_one();
    }
}

impl Follower {
    /// The steps since the last call, at least one; `None` once the engine is gone and all are taken.
    pub(crate) async fn next(&self) -> Option<VecDeque<Step>> {
        loop {
            {
                let mut pending = self.0.pending();
                if !pending.steps.is_empty() {
                    pending.changes = 0;
                    return Some(std::mem::take(&mut pending.steps));
                }
                if pending.closed {
                    return None;
                }
            }
            self.0.changed.notified().await;
        }
    }
}

#[cfg(test)]
impl Follower {
    /// The steps since the last call, without waiting.
    pub(crate) fn take(&self) -> VecDeque<Step> {
        std::mem::take(&mut self.0.pending().steps)
    }
}

impl Pending {
    /// Makes one step of all; returns how many it saves.
    fn merge(&mut self) -> usize {
        let saved = self.steps.len() - 1;
        let at = self.steps.back().map_or(0.0, |step| step.at);
        let changes = net(self.steps.drain(..).flat_map(|step| step.changes).collect());
        self.changes = changes.len();
        self.steps.push_back(Step { at, changes });
        saved
    }
}

/// The shortest list with the same effect, in an order that keeps parents before children where `changes`
/// did. Relies on storages and removals of one block taking turns.
fn net(changes: Vec<CacheChange>) -> Vec<CacheChange> {
    let mut last = HashMap::with_capacity(changes.len());
    for (i, change) in changes.iter().enumerate() {
        last.insert(change.block(), i);
    }
    let mut seen = HashSet::with_capacity(last.len());
    let kept = changes.into_iter().enumerate().filter(|(i, change)| {
        let first = seen.insert(change.block());
        match change {
            CacheChange::Stored { .. } => last.get(&change.block()) == Some(i),
            CacheChange::Removed { .. } => first,
        }
    });
    kept.map(|(_, change)| change).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stored(hash: u128) -> CacheChange {
        let parent = (hash > 0).then(|| hash - 1);
        CacheChange::Stored { group: 0, hash, parent, tokens: Arc::from([7]), salt: Arc::from([]) }
    }

    fn apply(state: &mut HashSet<u128>, changes: &[CacheChange]) {
        for change in changes {
            match change {
                CacheChange::Stored { hash, parent, .. } => {
                    assert!(
                        parent.is_none_or(|parent| state.contains(&parent)),
                        "the parent of {hash} is not there"
                    );
                    assert!(state.insert(*hash), "{hash} is there already");
                }
                CacheChange::Removed { hash, .. } => assert!(state.remove(hash), "{hash} is not there"),
            }
        }
    }

    /// One chain of blocks that grows and shrinks at its end: `true` stores the next, `false` removes the
    /// last.
    fn of_moves(moves: &[bool], mut len: u128) -> Vec<CacheChange> {
        let mut changes = Vec::new();
        for grow in moves {
            if *grow {
                changes.push(stored(len));
                len += 1;
            } else if len > 0 {
                len -= 1;
                changes.push(CacheChange::Removed { group: 0, hash: len });
            }
        }
        changes
    }

    proptest! {
        #[test]
        fn merging_changes_neither_the_outcome_nor_the_order_of_parents(
            moves in prop::collection::vec(any::<bool>(), 0..60),
            start in 0_u128..8,
        ) {
            let changes = of_moves(&moves, start);
            let mut state: HashSet<u128> = (0..start).collect();
            let mut merged_state = state.clone();
            apply(&mut state, &changes);
            let merged = net(changes);
            apply(&mut merged_state, &merged);
            prop_assert_eq!(&state, &merged_state);
            prop_assert!(merged.len() <= start as usize + state.len());
        }
    }

    #[tokio::test]
    async fn an_engine_far_ahead_is_bounded_and_loses_nothing() {
        let merged = IntCounter::new("merged", "m").unwrap();
        let (recorder, follower) = channel(2, merged.clone());
        let steps = 10 * kv_events_pending_max(2);
        for _ in 0..steps {
            recorder.record(vec![stored(0), stored(1)]);
            recorder.record(vec![
                CacheChange::Removed { group: 0, hash: 1 },
                CacheChange::Removed { group: 0, hash: 0 },
            ]);
        }
        recorder.record(vec![stored(0)]);
        assert!(recorder.0.pending().changes <= kv_events_pending_max(2) + 2);
        drop(recorder);
        let taken = follower.next().await.unwrap();
        assert_eq!(taken.len() as u64 + merged.get(), 2 * steps as u64 + 1);
        let mut state = HashSet::new();
        for step in &taken {
            apply(&mut state, &step.changes);
        }
        assert_eq!(state, HashSet::from([0]));
        assert!(follower.next().await.is_none());
    }
}
