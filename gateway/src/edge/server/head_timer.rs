//! hyper's timer for the heads of one HTTP/1.1 connection. hyper asks for a new one for each head, and drops
//! it when the head has come: to list it with the runtime and to take it out again is most of what it costs.
//! So one stays listed. Where it goes off too early, as it was listed for a head before, it is listed anew.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use hyper::rt;
use parking_lot::Mutex;

use crate::clock::{self, Sleep};

/// The timer of one connection, which waits for one head at a time.
#[derive(Debug, Default)]
pub(super) struct HeadTimer(Arc<Mutex<Alarm>>);

#[derive(Debug, Default)]
struct Alarm {
    listed: Option<Pin<Box<Sleep>>>,
    /// When the head at hand is due.
    due: Option<clock::Instant>,
}

/// Waits until the head at hand is due.
struct HeadDue(Arc<Mutex<Alarm>>);

impl rt::Timer for HeadTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn rt::Sleep>> {
        rt::Timer::sleep_until(self, rt::Timer::now(self) + duration)
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn rt::Sleep>> {
        self.0.lock().due = Some(deadline.into());
        Box::pin(HeadDue(Arc::clone(&self.0)))
    }

    fn now(&self) -> Instant {
        clock::Instant::now().into_std()
    }
}

impl Future for HeadDue {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Alarm { listed, due } = &mut *self.0.lock();
        let Some(due) = *due else { return Poll::Pending };
        let listed = listed.get_or_insert_with(|| Box::pin(clock::sleep_until(due)));
        if listed.deadline() > due {
            listed.as_mut().reset(due);
        }
        loop {
            ready!(listed.as_mut().poll(cx));
            if listed.deadline() >= due {
                return Poll::Ready(());
            }
            listed.as_mut().reset(due);
        }
    }
}

impl rt::Sleep for HeadDue {}

#[cfg(test)]
mod tests {
    use hyper::rt::Timer;

    use super::*;

    async fn is_due_after(timer: &HeadTimer, limit: Duration) -> Duration {
        let began = clock::Instant::now();
        timer.sleep(limit).await;
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn each_head_has_its_own_time() {
        let (timer, limit) = (HeadTimer::default(), Duration::from_secs(10));
        for head in 0..5 {
            // It comes in time.
            let waiting = timer.sleep(limit);
            assert!(clock::timeout(Duration::from_secs(7), waiting).await.is_err(), "{head}");
        }
        let near =
            |took: Duration, wanted: Duration| took >= wanted && took < wanted + Duration::from_millis(5);
        // The next one does not, nor does the one behind it, and a limit may become less.
        assert!(near(is_due_after(&timer, limit).await, limit));
        assert!(near(is_due_after(&timer, limit).await, limit));
        assert!(clock::timeout(Duration::from_secs(1), timer.sleep(limit)).await.is_err());
        assert!(near(is_due_after(&timer, limit / 5).await, limit / 5));
    }

    #[tokio::test(start_paused = true)]
    async fn heads_that_come_in_time_list_one_timer() {
        let (timer, limit) = (HeadTimer::default(), Duration::from_secs(10));
        assert!(clock::timeout(Duration::from_secs(1), timer.sleep(limit)).await.is_err());
        let listed = |timer: &HeadTimer| timer.0.lock().listed.as_ref().map(|listed| listed.deadline());
        let first = listed(&timer);
        assert!(first.is_some());
        assert!(clock::timeout(Duration::from_secs(1), timer.sleep(limit)).await.is_err());
        assert_eq!(listed(&timer), first);
    }
}
