//! A worker that is for a part of requests: which part, how its KV is moved, and how many requests it may
//! have whose KV comes from elsewhere. What the operator says of it counts; else what an SGLang says itself.

use std::{
    num::NonZeroU16,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use http::Uri;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Worker;
use crate::{
    config::{KvTransfer, Role, WorkerConfig},
    limits::{BOOTSTRAP_PORT, PARTS_ASKED_EVERY},
    upstream::Origin,
};

/// What an SGLang says of its part in requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartsSaid {
    /// Which part it is for.
    pub role: Role,
    /// Port at which the others learn where its KV is.
    pub bootstrap_port: Option<NonZeroU16>,
    /// Requests that it runs at once at most.
    pub window: Option<u32>,
}

/// A worker's part in requests.
#[derive(Debug)]
pub struct Disaggregation {
    /// Looked at for each request and worker, hence without a lock.
    role: AtomicU8,
    said: Mutex<Option<PartsSaid>>,
    /// When it was asked last, in milliseconds of the gateway's clock.
    asked_ms: AtomicU64,
    rooms: Rooms,
    bootstrap: OnceLock<Origin>,
}

/// Rooms at a worker for requests whose KV comes from elsewhere: as many as it runs at once. One more would
/// wait there unadmitted while the clock of the worker that computes for it runs out.
#[derive(Debug, Default)]
pub struct Rooms(Mutex<Option<(u32, Arc<Semaphore>)>>);

/// A request's place among them, until it is dropped.
#[derive(Debug)]
#[must_use = "dropped, it is free again"]
pub struct ClaimedRooms {
    _permit: Option<OwnedSemaphorePermit>,
}

impl Rooms {
    /// There are so many from now on; `None`: that is not known, and no bound.
    fn resize(&self, window: Option<u32>) {
        let mut rooms = self.0.lock();
        if rooms.as_ref().map(|(size, _)| *size) == window {
            return;
        }
        if let Some((_, old)) = rooms.take() {
            // Who waits there looks again.
            old.close();
        }
        *rooms = window.map(|size| (size, Arc::new(Semaphore::new(size as usize))));
    }

    fn now(&self) -> Option<(u32, Arc<Semaphore>)> {
        self.0.lock().clone()
    }

    /// So many of them, if they are free and nobody waits for them; all, where more are wanted than there
    /// are.
    pub fn try_claim(&self, count: u32) -> Option<ClaimedRooms> {
        let Some((size, rooms)) = self.now() else { return Some(ClaimedRooms { _permit: None }) };
        let permit = rooms.try_acquire_many_owned(count.min(size)).ok()?;
        Some(ClaimedRooms { _permit: Some(permit) })
    }

    /// Waits for so many, in the order of those who come.
    pub async fn claim(&self, count: u32) -> ClaimedRooms {
        loop {
            let Some((size, rooms)) = self.now() else { return ClaimedRooms { _permit: None } };
            if let Ok(permit) = rooms.acquire_many_owned(count.min(size)).await {
                return ClaimedRooms { _permit: Some(permit) };
            }
        }
    }

    /// Whether so many seem to be free.
    pub fn has(&self, count: u32) -> bool {
        self.now().is_none_or(|(size, rooms)| rooms.available_permits() >= count.min(size) as usize)
    }
}

impl Disaggregation {
    pub(super) fn new(config: &WorkerConfig) -> Self {
        Self {
            role: AtomicU8::new(config.role.unwrap_or_default() as u8),
            said: Mutex::default(),
            asked_ms: AtomicU64::new(0),
            rooms: Rooms::default(),
            bootstrap: OnceLock::new(),
        }
    }
}

impl Worker {
    /// Which part of requests it is for.
    pub fn role(&self) -> Role {
        match self.parts.role.load(Relaxed) {
            role if role == Role::Prefill as u8 => Role::Prefill,
            role if role == Role::Decode as u8 => Role::Decode,
            _ => Role::Both,
        }
    }

