//! How many connections a listener takes, how long they may be silent and stay at the end, and whether they
//! are asked to leave: what of a server changes while it runs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use keyway_clients::clients::Clients;

use crate::{
    clock,
    limits::{CUT_PATIENCE, DRAIN_LOOK},
};

/// A listener's bounds, and the connections that keep to them.
#[derive(Debug)]
pub struct Intake {
    max_connections: AtomicUsize,
    /// What the process can hold, whatever is configured.
    fit: AtomicUsize,
    /// Those that are open.
    pub(super) clients: Arc<Clients>,
    header_read_ms: AtomicU64,
    drain_timeout_ms: AtomicU64,
    leaving: AtomicBool,
}

impl Intake {
    /// At most so many connections at once; further ones wait until one has gone. Heads get `header_read`,
    /// and at the end requests get `drain_timeout`.
    pub fn new(max_connections: usize, header_read: Duration, drain_timeout: Duration) -> Arc<Self> {
        let intake = Self {
            max_connections: AtomicUsize::default(),
            fit: AtomicUsize::new(usize::MAX),
            clients: Arc::default(),
            header_read_ms: AtomicU64::default(),
            drain_timeout_ms: AtomicU64::default(),
            leaving: AtomicBool::default(),
        };
        intake.set(max_connections, header_read, drain_timeout);
        Arc::new(intake)
    }

    /// Other bounds from now on; who is connected stays.
    pub fn set(&self, max_connections: usize, header_read: Duration, drain_timeout: Duration) {
        self.header_read_ms.store(header_read.as_millis() as u64, Ordering::Relaxed);
        self.drain_timeout_ms.store(drain_timeout.as_millis() as u64, Ordering::Relaxed);
        self.max_connections.store(max_connections, Ordering::Release);
        self.clients.freed.notify_one();
    }

    /// Never more than the process can hold.
    pub fn hold_at_most(&self, fit: usize) {
        self.fit.store(fit, Ordering::Release);
    }

    /// Closes what is still open, and waits until it is, so that what it was is written.
    pub async fn cut(&self) {
        self.clients.cut();
        let closed = async {
            while self.clients.count() > 0 {
                clock::sleep(DRAIN_LOOK).await;
            }
        };
        // Who is not gone by then is cut with the process.
        let _ = clock::timeout(CUT_PATIENCE, closed).await;
    }

    /// How many connections there may be.
    pub fn bound(&self) -> usize {
        self.max_connections.load(Ordering::Acquire).min(self.fit.load(Ordering::Acquire))
    }

    /// From now on each answer over HTTP/1.1 is its connection's last.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    /// Whether connections are asked to leave.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Time for a request's head to come.
    pub(super) fn header_read(&self) -> Duration {
        Duration::from_millis(self.header_read_ms.load(Ordering::Relaxed))
    }

    /// Time that requests get after the end began.
    pub fn drain_timeout(&self) -> Duration {
        Duration::from_millis(self.drain_timeout_ms.load(Ordering::Relaxed))
    }
}
