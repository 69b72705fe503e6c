//! Connections of HTTP/1.1 that wait for a request, of one worker and one core. A worker that closes one is
//! noticed at once: its descriptor is given back then, and the pool learns after how long this worker closes
//! idle connections.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Wake, Waker},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{idle_timeout::IdleTimeout, origin::Link};
use crate::{
    clock::{self, Instant},
    limits::POOL_IDLE_TIMEOUT,
};

/// The connections of one core.
#[derive(Debug, Default)]
pub(super) struct Idle {
    /// The longest idle in front: the last used is taken first.
    links: Mutex<VecDeque<Waiting>>,
    bell: Arc<Bell>,
    /// Whether a task waits for the bell.
    watched: AtomicBool,
}

#[derive(Debug)]
struct Waiting {
    link: Link,
    since: Instant,
}

/// Rung when something comes over an idle connection: its end, as a rule.
#[derive(Debug, Default)]
struct Bell(Notify);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

impl Idle {
    /// A connection that is open as far as is known, the last used first, and how long it was idle.
    pub(super) fn take(&self, timeout: &IdleTimeout) -> Option<(Link, Duration)> {
        loop {
            let Waiting { mut link, since } = self.links.lock().pop_back()?;
            let idle = since.elapsed();
            if idle < lease(&link, timeout) && link.is_idle(Waker::noop()) {
                return Some((link, idle));
            }
        }
    }

    /// Keeps a connection, unless it is of no more use or there are so many. Whether a [`watch`] is to be
    /// begun.
    pub(super) fn keep(&self, mut link: Link, most: usize) -> bool {
        let waker = Waker::from(Arc::clone(&self.bell));
        if link.lease().is_zero() || !link.is_idle(&waker) {
            return false;
        }
        let mut links = self.links.lock();
        if links.len() >= most {
            return false;
        }
        links.push_back(Waiting { link, since: Instant::now() });
        // Under the lock, as where a watch ends.
        !self.watched.swap(true, Relaxed)
    }

    /// Closes what has waited too long or was closed at the other end.
    pub(super) fn sweep(&self, timeout: &IdleTimeout) {
        let (waker, now) = (Waker::from(Arc::clone(&self.bell)), Instant::now());
        timeout.age(now);
        let mut links = self.links.lock();
        let (mut stay, mut closed) = (VecDeque::with_capacity(links.len()), Vec::new());
        for mut waiting in links.drain(..) {
            let idle = now.saturating_duration_since(waiting.since);
            let open = waiting.link.is_idle(&waker);
            if !open {
                timeout.closed(idle, now);
            }
            if open && idle < lease(&waiting.link, timeout) {
                stay.push_back(waiting);
            } else {
                closed.push(waiting);
            }
        }
        *links = stay;
        // To close a socket is a call of the kernel each: no request waits for the lock meanwhile.
        drop(links);
        drop(closed);
    }

    /// Since when the longest idle waits.
    pub(super) fn longest(&self) -> Option<Instant> {
        self.links.lock().front().map(|waiting| waiting.since)
    }

    /// Closes the longest idle. Whether there was one.
    pub(super) fn shed(&self) -> bool {
        let shed = self.links.lock().pop_front();
        shed.is_some()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.links.lock().len()
    }

    /// Whether any wait; where none does the watch is over, and the next one that is kept begins another.
    fn is_watched_on(&self) -> bool {
        let links = self.links.lock();
        if links.is_empty() {
            self.watched.store(false, Relaxed);
        }
        !links.is_empty()
    }
}

/// Sweeps the pool of this core while connections wait there: when the bell rings, and when the first could
/// have waited too long.
pub(super) async fn watch<T>(owner: Weak<T>, find: impl Fn(&T) -> (&Idle, &IdleTimeout)) {
    loop {
        let Some(bell) = owner.upgrade().map(|owner| Arc::clone(&find(&owner).0.bell)) else { return };
        let _ = clock::timeout(POOL_IDLE_TIMEOUT, bell.0.notified()).await;
        let Some(owner) = owner.upgrade() else { return };
        let (idle, timeout) = find(&owner);
        idle.sweep(timeout);
        if !idle.is_watched_on() {
            return;
        }
    }
}

fn lease(link: &Link, timeout: &IdleTimeout) -> Duration {
    link.lease().min(timeout.lease())
}
