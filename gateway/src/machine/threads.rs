//! Threads of the gateway's own for work that may wait: at a lower priority than those that serve, so that
//! where cores are few short requests go first, and in slices, so that what is nearly known already does not
//! wait behind what is all new. Jobs take turns, a slice each; how many there may be at once is bounded. What
//! they do is not known here.

use std::{
    collections::VecDeque,
    io, iter,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, LazyLock},
    thread,
};

use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use crate::limits::LARGE_BODY_THREADS;

/// How much nicer these threads are than the one that starts them: in Linux a tenth of its share of a core
/// that both want.
#[cfg(target_os = "linux")]
const NICER: i32 = 10;

/// Does one slice of a job; whether another one is needed.
type Job = Box<dyn FnMut() -> bool + Send>;

/// The threads, which end with it.
pub(crate) struct Threads {
    queue: Arc<Queue>,
    places: usize,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    /// Jobs that wait or have a slice done.
    jobs: usize,
    closed: bool,
}

/// Those where large bodies are decoded and read. Few, and always the same: glibc's allocator keeps what each
/// has had for itself. `None` where they cannot be started.
pub(crate) fn large_bodies() -> Option<&'static Threads> {
    static LARGE: LazyLock<io::Result<Threads>> =
        LazyLock::new(|| Threads::start("bodies", LARGE_BODY_THREADS, usize::MAX));
    LARGE.as_ref().ok()
}

impl Threads {
    /// So many threads, for at most so many jobs at once.
    pub(crate) fn start(name: &'static str, count: usize, places: usize) -> io::Result<Self> {
        // Made first: if a thread cannot be started, those before it end.
        let threads = Self { queue: Arc::default(), places };
        for _ in 0..count {
            let queue = Arc::clone(&threads.queue);
            thread::Builder::new().name(name.to_owned()).spawn(move || queue.serve())?;
        }
        Ok(threads)
    }

    /// Has `job` done, slice by slice, until it gives a result; `None` if there is no place for it. One whose
    /// result no task waits for any more is given up; of a job that panics nothing comes.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        mut job: impl FnMut() -> Option<T> + Send + 'static,
    ) -> Option<oneshot::Receiver<T>> {
        let (done, result) = oneshot::channel();
        let mut done = Some(done);
        let slice = move || {
            if done.as_ref().is_none_or(oneshot::Sender::is_closed) {
                return false;
            }
            let Some(value) = job() else { return true };
            // No receiver means that the client has left.
            done.take().map(|done| done.send(value));
            false
        };
        let mut state = self.queue.state.lock();
        if state.jobs >= self.places {
            return None;
        }
        state.jobs += 1;
        state.waiting.push_back(Box::new(slice));
        drop(state);
        self.queue.changed.notify_one();
        Some(result)
    }
}

impl Threads {
    /// Has `job` done some time, though no task waits for it.
    pub(crate) fn later(&self, job: impl FnOnce() + Send + 'static) {
        let mut job = Some(job);
        let whole = move || {
            if let Some(job) = job.take() {
                job();
            }
            false
        };
        let mut state = self.queue.state.lock();
        state.jobs += 1;
        state.waiting.push_back(Box::new(whole));
        drop(state);
        self.queue.changed.notify_one();
    }
}

#[cfg(test)]
impl Threads {
    /// Jobs that wait or run.
    pub(crate) fn jobs(&self) -> usize {
        self.queue.state.lock().jobs
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue.state.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").field("places", &self.places).finish_non_exhaustive()
    }
}

impl Queue {
    fn serve(&self) {
        step_back();
        for mut job in iter::from_fn(|| self.take()) {
            let more = catch_unwind(AssertUnwindSafe(&mut job)).unwrap_or(false);
            let mut state = self.state.lock();
            if more {
                state.waiting.push_back(job);
            } else {
                state.jobs -= 1;
            }
            drop(state);
            // A scheduler that lets threads run to the end of their time may look here who else wants the
            // core.
            thread::yield_now();
        }
    }

