//! Threads that share the tasks of one operation with its caller. A few microseconds decide here: no
//! allocation, no lock and no queue on the way of a task, and a thread that has nothing to do spins briefly
//! before it sleeps.
//!
//! The caller opens a job, works itself, closes the job when no task is left, and waits for those who entered
//! it; a thread that wakes too late finds it closed and costs nothing. Nested calls, and calls while another
//! thread has the pool, run on the caller alone. What a task computes must not depend on who runs it.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// Turns of the waiting loop before a thread sleeps: about 100 us, longer than the gaps between the
/// operations of a layer, short against a scheduler's time slice.
const SPINS: u32 = 5000;

/// Bits of [`Shared::state`]: how many workers are inside the job; whether more may enter; the job's number.
const INSIDE: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const NEXT_JOB: u64 = 1 << 32;

/// Worker threads; they end when this is dropped.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    state: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// The next task of the job that no thread has taken.
    next: AtomicUsize,
    /// Whether a caller has the pool.
    taken: AtomicBool,
    ending: AtomicBool,
    /// What the first worker that panicked in the job panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone)]
struct Job {
    /// Valid as long as the job is open or a thread is inside.
    work: *const (dyn Fn(usize) + Sync),
    tasks: usize,
    caller: Thread,
}

// SAFETY: `job` is written only by the caller that has the pool, while the job is closed and no thread is
// inside; workers read it only inside. `work` is `Sync`, and is called only inside.
#[allow(unsafe_code)]
unsafe impl Send for Shared {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("state", &self.state).finish_non_exhaustive()
    }
}

// === impl Pool ===

impl Pool {
    /// `workers` threads, or as many of them as the system grants.
    pub(crate) fn new(workers: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            taken: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let spawn = |i| {
            let shared = Arc::clone(&shared);
            thread::Builder::new().name(format!("keyway-cpu-{i}")).spawn(move || shared.serve()).ok()
        };
        let workers = (1..=workers).map_while(spawn).collect();
        Self { shared, workers }
    }

    /// How many threads a job can have, the caller's among them.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work` with each of `0..tasks` once, on any of the threads, and returns when all is done. A
    /// panic in a task is passed on; tasks not yet begun are then left out.
    pub(crate) fn run(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        let alone = tasks <= 1 || self.workers.is_empty();
        if alone || self.shared.taken.swap(true, Ordering::Acquire) {
            (0..tasks).for_each(work);
            return;
        }
        self.open(tasks, work);
        for worker in self.workers.iter().take(tasks - 1) {
            worker.thread().unpark();
        }
        let own = catch_unwind(AssertUnwindSafe(|| self.shared.take_tasks(tasks, work)));
        if own.is_err() {
            self.shared.next.store(tasks, Ordering::Relaxed);
        }
        self.shared.close();
        let theirs = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.shared.taken.store(false, Ordering::Release);
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    #[allow(unsafe_code)]
    fn open(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime changes. `run` returns, or unwinds, after `close`: no thread is inside
        // then.
        let work: *const (dyn Fn(usize) + Sync + 'static) = unsafe { std::mem::transmute(work) };
        let job = Job { work, tasks, caller: thread::current() };
        // SAFETY: this caller has the pool, and the job before was closed and left by all.
        unsafe { *self.shared.job.get() = Some(job) };
        self.shared.next.store(0, Ordering::Relaxed);
        let number = self.shared.state.load(Ordering::Relaxed) & !(NEXT_JOB - 1);
        // A thread that enters sees the job.
        self.shared.state.store(number.wrapping_add(NEXT_JOB) | OPEN, Ordering::Release);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::Release);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        for worker in self.workers.drain(..) {
            // A worker catches the panics of tasks and has none of its own.
            let _ = worker.join();
        }
    }
}

// === impl Shared ===

impl Shared {
    /// Takes and runs tasks until none is left.
    fn take_tasks(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            work(task);
        }
    }

    /// Lets no thread in any more and waits until all have left; what they wrote is visible then.
    fn close(&self) {
        let mut state = self.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while state & INSIDE != 0 {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                thread::park();
            }
            state = self.state.load(Ordering::Acquire);
        }
    }

    /// What a worker thread does: enters one job after the other and takes its tasks, until the pool ends.
    fn serve(&self) {
        let mut last = 0;
        while let Some(job) = self.enter(&mut last) {
            self.work(&job);
            // The clone of the handle outlives the job, which may be replaced as soon as all have left.
            let before = self.state.fetch_sub(1, Ordering::AcqRel);
            if before & INSIDE == 1 && before & OPEN == 0 {
                job.caller.unpark();
            }
        }
    }

    /// Waits for a job other than number `last` and enters it; `None` when the pool ends.
    fn enter(&self, last: &mut u64) -> Option<Job> {
        let mut spins = 0;
        while !self.ending.load(Ordering::Acquire) {
            let state = self.state.load(Ordering::Relaxed);
            let number = state / NEXT_JOB;
            if state & OPEN != 0 && number != *last {
                let entered =
                    self.state.compare_exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed);
                if entered.is_ok() {
                    *last = number;
                    return self.job();
                }
            } else if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                thread::park();
                spins = 0;
            }
        }
        None
    }

    /// The job; only for who is inside.
    #[allow(unsafe_code)]
    fn job(&self) -> Option<Job> {
        // SAFETY: no thread writes it while one is inside.
        unsafe { (*self.job.get()).clone() }
    }

    /// Takes part in the job this thread has entered.
    #[allow(unsafe_code)]
    fn work(&self, job: &Job) {
        // SAFETY: this thread is inside, so the caller still waits.
        let work = unsafe { &*job.work };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_tasks(job.tasks, work))) {
            self.next.store(job.tasks, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }
}

#[cfg(test)]
mod tests;
