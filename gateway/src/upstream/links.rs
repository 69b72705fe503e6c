//! A worker's HTTP/2 connections: a request gets a place on the first that has one, so they are as few as can
//! be, and where none has, one of those who wait opens another for all of them.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{
    failure::SendError,
    shared::{Entry, Place, Shared},
};
use crate::{clock::Instant, limits::POOL_IDLE_TIMEOUT};

/// The connections of one origin.
#[derive(Debug, Default)]
pub(super) struct Links {
    all: Mutex<Vec<Arc<Shared>>>,
    turn: tokio::sync::Mutex<()>,
    /// Connections that could not be opened, and why the last one could not.
    failed: Mutex<(u64, Option<SendError>)>,
}

/// The right to open a connection, or what spares it.
pub(super) enum Turn<'a> {
    /// Another task has opened one meanwhile.
    Place(Place),
    /// Another task has tried in vain meanwhile.
    Failed(SendError),
    /// No other task opens one while this is held.
    Open(#[allow(dead_code, reason = "held, not read")] tokio::sync::MutexGuard<'a, ()>),
}

impl Links {
    /// A place on a connection that is there; on one that was opened since, where that is asked for. Those
    /// that take no more are forgotten; their streams go on.
    pub(super) fn enter(&self, since: Option<Instant>) -> Option<Place> {
        let mut all = self.all.lock();
        let mut at = 0;
        while at < all.len() {
            if since.is_some_and(|since| all[at].opened() < since) {
                at += 1;
                continue;
            }
            match all[at].enter() {
                Entry::Free(place) => return Some(place),
                Entry::Full => at += 1,
                Entry::Over => drop(all.remove(at)),
            }
        }
        None
    }

    /// Waits until it is known whether a connection must be opened.
    pub(super) async fn turn(&self, since: Option<Instant>) -> Turn<'_> {
        let failures = self.failed.lock().0;
        let turn = self.turn.lock().await;
        if let Some(place) = self.enter(since) {
            return Turn::Place(place);
        }
        match &*self.failed.lock() {
            (now, Some(error)) if *now != failures => Turn::Failed(error.clone()),
            _ => Turn::Open(turn),
        }
    }

    /// Adds a new connection; the place on it is its opener's.
    pub(super) fn add(&self, shared: Arc<Shared>) -> Place {
        let place = shared.first();
        self.all.lock().push(shared);
        place
    }

    /// No connection could be opened: those who wait need not try too.
    pub(super) fn failed(&self, error: &SendError) {
        let mut failed = self.failed.lock();
        *failed = (failed.0 + 1, Some(error.clone()));
    }

    /// Closes those that no request has used for long.
    pub(super) fn sweep(&self) {
        self.all.lock().retain(|shared| shared.idle().is_none_or(|idle| idle < POOL_IDLE_TIMEOUT));
    }
}
