//! A worker that is for a part of requests: which part, how its KV is moved, and how many requests it may
//! have whose KV comes from elsewhere. What the operator says of it counts; else what an SGLang says itself.

use std::{
    num::NonZeroU16,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use http::Uri;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Worker;
use crate::{
    config::{KvTransfer, Role, WorkerConfig},
    limits::{BOOTSTRAP_PORT, NO_PULL_PAUSE, PARTS_ASKED_EVERY},
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

/// Of the byte that says which part of requests a worker is for: whether it exchanges KV with others.
const EXCHANGES: u8 = 1 << 7;

/// A worker's part in requests.
#[derive(Debug)]
pub struct Disaggregation {
    /// Its role, and whether it exchanges KV. Looked at for each request and worker, hence in one byte and
    /// without a lock.
    role: AtomicU8,
    said: Mutex<Option<PartsSaid>>,
    /// Port at which others fetch what it has cached; 0: at none.
    kv_source_port: AtomicU16,
    /// Until when it is not asked to fetch, in milliseconds of the gateway's clock; 0: it never refused to.
    no_pull_until_ms: AtomicU64,
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
        let port = config.kv_source_port.map_or(0, NonZeroU16::get);
        let exchanges = if port == 0 { 0 } else { EXCHANGES };
        Self {
            role: AtomicU8::new(config.role.unwrap_or_default() as u8 | exchanges),
            said: Mutex::default(),
            kv_source_port: AtomicU16::new(port),
            no_pull_until_ms: AtomicU64::new(0),
            asked_ms: AtomicU64::new(0),
            rooms: Rooms::default(),
            bootstrap: OnceLock::new(),
        }
    }
}

impl Worker {
    /// Which part of requests it is for.
    pub fn role(&self) -> Role {
        match self.parts.role.load(Relaxed) & !EXCHANGES {
            role if role == Role::Prefill as u8 => Role::Prefill,
            role if role == Role::Decode as u8 => Role::Decode,
            _ => Role::Both,
        }
    }

    /// Whether KV of others' prompts may come from it, or of its own from others.
    pub fn moves_kv(&self) -> bool {
        let parts = self.parts.role.load(Relaxed);
        parts == Role::Prefill as u8 || parts & EXCHANGES != 0
    }

    /// Whether it fetches from others like it what they have cached, and they from it.
    pub fn exchanges(&self, now: Duration) -> bool {
        self.parts.role.load(Relaxed) & EXCHANGES != 0
            && self.parts.no_pull_until_ms.load(Relaxed) <= now.as_millis() as u64
    }

    /// Port at which others fetch what it has cached; the host is its own.
    pub fn kv_source_port(&self) -> u16 {
        self.parts.kv_source_port.load(Relaxed)
    }

    /// It says at which port others fetch what it has cached, if at any. What is configured counts more.
    pub(super) fn says_kv_source(&self, port: Option<NonZeroU16>) {
        if self.config.kv_source_port.is_some() {
            return;
        }
        self.parts.kv_source_port.store(port.map_or(0, NonZeroU16::get), Relaxed);
        if port.is_some() {
            self.parts.role.fetch_or(EXCHANGES, Relaxed);
        } else {
            self.parts.role.fetch_and(!EXCHANGES, Relaxed);
        }
    }

    /// It has refused to fetch from others. Returns whether that is news.
    pub fn refuses_to_pull(&self, now: Duration) -> bool {
        self.parts.no_pull_until_ms.swap((now + NO_PULL_PAUSE).as_millis() as u64, Relaxed) == 0
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
        let exchanges = self.parts.role.load(Relaxed) & EXCHANGES;
        self.parts.role.store(role as u8 | exchanges, Relaxed);
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
