//! Tasks that each carry one request after the other. There are as many as requests under way at most: a
//! task of its own for each request would take as long to make as the request to be written.

use std::{
    future::poll_fn,
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
};

use futures_util::task::AtomicWaker;
use tokio::runtime::Handle;

/// What is done with each job, in the lane that took it.
pub(super) trait Work: Send + Sync + 'static {
    /// What one request is.
    type Job: Send + 'static;

    /// Does it; calls `free` when another may be taken, before it tells anybody of the end.
    fn run(&self, job: Self::Job, free: impl FnOnce() + Send) -> impl Future<Output = ()> + Send;
}

/// The lanes of one kind of work. Those that wait end with it.
pub(super) struct Lanes<W: Work>(Arc<Shared<W>>);

struct Shared<W: Work> {
    work: W,
    idle: Mutex<Idle<W::Job>>,
}

struct Idle<J> {
    /// Those that wait for a job, the last to end at the end.
    lanes: Vec<Arc<Lane<J>>>,
    /// No job comes any more.
    closed: bool,
}

struct Lane<J> {
    next: Mutex<Next<J>>,
    waker: AtomicWaker,
}

enum Next<J> {
    Unknown,
    Job(J),
    Nothing,
}

impl<W: Work> Lanes<W> {
    /// Those of this work; there is none before the first job.
    pub(super) fn new(work: W) -> Self {
        Self(Arc::new(Shared { work, idle: Mutex::new(Idle { lanes: Vec::new(), closed: false }) }))
    }

    /// Gives `job` to a lane that waits, else to a new one.
    pub(super) fn give(&self, job: W::Job, runtime: &Handle) {
        let idle = locked(&self.0.idle).lanes.pop();
        match idle {
            Some(lane) => lane.go_on(Next::Job(job)),
            None => drop(runtime.spawn(lane(Arc::clone(&self.0), job))),
        }
    }
}

impl<W: Work> Drop for Lanes<W> {
    fn drop(&mut self) {
        let mut idle = locked(&self.0.idle);
        idle.closed = true;
        let lanes = mem::take(&mut idle.lanes);
        drop(idle);
        for lane in lanes {
            lane.go_on(Next::Nothing);
        }
    }
}

async fn lane<W: Work>(shared: Arc<Shared<W>>, first: W::Job) {
    let lane = Arc::new(Lane { next: Mutex::new(Next::Unknown), waker: AtomicWaker::new() });
    let mut job = first;
    loop {
        shared.work.run(job, || shared.wait(&lane)).await;
        let next = poll_fn(|context| {
            lane.waker.register(context.waker());
            match mem::replace(&mut *locked(&lane.next), Next::Unknown) {
                Next::Unknown => Poll::Pending,
                Next::Job(job) => Poll::Ready(Some(job)),
                Next::Nothing => Poll::Ready(None),
            }
        });
        match next.await {
            Some(next) => job = next,
            None => return,
        }
    }
}

impl<W: Work> Shared<W> {
    /// Puts a lane among those that wait.
    fn wait(&self, lane: &Arc<Lane<W::Job>>) {
        let mut idle = locked(&self.idle);
        if idle.closed {
            drop(idle);
            lane.go_on(Next::Nothing);
        } else {
            idle.lanes.push(Arc::clone(lane));
        }
    }
}

impl<J> Lane<J> {
    fn go_on(&self, next: Next<J>) {
        *locked(&self.next) = next;
        self.waker.wake();
    }
}

/// Nothing that panics is done while it is held.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{
        sync::{Semaphore, mpsc},
        time::timeout,
    };

    use super::*;

    /// Tells of each job's end, once it may end.
    struct Told {
        ends: mpsc::UnboundedSender<(u32, tokio::task::Id)>,
        may_end: Arc<Semaphore>,
    }

    impl Work for Told {
        type Job = u32;

        async fn run(&self, job: u32, free: impl FnOnce() + Send) {
            self.may_end.acquire().await.unwrap().forget();
            free();
            self.ends.send((job, tokio::task::id())).unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn lanes_are_used_again_and_end_with_their_work() {
        let (ends, mut told) = mpsc::unbounded_channel();
        let may_end = Arc::new(Semaphore::new(0));
        let lanes = Lanes::new(Told { ends, may_end: Arc::clone(&may_end) });
        let mut seen = std::collections::HashSet::new();
        for round in 0..50 {
            for job in 0..8 {
                lanes.give(round * 8 + job, &Handle::current());
            }
            may_end.add_permits(8);
            let mut jobs = Vec::new();
            for _ in 0..8 {
                let (job, task) = told.recv().await.unwrap();
                jobs.push(job);
                seen.insert(task);
            }
            jobs.sort_unstable();
            assert_eq!(jobs, (round * 8..round * 8 + 8).collect::<Vec<_>>());
        }
        assert_eq!(seen.len(), 8, "as many as were under way together");
        lanes.give(1000, &Handle::current());
        drop(lanes);
        may_end.add_permits(1);
        assert_eq!(told.recv().await.unwrap().0, 1000, "what is under way goes on");
        assert!(timeout(Duration::from_secs(10), told.recv()).await.unwrap().is_none(), "and then all end");
    }
}
