//! How many connections a listener takes, how long they may be silent and stay at the end, and whether they are asked to leave: what of a
//! server changes while it runs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;

/// A listener's bounds. The accepting loop alone takes slots.
#[derive(Debug)]
pub struct Intake {
    max_connections: AtomicUsize,
    /// What the process can hold, whatever is configured.
    fit: AtomicUsize,
    open: AtomicUsize,
    freed: Notify,
    header_read_ms: AtomicU64,
    drain_timeout_ms: AtomicU64,
    leaving: AtomicBool,
}

/// A connection's place; given back on drop.
#[derive(Debug)]
pub(super) struct Slot(Arc<Intake>);

impl Intake {
    /// At most so many connections at once; further ones wait in the kernel's queue. Heads get `header_read`, and at the end
    /// requests get `drain_timeout`.
    pub fn new(max_connections: usize, header_read: Duration, drain_timeout: Duration) -> Arc<Self> {
        let intake = Self {
            max_connections: AtomicUsize::default(),
            fit: AtomicUsize::new(usize::MAX),
            open: AtomicUsize::default(),
            freed: Notify::new(),
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
        self.freed.notify_one();
    }

    /// Never more than the process can hold.
    pub fn hold_at_most(&self, fit: usize) {
        self.fit.store(fit, Ordering::Release);
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

    /// Waits for a place.
    pub(super) async fn slot(self: &Arc<Self>) -> Slot {
        loop {
            // A place that is given back in between leaves a permit.
            let freed = self.freed.notified();
            if self.open.load(Ordering::Acquire) < self.bound() {
                self.open.fetch_add(1, Ordering::AcqRel);
                return Slot(Arc::clone(self));
            }
            freed.await;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::AcqRel);
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_bound_can_be_moved_while_connections_wait_for_it() {
        let intake = Intake::new(1, Duration::ZERO, Duration::ZERO);
        let first = intake.slot().await;
        let mut second = Box::pin(intake.slot());
        assert!(second.as_mut().now_or_never().is_none());
        intake.set(2, Duration::ZERO, Duration::ZERO);
        let second = second.await;
        intake.set(1, Duration::ZERO, Duration::ZERO);
        drop(first);
        assert!(intake.slot().now_or_never().is_none(), "one is still open, and one is the bound");
        drop(second);
        assert!(intake.slot().now_or_never().is_some());
    }

    #[tokio::test]
    async fn what_the_process_cannot_hold_is_not_let_in_whatever_is_configured() {
        let intake = Intake::new(10, Duration::ZERO, Duration::ZERO);
        intake.hold_at_most(1);
        let first = intake.slot().await;
        assert!(intake.slot().now_or_never().is_none());
        intake.set(20, Duration::ZERO, Duration::ZERO);
        assert!(
            (intake.slot().now_or_never(), intake.bound()).0.is_none(),
            "a reload changes no limit of the process"
        );
        drop(first);
        assert!(intake.slot().now_or_never().is_some());
    }
}
