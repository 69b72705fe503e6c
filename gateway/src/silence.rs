//! Silence at a worker that seems dead. An engine that is told to end may close its port at once and leave the streams that it has
//! begun without data and without end (vLLM does so by default); only who asks whether the worker is still there learns of it.
//! What is silent there for a while is lost, and goes to another worker or is ended; where the worker still says something to
//! anybody, it only takes its time.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::Poll,
};

use crate::{
    clock::{self, Instant},
    fleet::Worker,
    limits::{DEAD_LOOK, DEAD_SILENCE},
    routing::Router,
    upstream::SendError,
};

/// Whether a request that its worker has said nothing to since `since` is lost there.
pub(crate) fn is_lost(router: &Router, worker: &Worker, since: Instant) -> bool {
    // Mostly it is alive, and that is all that is asked.
    worker.seems_dead_since().is_some()
        && since.elapsed() >= DEAD_SILENCE
        && worker.silent_for(router.now()) >= DEAD_SILENCE
}

/// Waits for the head of an answer for as long as the worker is there to give one. What sends is pinned where it was made: it is
/// large, and each request would move it.
pub(crate) async fn unless_lost<T>(
    router: &Router,
    worker: &Worker,
    mut sending: Pin<&mut impl Future<Output = Result<T, SendError>>>,
) -> Result<T, SendError> {
    let since = Instant::now();
    let mut look = pin!(clock::sleep_until(since + DEAD_LOOK));
    poll_fn(|cx| {
        if let Poll::Ready(answer) = sending.as_mut().poll(cx) {
            return Poll::Ready(answer);
        }
        while look.as_mut().poll(cx).is_ready() {
            if is_lost(router, worker, since) {
                return Poll::Ready(Err(SendError::silent()));
            }
            look.as_mut().reset(Instant::now() + DEAD_LOOK);
        }
        Poll::Pending
    })
    .await
}
