//! Where forms are compiled: on threads whose stack fits the deepest form that the bounds let through, a few
//! at once, and none waited for without end. What a thread of these does, no other request waits for but one
//! with a form.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use super::error::{FormError, NotCompiled};
use crate::limits::{
    GRAMMAR_COMPILE_MAX, GRAMMAR_STACK_BYTES, GRAMMAR_THREADS_MAX, GRAMMAR_WAIT_MAX, GRAMMAR_WAITING_MAX,
};

/// The places of those that compile.
#[derive(Debug, Default)]
pub(super) struct Threads {
    taken: Mutex<Taken>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Taken {
    working: usize,
    waiting: usize,
}

/// One place, free again when it is dropped.
struct Place(Arc<Threads>);

impl Threads {
    /// Does `work` on a thread of its own and waits for it.
    pub(super) fn run<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NotCompiled> {
        let place = self.place().ok_or(NotCompiled::Busy)?;
        let (done, result) = mpsc::sync_channel(1);
        let named = thread::Builder::new().name("keyway-form".to_owned()).stack_size(GRAMMAR_STACK_BYTES);
        let spawned = named.spawn(move || {
            // Dropped in this order, also by a panic: who is told has the place's room again.
            let (done, place) = (done, place);
            let result = work();
            drop(place);
            // Who asked may wait no longer.
            let _ = done.send(result);
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "a form cannot be compiled for want of a thread");
            return Err(NotCompiled::Busy);
        }
        result.recv_timeout(GRAMMAR_COMPILE_MAX).map_err(|gone| {
            NotCompiled::Form(match gone {
                mpsc::RecvTimeoutError::Timeout => FormError::Slow,
                mpsc::RecvTimeoutError::Disconnected => FormError::Panic,
            })
        })
    }

    /// A place, as soon as there is one.
    fn place(self: &Arc<Self>) -> Option<Place> {
        let mut taken = self.lock();
        if taken.working >= GRAMMAR_THREADS_MAX {
            if taken.waiting >= GRAMMAR_WAITING_MAX {
                return None;
            }
            taken.waiting += 1;
            let full = |taken: &mut Taken| taken.working >= GRAMMAR_THREADS_MAX;
            let waited = self.freed.wait_timeout_while(taken, GRAMMAR_WAIT_MAX, full);
            taken = waited.unwrap_or_else(PoisonError::into_inner).0;
            taken.waiting -= 1;
            if taken.working >= GRAMMAR_THREADS_MAX {
                return None;
            }
        }
        taken.working += 1;
        Some(Place(Arc::clone(self)))
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.lock().working -= 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_the_form_s_fault_and_frees_its_place() {
        let threads = Arc::new(Threads::default());
        for _ in 0..2 * GRAMMAR_THREADS_MAX {
            let failed = threads.run(|| -> u8 { panic!("an assertion of the compiler") });
            assert_eq!(failed, Err(NotCompiled::Form(FormError::Panic)));
        }
        assert_eq!(threads.run(|| 7), Ok(7));
        assert_eq!(threads.lock().working, 0);
    }

    #[test]
    fn only_so_many_work_at_once_and_all_get_their_turn() {
        let threads = Arc::new(Threads::default());
        let most = Arc::new(Mutex::new(0));
        thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| {
                    let (threads, most) = (Arc::clone(&threads), Arc::clone(&most));
                    let inner = Arc::clone(&threads);
                    let ran = threads.run(move || {
                        let working = inner.lock().working;
                        let mut most = most.lock().unwrap();
                        *most = working.max(*most);
                    });
                    assert_eq!(ran, Ok(()));
                });
            }
        });
        assert!((1..=GRAMMAR_THREADS_MAX).contains(&*most.lock().unwrap()));
    }
}
