//! Silence at a worker that seems dead. An engine that is told to end may close its port at once and leave
//! the streams that it has begun without data and without end (vLLM does so by default); only who asks
//! whether the worker is still there learns of it. What is silent there for a while is lost, and goes to
//! another worker or is ended; where the worker still says something to any request, it only takes its time.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Poll, ready},
    time::Duration,
};

use crate::{
    clock::{self, Instant, KeptTimer},
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
/// by then; `None` if it takes longer. `kept`: the timer that it may go by, which may go off early.
pub(crate) async fn looking_until<T>(
    (begun, deadline): (Instant, Instant),
    kept: Option<&KeptTimer>,
    mut work: Pin<&mut impl Future<Output = T>>,
) -> Option<T> {
    let due = deadline.min(begun + DEAD_LOOK);
    let mut alarm = kept.map_or_else(|| Box::pin(clock::sleep_until(due)), |kept| kept.take(due));
    let done = poll_fn(|cx| {
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
    .await;
    if let Some(kept) = kept {
        kept.leave(alarm);
    }
    done
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, future::pending, pin::pin};

    use super::*;

    /// How long it took, and whether the work was done.
    async fn looked(limit: Duration, kept: &KeptTimer, work: impl Future<Output = ()>) -> (Duration, bool) {
        let begun = Instant::now();
        let done = looking_until((begun, begun + limit), Some(kept), pin!(work)).await;
        (begun.elapsed(), done.is_some())
    }

    #[tokio::test(start_paused = true)]
    async fn a_timer_that_an_earlier_request_has_left_keeps_the_later_one_s_time() {
        let (kept, tick) = (KeptTimer::default(), Duration::from_millis(2));
        for limit in [DEAD_LOOK * 7 / 2, DEAD_LOOK / 2, DEAD_LOOK * 2, DEAD_LOOK / 3] {
            let (took, done) = looked(limit, &kept, pending()).await;
            assert!(!done && took >= limit && took < limit + tick, "{took:?} of {limit:?}");
            let (took, done) = looked(limit, &kept, clock::sleep(limit / 5)).await;
            assert!(done && took < limit / 5 + tick, "{took:?} of a fifth of {limit:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_silent_is_looked_at_each_time_whoever_s_timer_it_is() {
        let (kept, looks) = (KeptTimer::default(), Cell::new(0));
        for _ in 0..3 {
            looks.set(0);
            let work = poll_fn(|_| {
                looks.set(looks.get() + 1);
                Poll::Pending
            });
            looked(DEAD_LOOK * 4, &kept, work).await;
            assert!(looks.get() >= 4, "{}", looks.get());
            looked(DEAD_LOOK, &kept, clock::sleep(DEAD_LOOK / 2)).await;
        }
    }
}