    /// How its KV is moved.
    pub fn kv_transfer(&self) -> KvTransfer {
        let as_engine =
            || if self.parts.said.lock().is_some() { KvTransfer::Sglang } else { KvTransfer::Nixl };
        self.config.kv_transfer.unwrap_or_else(as_engine)
    }

    /// Whether it answers with KV that must come from elsewhere: it can compute no prompt.
    pub fn needs_partner(&self) -> bool {
        self.role() == Role::Decode && self.kv_transfer() == KvTransfer::Sglang
    }

    /// Port at which others learn where its KV is; the host is its own.
    pub fn bootstrap_port(&self) -> u16 {
        let said = || self.parts.said.lock().and_then(|said| said.bootstrap_port);
        self.config.bootstrap_port.or_else(said).map_or(BOOTSTRAP_PORT, NonZeroU16::get)
    }

    /// Its host as a URL has it.
    pub fn url_host(&self) -> &str {
        self.config.url.host().unwrap_or_default()
    }

    /// Where others learn where its KV is.
    pub fn bootstrap(&self) -> &Origin {
        self.parts.bootstrap.get_or_init(|| {
            let url = format!("http://{}:{}/", self.url_host(), self.bootstrap_port()).parse::<Uri>();
            // A URL's host and a port are one again.
            Origin::of(&url.unwrap_or_default(), None, false)
        })
    }

    /// Rooms for requests whose KV comes from elsewhere.
    pub fn rooms(&self) -> &Rooms {
        &self.parts.rooms
    }

    /// Whether it may be asked which part it is for: it comes up, or may have changed since.
    pub fn parts_are_due(&self, comes_up: bool, now: Duration) -> bool {
        let now_ms = now.as_millis() as u64;
        let is_split = || self.parts.said.lock().is_some_and(|said| said.role != Role::Both);
        let is_due = |asked_ms: u64| now_ms.saturating_sub(asked_ms) >= PARTS_ASKED_EVERY.as_millis() as u64;
        let due = comes_up || (is_split() && is_due(self.parts.asked_ms.load(Relaxed)));
        if due {
            self.parts.asked_ms.store(now_ms, Relaxed);
        }
        due
    }

    /// It says which part it is for. Returns whether that changes something.
    pub fn says_parts(&self, said: PartsSaid) -> bool {
        let before = self.parts.said.lock().replace(said);
        let role = self.config.role.unwrap_or(said.role);
        self.parts.role.store(role as u8, Relaxed);
        self.parts.rooms.resize(said.window.filter(|window| *window > 0 && role == Role::Decode));
        before.is_none_or(|before| before.role != said.role)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn there_are_never_more_rooms_than_the_worker_runs_at_once() {
        let rooms = Arc::new(Rooms::default());
        assert!(rooms.try_claim(7).is_some() && rooms.has(u32::MAX), "what is not known is no bound");
        rooms.resize(Some(2));
        let first = rooms.try_claim(1).unwrap();
        assert!(rooms.try_claim(2).is_none() && !rooms.has(2) && rooms.has(1));
        let second = rooms.try_claim(1).unwrap();
        let waiting = tokio::spawn({
            let rooms = Arc::clone(&rooms);
            async move { rooms.claim(9).await }
        });
        tokio::task::yield_now().await;
        drop(first);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "more than there are is all of them");
        assert!(rooms.try_claim(1).is_none(), "who waits is next");
        drop(second);
        let all = waiting.await.unwrap();
        assert!(!rooms.has(1));
        drop(all);
        assert!(rooms.has(2));
    }

    #[tokio::test]
    async fn who_waits_at_a_window_that_changes_waits_at_the_new_one() {
        let rooms = Arc::new(Rooms::default());
        rooms.resize(Some(1));
        let _held = rooms.try_claim(1).unwrap();
        let waiting = tokio::spawn({
            let rooms = Arc::clone(&rooms);
            async move { rooms.claim(1).await }
        });
        tokio::task::yield_now().await;
        rooms.resize(Some(1));
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "the same window is no change");
        rooms.resize(Some(3));
        let _one = waiting.await.unwrap();
        assert!(rooms.has(2) && !rooms.has(3));
    }
}
