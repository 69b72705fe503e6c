//! Turns at a core, for the bytes of large bodies: to copy one of tens of megabytes takes some milliseconds,
//! and fifty of them come at once. In each turn of a thread's loop one of them is copied for a while, the one
//! that has waited longest; all else that is due there comes between. What is small takes no turns.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::{
    runtime::Handle,
    sync::{AcquireError, OwnedSemaphorePermit, Semaphore},
    task,
};

use crate::limits::TURN_BYTES;

thread_local! {
    /// The turn at this thread. Tokio gives it to who has waited longest.
    static TURN: Arc<Semaphore> = Arc::new(Semaphore::new(1));
}

type Waiting = Pin<Box<dyn Future<Output = Result<OwnedSemaphorePermit, AcquireError>> + Send>>;

/// One large body's: ask for one, then copy, say how much it was, and ask again.
#[derive(Default)]
pub struct Turns(State);

#[derive(Default)]
enum State {
    /// It has not asked for one.
    #[default]
    Free,
    Waits(Waiting),
    Has(Turn),
    /// In its turn there was nothing to copy, so others have theirs. It does not ask anew before it has
    /// something.
    Missed,
}

struct Turn {
    left_bytes: usize,
    /// When the thread has looked for what else is due.
    end: Pin<Box<dyn Future<Output = ()> + Send>>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Turns {
    /// Ready where it may copy so many bytes now.
    pub fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<usize> {
        loop {
            match &mut self.0 {
                State::Free => {
                    let waiting = TURN.with(Arc::clone).acquire_owned();
                    self.0 = State::Waits(Box::pin(waiting));
                }
                State::Waits(waiting) => {
                    // It is never closed.
                    let permit = ready!(waiting.as_mut().poll(cx)).ok();
                    self.0 = State::Has(Turn { left_bytes: TURN_BYTES, end: end_of_turn(), _permit: permit });
                }
                State::Has(turn) if turn.left_bytes > 0 => return Poll::Ready(turn.left_bytes),
                State::Has(turn) => {
                    ready!(turn.end.as_mut().poll(cx));
                    self.0 = State::Free;
                }
                State::Missed => return Poll::Ready(TURN_BYTES),
            }
        }
    }

    /// It has copied so much.
    pub fn copied(&mut self, bytes: usize) {
        match &mut self.0 {
            State::Has(turn) => turn.left_bytes = turn.left_bytes.saturating_sub(bytes),
            State::Missed => self.0 = State::Free,
            State::Free | State::Waits(_) => {}
        }
    }

    /// There is nothing to copy yet, and the task is woken when there is. The turn lasts until its end: what
    /// a connection was asked for it reads only after this.
    pub fn nothing_yet(&mut self, cx: &mut Context<'_>) {
        if let State::Has(turn) = &mut self.0
            && turn.end.as_mut().poll(cx).is_ready()
        {
            self.0 = State::Missed;
        }
    }
}

/// Completes when the thread has looked for what else is due. A task of its own waits for that: who asks may
/// be polled several times before.
fn end_of_turn() -> Pin<Box<dyn Future<Output = ()> + Send>> {
    let Ok(runtime) = Handle::try_current() else { return Box::pin(task::yield_now()) };
    let ended = runtime.spawn(task::yield_now());
    Box::pin(async move { drop(ended.await) })
}

impl Drop for Turns {
    fn drop(&mut self) {
        // Of what ends in its turn, too, there is one in each turn of the loop.
        if let State::Has(turn) = std::mem::take(&mut self.0)
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(async move {
                let Turn { end, _permit, .. } = turn;
                end.await;
            });
        }
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            State::Free => "Turns::Free",
            State::Waits(_) => "Turns::Waits",
            State::Has(_) => "Turns::Has",
            State::Missed => "Turns::Missed",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use parking_lot::Mutex;

    use super::*;

    type Log = Arc<Mutex<String>>;

    /// Copies so many bytes in pieces of a quarter of a turn.
    async fn copies(name: char, mut bytes: usize, log: Log) {
        let mut turns = Turns::default();
        while bytes > 0 {
            let may = poll_fn(|cx| turns.poll_turn(cx)).await;
            let piece = bytes.min(may).min(TURN_BYTES / 4);
            turns.copied(piece);
            bytes -= piece;
            log.lock().push(name);
        }
    }

    #[tokio::test]
    async fn large_ones_take_turns_and_what_else_is_due_comes_between() {
        let log = Log::default();
        let all: Vec<_> = "abcdefgh"
            .chars()
            .map(|name| tokio::spawn(copies(name, 2 * TURN_BYTES, Arc::clone(&log))))
            .collect();
        // Once in each turn of the thread's loop.
        while !all.iter().all(task::JoinHandle::is_finished) {
            log.lock().push(' ');
            task::yield_now().await;
        }
        let log = log.lock();
        let order = log.replace(' ', "");
        let turn: String = "abcdefgh".chars().flat_map(|name| [name; 4]).collect();
        assert_eq!(order, format!("{turn}{turn}"), "{log}");
        // One may come behind it in a turn of the loop, and one before it in the next.
        assert!(log.split(' ').all(|between| between.len() <= 2 * 4), "{log}");
    }

    #[tokio::test]
    async fn one_that_has_nothing_to_copy_keeps_no_turn_from_the_others() {
        let log = Log::default();
        let (tell, told) = tokio::sync::oneshot::channel::<()>();
        let slow = Arc::clone(&log);
        let slow = tokio::spawn(async move {
            let (mut turns, mut told) = (Turns::default(), told);
            poll_fn(|cx| {
                assert!(turns.poll_turn(cx).is_ready());
                let polled = Pin::new(&mut told).poll(cx);
                if polled.is_pending() {
                    turns.nothing_yet(cx);
                }
                polled
            })
            .await
            .unwrap();
            turns.copied(1);
            assert!(matches!(turns.0, State::Free));
            slow.lock().push('s');
        });
        task::yield_now().await;
        copies('a', TURN_BYTES, Arc::clone(&log)).await;
        tell.send(()).unwrap();
        slow.await.unwrap();
        assert_eq!(*log.lock(), "aaaas");
    }

    #[tokio::test]
    async fn a_turn_is_not_over_because_its_task_looks_often() {
        let (mut turns, mut next) = (Turns::default(), Turns::default());
        poll_fn(|cx| turns.poll_turn(cx)).await;
        poll_fn(|cx| {
            assert!(next.poll_turn(cx).is_pending());
            for _ in 0..10 {
                turns.nothing_yet(cx);
                assert!(next.poll_turn(cx).is_pending());
            }
            turns.copied(TURN_BYTES);
            assert!(turns.poll_turn(cx).is_pending());
            Poll::Ready(())
        })
        .await;
    }

    #[tokio::test]
    async fn who_leaves_in_its_turn_gives_it_back() {
        let mut turns = Turns::default();
        poll_fn(|cx| turns.poll_turn(cx)).await;
        let mut next = Turns::default();
        let polled = poll_fn(|cx| Poll::Ready(next.poll_turn(cx))).await;
        assert!(polled.is_pending());
        drop(turns);
        // At the turn's end.
        assert!(poll_fn(|cx| Poll::Ready(next.poll_turn(cx))).await.is_pending());
        assert_eq!(poll_fn(|cx| next.poll_turn(cx)).await, TURN_BYTES);
    }
}
