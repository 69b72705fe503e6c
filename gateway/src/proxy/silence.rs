//! Silence at a worker that seems dead. An engine that is told to end may close its port at once and leave
//! the streams that it has begun without data and without end (vLLM does so by default); only who asks
//! whether the worker is still there learns of it. What is silent there for a while is lost, and goes to
//! another worker or is ended; where the worker still says something to any request, it only takes its time.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::{Poll, ready},
    time::Duration,
};

use crate::{
    clock::{self, Instant},
    fleet::Worker,
    limits::{DEAD_LOOK, DEAD_SILENCE},
    routing::Router,
    upstream::SendError,
};

/// Whether a request that its worker has said nothing to since `since` is lost there.
pub(crate) fn is_lost(router: &Router, worker: &Worker, since: Duration) -> bool {
    // Mostly it is alive, and that is all that is asked.
    if worker.seems_dead_since().is_none() {
        return false;
    }
    let now = router.now();
    now.saturating_sub(since) >= DEAD_SILENCE && worker.silent_for(now) >= DEAD_SILENCE
}

/// Waits for the head of an answer to what was sent then, for as long as the worker is there to give one. It
/// has no timer, of which each request would take one more: its caller polls it each [`DEAD_LOOK`], as
/// [`looking_until`] does, and an answer's own alarm. What sends is pinned where it was made: it is large,
/// and would be moved.
pub(crate) async fn unless_lost<T>(
    router: &Router,
    worker: &Worker,
    sent: Duration,
    mut sending: Pin<&mut impl Future<Output = Result<T, SendError>>>,
) -> Result<T, SendError> {
    poll_fn(|cx| match sending.as_mut().poll(cx) {
        Poll::Pending if is_lost(router, worker, sent) => Poll::Ready(Err(SendError::silent())),
        answer => answer,
    })
    .await
}

/// Does `work` that has just begun until the deadline, and polls it each [`DEAD_LOOK`] for what may be lost
/// by then; `None` if it takes longer.
pub(crate) async fn looking_until<T>(
    (begun, deadline): (Instant, Instant),
    mut work: Pin<Box<impl Future<Output = T>>>,
) -> Option<T> {
    let mut alarm = pin!(clock::sleep_until(deadline.min(begun + DEAD_LOOK)));
    poll_fn(|cx| {
        loop {
            if let Poll::Ready(done) = work.as_mut().poll(cx) {
                return Poll::Ready(Some(done));
            }
            ready!(alarm.as_mut().poll(cx));
            let now = Instant::now();
            if now >= deadline {
                return Poll::Ready(None);
            }
            alarm.as_mut().reset(deadline.min(now + DEAD_LOOK));
        }
    })
    .await
}
