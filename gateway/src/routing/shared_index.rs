//! The index as the gateway's threads share it: what workers' caches are believed to hold, what answers that
//! have just ended are about to say, and what a snapshot says of workers that have not joined. Choices are
//! recorded in it, so every choice waits for its lock.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use keyway_core::index::{Placement, PrefixIndex, WorkerId};
use parking_lot::{Mutex, MutexGuard};

use crate::{
    fleet::Worker,
    limits::{EXPECTED_LINGER, EXPECTED_LINGER_MAX},
    routing::snapshot::Remembered,
};

/// Blocks that are forgotten in one go, each in a fraction of a microsecond.
const FORGOTTEN_TOGETHER: usize = 512;

/// What the workers' caches are believed to hold.
#[derive(Debug)]
pub struct SharedIndex {
    index: Mutex<PrefixIndex>,
    /// Placements at exact workers whose answers have just ended, with when.
    lingering: Mutex<VecDeque<(Duration, Placement)>>,
    /// What a snapshot says of workers that have not joined.
    remembered: Mutex<Remembered>,
}

impl SharedIndex {
    /// An empty one of at most so many bytes.
    pub(super) fn new(bytes: usize) -> Self {
        let index = Mutex::new(PrefixIndex::new(bytes));
        Self { index, lingering: Mutex::default(), remembered: Mutex::default() }
    }

    /// Looks at or changes the index, briefly: every choice waits for it.
    pub fn with<T>(&self, f: impl FnOnce(&mut PrefixIndex) -> T) -> T {
        f(&mut self.settled())
    }

    /// The same for what is one of many in a row: a choice that waits is made before the next one.
    pub fn with_fairly<T>(&self, f: impl FnOnce(&mut PrefixIndex) -> T) -> T {
        let mut index = self.index.lock();
        let outcome = f(&mut index);
        MutexGuard::unlock_fair(index);
        outcome
    }

    /// The index, with what workers have accepted by now.
    pub(super) fn settled(&self) -> MutexGuard<'_, PrefixIndex> {
        let mut index = self.index.lock();
        index.settle();
        index
    }

    /// The index as it is.
    pub(super) fn lock(&self) -> MutexGuard<'_, PrefixIndex> {
        self.index.lock()
    }

    /// The events of an answer that has just ended may be on their way: what its worker has not announced yet
    /// counts as held for a while longer.
    pub(super) fn linger(&self, now: Duration, placement: Placement) {
        let mut lingering = self.lingering.lock();
        lingering.push_back((now, placement));
        let surplus = (lingering.len() > EXPECTED_LINGER_MAX).then(|| lingering.pop_front()).flatten();
        drop(lingering);
        if let Some((_, oldest)) = surplus {
            self.index.lock().finish(oldest);
        }
    }

    /// Finishes placements whose events have come by now.
    pub(super) fn finish_lingering(&self, now: Duration) {
        let mut lingering = self.lingering.lock();
        let over = lingering.iter().take_while(|(ended, _)| *ended + EXPECTED_LINGER <= now).count();
        // Mostly none is: then nothing is taken out.
        if over == 0 {
            return;
        }
        let finished: Vec<_> = lingering.drain(..over).collect();
        drop(lingering);
        let mut index = self.index.lock();
        for (_, placement) in finished {
            index.finish(placement);
        }
    }

    /// Takes what a snapshot says for workers that join from now on.
    pub fn remember(&self, remembered: Remembered) {
        *self.remembered.lock() = remembered;
    }

    /// Takes what another gateway's snapshot says in place of what is known. Returns the blocks of workers
    /// that are here.
    pub fn replace_by(&self, remembered: Remembered, workers: &[Arc<Worker>]) -> usize {
        let modelled = || workers.iter().filter(|worker| !worker.residency.has_events());
        for worker in modelled() {
            self.forget(worker.id);
            self.forget(worker.residency.token_id);
        }
        self.remember(remembered);
        modelled().map(|worker| self.recall(worker)).sum()
    }

    /// A worker joins: what a snapshot says of it is believed. Returns the blocks.
    pub fn recall(&self, worker: &Worker) -> usize {
        let mut remembered = self.remembered.lock();
        if remembered.is_empty() || worker.residency.has_events() {
            return 0;
        }
        let (of_text, of_tokens) = remembered.take(worker);
        drop(remembered);
        let mut index = self.index.lock();
        index.restore(worker.id, of_text.iter()) + index.restore(worker.residency.token_id, of_tokens.iter())
    }

    /// A worker's process is likely gone, and its cache with it. Of a worker whose events are trusted these
    /// say so.
    pub(super) fn process_is_gone(&self, worker: &Worker) {
        self.forget(worker.id);
        if !worker.residency.trusted() {
            self.forget(worker.residency.token_id);
            self.forget(worker.residency.any_tier_id);
        }
    }

    /// Forgets all that a worker held; it may hold more again.
    pub(super) fn cache_is_lost(&self, worker: &Worker) {
        for id in [worker.id, worker.residency.token_id, worker.residency.any_tier_id] {
            self.forget(id);
        }
    }

    /// Forgets all that a worker held: it is gone for good.
    pub(super) fn forget_worker(&self, worker: &Worker, now: Duration) {
        self.finish_lingering(now);
        for id in [worker.id, worker.residency.token_id, worker.residency.any_tier_id] {
            self.with(|index| index.set_exact(id, false));
            self.forget(id);
        }
    }

    /// Forgets what a worker holds by this name, some blocks at a time.
    fn forget(&self, id: WorkerId) {
        while self.with_fairly(|index| index.forget(id, FORGOTTEN_TOGETHER)) == FORGOTTEN_TOGETHER {}
    }
}
