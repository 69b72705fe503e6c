//! The prompts whose KV is kept for other workers: each until it is fetched, or for so long. How many there
//! may be is the engine's to say, which holds their blocks.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::engine::holds::Hold;
use crate::limits::HOLDS_MAX;

/// Holds by the names that others are told.
#[derive(Debug, Default)]
pub(super) struct Kept {
    state: Mutex<State>,
    /// Told when there is one again.
    added: Notify,
}

#[derive(Debug, Default)]
struct State {
    holds: HashMap<u128, Arc<Hold>>,
    /// When each ends that was not taken before. All are kept equally long, so the first one ends first.
    ends: VecDeque<(Instant, u128)>,
}

impl Kept {
    /// Keeps one until then; those before it end no later. The engine holds no more than [`HOLDS_MAX`]: where
    /// there are as many, the blocks of the oldest are gone.
    pub(super) fn add(&self, transfer: u128, hold: Arc<Hold>, end: Instant) {
        let mut state = self.state();
        while state.holds.len() >= HOLDS_MAX
            && let Some((_, oldest)) = state.ends.pop_front()
        {
            state.holds.remove(&oldest);
        }
        state.holds.insert(transfer, hold);
        state.ends.push_back((end, transfer));
        drop(state);
        self.added.notify_one();
    }

    /// One that is kept.
    pub(super) fn get(&self, transfer: u128) -> Option<Arc<Hold>> {
        self.state().holds.get(&transfer).cloned()
    }

    /// Ends one: nobody else may fetch it. False if it is gone.
    pub(super) fn take(&self, transfer: u128) -> bool {
        let mut state = self.state();
        let taken = state.holds.remove(&transfer).is_some();
        if taken {
            state.ends.retain(|(_, other)| *other != transfer);
        }
        taken
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.state().holds.len()
    }

    /// Waits until some have ended; how many they are.
    pub(super) async fn expired(&self) -> usize {
        loop {
            let first = self.state().ends.front().map(|(end, _)| *end);
            match first {
                Some(end) => sleep_until(end).await,
                None => self.added.notified().await,
            }
            let ended = self.end(Instant::now());
            if ended > 0 {
                return ended;
            }
        }
    }

    fn end(&self, now: Instant) -> usize {
        let mut state = self.state();
        let mut ended = 0;
        while let Some((end, transfer)) = state.ends.front().copied().filter(|(end, _)| *end <= now) {
            tracing::debug!(after = ?now.duration_since(end), "KV that nobody fetched is let go");
            state.ends.pop_front();
            ended += usize::from(state.holds.remove(&transfer).is_some());
        }
        ended
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
