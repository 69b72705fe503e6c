//! A worker's HTTP/2 connections: a request gets a place on the first that has one, so they are as few as can be, and where
//! none has, one of those who wait opens another for all of them.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use parking_lot::Mutex;

use super::shared::{Entry, Place, Shared};
use crate::limits::POOL_IDLE_TIMEOUT;

/// The connections of one origin.
#[derive(Debug, Default)]
pub(super) struct Links {
    all: Mutex<Vec<Arc<Shared>>>,
    turn: tokio::sync::Mutex<()>,
    /// Connections that could not be opened.
    failed: AtomicU64,
}

/// The right to open a connection, or what spares it.
pub(super) enum Turn<'a> {
    /// Somebody else has opened one meanwhile.
    Place(Place),
    /// Somebody else has tried in vain meanwhile.
    Failed,
    /// Nobody else opens one while this is held.
    Open(#[allow(dead_code, reason = "held, not read")] tokio::sync::MutexGuard<'a, ()>),
}

impl Links {
    /// A place on a connection that is there. Those that take no more are forgotten; their streams go on.
    pub(super) fn enter(&self) -> Option<Place> {
        let mut all = self.all.lock();
        let mut at = 0;
        while at < all.len() {
            match all[at].enter() {
                Entry::Free(place) => return Some(place),
                Entry::Full => at += 1,
                Entry::Over => drop(all.remove(at)),
            }
        }
        None
    }

    /// Waits until it is known whether a connection must be opened.
    pub(super) async fn turn(&self) -> Turn<'_> {
        let failed = self.failed.load(Relaxed);
        let turn = self.turn.lock().await;
        match self.enter() {
            Some(place) => Turn::Place(place),
            None if self.failed.load(Relaxed) != failed => Turn::Failed,
            None => Turn::Open(turn),
        }
    }

    /// Adds a new connection; the place on it is its opener's.
    pub(super) fn add(&self, shared: Arc<Shared>) -> Place {
        let place = shared.first();
        self.all.lock().push(shared);
        place
    }

    /// No connection could be opened: those who wait need not try too.
    pub(super) fn failed(&self) {
        self.failed.fetch_add(1, Relaxed);
    }

    /// Closes those that nobody has used for long.
    pub(super) fn sweep(&self) {
        self.all.lock().retain(|shared| shared.idle().is_none_or(|idle| idle < POOL_IDLE_TIMEOUT));
    }
}
