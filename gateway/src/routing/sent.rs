//! Who is told at once where requests are sent: those that tell other gateways of it. Where nobody listens it
//! costs a request one look at a number.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
};

use keyway_core::WorkerId;
use parking_lot::{Mutex, RwLock};

/// Workers that are kept apart between two looks; with more, all are looked at.
const WORKERS_MAX: usize = 16;

/// All who listen for requests that are sent.
#[derive(Debug, Default)]
pub struct SentSignal {
    /// How many there are, or were before the last who came.
    count: AtomicUsize,
    listeners: RwLock<Vec<Weak<SentLately>>>,
}

/// Where requests were sent since its listener last looked.
#[derive(Debug, Default)]
pub struct SentLately(Mutex<Lately>);

#[derive(Debug, Default)]
struct Lately {
    workers: Vec<WorkerId>,
    /// There were more than [`WORKERS_MAX`].
    is_over: bool,
    waker: Option<Waker>,
}

/// The workers that requests were sent to.
#[derive(Debug, PartialEq, Eq)]
pub enum SentTo {
    /// At most so many as are kept apart, and none twice.
    These(Vec<WorkerId>),
    /// So many that each is to be looked at.
    Many,
}

impl SentSignal {
    /// One who listens from now on, until it is dropped.
    pub fn listen(&self) -> Arc<SentLately> {
        let listener = Arc::<SentLately>::default();
        let mut listeners = self.listeners.write();
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(Arc::downgrade(&listener));
        self.count.store(listeners.len(), Relaxed);
        listener
    }

    /// A request is sent there, and counts in its load.
    pub(super) fn to(&self, worker: WorkerId) {
        if self.count.load(Relaxed) > 0 {
            self.listeners.read().iter().filter_map(Weak::upgrade).for_each(|listener| listener.sent(worker));
        }
    }
}

impl SentLately {
    fn sent(&self, worker: WorkerId) {
        let mut lately = self.0.lock();
        if !lately.workers.contains(&worker) {
            if lately.workers.len() < WORKERS_MAX {
                lately.workers.push(worker);
            } else {
                lately.is_over = true;
            }
        }
        // Its listener looks at all that come until then.
        let waker = lately.waker.take();
        drop(lately);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ready once a request was sent that [`SentLately::take`] has not given yet.
    pub fn poll_sent(&self, cx: &Context<'_>) -> Poll<()> {
        let mut lately = self.0.lock();
        if !lately.workers.is_empty() {
            return Poll::Ready(());
        }
        lately.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Where requests were sent since the last time.
    pub fn take(&self) -> SentTo {
        let mut lately = self.0.lock();
        let workers = std::mem::take(&mut lately.workers);
        if std::mem::take(&mut lately.is_over) { SentTo::Many } else { SentTo::These(workers) }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use super::*;

    #[derive(Debug, Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn a_listener_is_woken_once_for_all_that_is_sent_until_it_looks() {
        let (sent, woken) = (SentSignal::default(), Arc::<Woken>::default());
        let waker = Arc::clone(&woken).into();
        let cx = Context::from_waker(&waker);
        let worker = WorkerId;
        sent.to(worker(9));
        let (one, other) = (sent.listen(), sent.listen());
        assert!(one.poll_sent(&cx).is_pending());
        for id in [3, 1, 3] {
            sent.to(worker(id));
        }
        assert_eq!(woken.0.load(Relaxed), 1);
        assert!(one.poll_sent(&cx).is_ready());
        assert_eq!(one.take(), SentTo::These(vec![worker(3), worker(1)]));
        assert!(one.poll_sent(&cx).is_pending());
        for id in 0..=WORKERS_MAX as u32 {
            sent.to(worker(id));
        }
        assert_eq!((one.take(), other.take()), (SentTo::Many, SentTo::Many));
        assert_eq!(other.take(), SentTo::These(Vec::new()));
        drop((one, other));
        let _third = sent.listen();
        assert_eq!(sent.listeners.read().len(), 1, "who is gone is let go of");
    }
}