    /// The job whose turn it is; `None` when no more will come.
    fn take(&self) -> Option<Job> {
        let mut state = self.state.lock();
        while !state.closed {
            if let Some(job) = state.waiting.pop_front() {
                return Some(job);
            }
            self.changed.wait(&mut state);
        }
        None
    }
}

/// Lowers the priority of the thread that calls this. Linux alone has one for each thread (`setpriority(2)`,
/// "C library/kernel differences"); elsewhere the process would step back as a whole.
fn step_back() {
    #[cfg(target_os = "linux")]
    {
        let nice = rustix::process::getpriority_process(None).unwrap_or(0);
        if let Err(error) = rustix::process::setpriority_process(None, (nice + NICER).min(19)) {
            tracing::warn!(%error, "a thread for work that may wait keeps the priority of those that serve");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job of so many slices that ends with a value, once `go` is given.
    fn of_slices<T: Copy>(slices: usize, value: T) -> impl FnMut() -> Option<T> {
        let mut left = slices;
        move || {
            left -= 1;
            (left == 0).then_some(value)
        }
    }

    /// Keeps the only thread busy until it is dropped.
    fn busy(threads: &Threads) -> impl Drop {
        struct Open(Option<std::sync::mpsc::Sender<()>>);
        impl Drop for Open {
            fn drop(&mut self) {
                self.0.take();
            }
        }
        let (open, closed) = std::sync::mpsc::channel::<()>();
        let (begun, begins) = std::sync::mpsc::channel();
        let result = threads.run(move || {
            begun.send(()).unwrap();
            closed.recv().err().map(drop)
        });
        begins.recv().unwrap();
        // Its answer is awaited by nobody, and it was not closed when it began.
        drop(result);
        Open(Some(open))
    }

    #[tokio::test]
    async fn a_short_job_does_not_wait_for_a_long_one_before_it() {
        let threads = Threads::start("test", 1, 8).unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let job = |name: &'static str, slices| {
            let (order, mut job) = (Arc::clone(&order), of_slices(slices, name));
            threads.run(move || job().inspect(|name| order.lock().push(*name))).unwrap()
        };
        let gate = busy(&threads);
        let (long, short) = (job("long", 20), job("short", 2));
        drop(gate);
        long.await.unwrap();
        short.await.unwrap();
        assert_eq!(*order.lock(), ["short", "long"]);
    }

    #[tokio::test]
    async fn places_are_bounded_and_come_back() {
        let threads = Threads::start("test", 1, 2).unwrap();
        let gate = busy(&threads);
        let second = threads.run(of_slices(1, 2)).unwrap();
        assert!(threads.run(of_slices(1, 3)).is_none());
        drop(gate);
        assert_eq!(second.await, Ok(2));
        // The place is given back after the result.
        while threads.jobs() > 0 {
            thread::yield_now();
        }
        assert_eq!(threads.run(of_slices(3, 4)).unwrap().await, Ok(4));
    }

    #[tokio::test]
    async fn a_job_that_panics_or_that_nobody_waits_for_leaves_the_thread_to_others() {
        let threads = Threads::start("test", 1, 4).unwrap();
        let panics = threads.run(|| -> Option<()> { panic!("as a tokenizer might") }).unwrap();
        assert!(panics.await.is_err());
        let endless = threads.run(|| None::<()>).unwrap();
        drop(endless);
        assert_eq!(threads.run(of_slices(2, 1)).unwrap().await, Ok(1));
        while threads.jobs() > 0 {
            thread::yield_now();
        }
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn they_are_nicer_than_the_thread_that_starts_them_which_stays_as_it_was() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        let threads = Threads::start("test", 1, 1).unwrap();
        let theirs = threads.run(move || Some(nice())).unwrap().await.unwrap();
        assert_eq!((theirs, nice()), ((before + NICER).min(19), before));
    }
}
