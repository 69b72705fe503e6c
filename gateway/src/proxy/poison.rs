//! Requests that break workers ([`keyway_core::poison`]): what breaks two of them before the head of an
//! answer is tried at no third; and its body, or that of a stream that breaks two before its first content,
//! is refused for a while. Bodies are known by a keyed hash.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};
use std::time::Duration;

use keyway_core::{
    index::WorkerId,
    poison::{BROKEN_MAX, Poison},
};
use keyway_wire::block_hash::{Chain, HashKey};
use parking_lot::Mutex;

use crate::{error::Error, proxy::asked::Asked};

/// The bodies that broke workers lately.
#[derive(Debug)]
pub struct Poisons {
    poison: Mutex<Poison>,
    /// Whether there may be any, for those who ask without the lock.
    any: AtomicBool,
    key: HashKey,
}

/// Workers that broke behind one request before the head of an answer came.
#[derive(Debug, Default)]
pub struct Broken(AtomicUsize);

/// A body that has broken a worker, and is tried again.
#[derive(Debug, Clone)]
pub struct Suspect {
    poisons: Arc<Poisons>,
    name: u64,
}

impl Broken {
    /// Counts one more worker whose connection broke before the head of an answer.
    pub fn note(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// As many, for the same request in other words.
    #[must_use]
    pub fn so_far(&self) -> Self {
        Self(AtomicUsize::new(self.0.load(Ordering::Relaxed)))
    }

    /// Whether the request may be tried at one more worker.
    pub fn may_break_another(&self) -> bool {
        self.0.load(Ordering::Relaxed) < BROKEN_MAX
    }
}

impl Poisons {
    /// None yet. They are kept by names that this key makes.
    pub fn new(key: HashKey) -> Self {
        Self { poison: Mutex::default(), any: AtomicBool::new(false), key }
    }

    /// Whether a body may be sent to a worker, and whether something is held against it.
    ///
    /// # Errors
    /// [`Error::BreaksWorkers`] while it is refused.
    pub fn look(self: &Arc<Self>, body: &[u8], now: Duration) -> Result<Option<Suspect>, Error> {
        if !self.any.load(Ordering::Relaxed) || body.is_empty() {
            return Ok(None);
        }
        let name = self.name(body);
        let mut poison = self.poison.lock();
        self.any.store(!poison.is_empty(now), Ordering::Relaxed);
        if let Some(retry_after) = poison.refused(name, now) {
            return Err(Error::BreaksWorkers { retry_after });
        }
        Ok(poison.knows(name).then(|| Suspect { poisons: Arc::clone(self), name }))
    }

    /// A worker broke behind this request, before anything of an answer had come.
    pub fn broke(self: &Arc<Self>, asked: &Asked, worker: WorkerId, now: Duration) -> Option<Suspect> {
        let (body, id) = (&asked.body, asked.record.id());
        if body.is_empty() {
            return None;
        }
        let name = self.name(body);
        let mut poison = self.poison.lock();
        self.any.store(true, Ordering::Relaxed);
        if let Some(term) = poison.broke(name, worker, now) {
            drop(poison);
            let (bytes, seconds) = (body.len(), term.as_secs());
            tracing::warn!(
                id,
                bytes,
                seconds,
                "a request has broken two workers or more; its like is refused"
            );
        }
        Some(Suspect { poisons: Arc::clone(self), name })
    }

    fn name(&self, body: &[u8]) -> u64 {
        Chain::new(self.key, b"poison").hash(body)
    }
}

impl Suspect {
    /// A worker has answered it whole.
    pub fn answered(&self, now: Duration) {
        self.poisons.poison.lock().answered(self.name, now);
    }
}
