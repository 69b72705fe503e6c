//! How long an answer may take: between two of its pieces, once it has begun, and in all. Looked at only
//! while the worker is waited for: a client that reads slowly costs the worker nothing. No timer is touched
//! as events pass. The same alarm rings now and then for a look at whether the worker is still there.

use std::{
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use crate::{
    clock::{self, Instant, Sleep},
    config::Timeouts,
    error::Error,
    limits::DEAD_LOOK,
};

/// What time has come for while the worker is waited for.
#[derive(Debug)]
pub(super) enum Due {
    /// A look at whether the worker is still there.
    Look,
    /// The end of all patience.
    Over(Error),
}

/// The clocks of one answer.
#[derive(Debug)]
pub(super) struct Patience {
    /// Longest time between two pieces, once one has come; the operator's `answer_idle_ms`.
    idle: Duration,
    /// In all, and when that is over.
    request: Duration,
    deadline: Instant,
    /// When it was last time for a look.
    looked: Instant,
    /// Set for the first moment at which one of them may run out; not set anew until then.
    alarm: Option<Pin<Box<Sleep>>>,
    /// Who is woken by it.
    waker: Option<Waker>,
    /// When the last piece had come as it was last looked at.
    last: Option<Instant>,
    /// Whether the alarm rings before anything that later pieces make due.
    early: bool,
}

impl Patience {
    /// For an answer that begins now, to a request that started then.
    pub(super) fn new(timeouts: &Timeouts, started: Instant, now: Instant) -> Self {
        Self {
            idle: timeouts.answer_idle,
            request: timeouts.request,
            deadline: started + timeouts.request,
            looked: now,
            alarm: None,
            waker: None,
            last: None,
            early: false,
        }
    }

    /// What is due. `last`: when the last piece came, if any did.
    pub(super) fn poll(&mut self, last: Option<Instant>, cx: &mut Context<'_>) -> Poll<Due> {
        let waits = self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        let news = std::mem::replace(&mut self.last, last) != last;
        if let (true, Some(last), Some(alarm)) = (waits && news && self.early, last, &self.alarm)
            && last < alarm.deadline()
        {
            // A piece has just come, before the alarm, which will wake the same task: there is nothing to
            // look at yet.
            return Poll::Pending;
        }
        let idle = last.map(|last| last + self.idle);
        let over = idle.map_or(self.deadline, |idle| idle.min(self.deadline));
        let due = over.min(last.map_or(self.looked, |last| last.max(self.looked)) + DEAD_LOOK);
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(clock::sleep_until(due)));
        if !waits {
            self.waker = Some(cx.waker().clone());
        }
        while alarm.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            if now < due {
                // Pieces came since it was set.
                alarm.as_mut().reset(due);
                continue;
            }
            return Poll::Ready(if now < over {
                self.looked = now;
                Due::Look
            } else if over == self.deadline {
                Due::Over(Error::Deadline { limit: self.request })
            } else {
                Due::Over(Error::Stalled { limit: self.idle })
            });
        }
        // An alarm set before the first piece may be later than what is due since.
        if alarm.deadline() > due {
            alarm.as_mut().reset(due);
            let _ = alarm.as_mut().poll(cx);
        }
        self.early = last.is_some();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, task::ready};

    use super::*;

    fn patience(idle_ms: u64, request_ms: u64) -> Patience {
        let timeouts = Timeouts {
            answer_idle: Duration::from_millis(idle_ms),
            request: Duration::from_millis(request_ms),
            ..Timeouts::default()
        };
        Patience::new(&timeouts, Instant::now(), Instant::now())
    }

    /// Looks on the way to its end are passed over.
    fn poll_over(patience: &mut Patience, last: Option<Instant>, cx: &mut Context<'_>) -> Poll<Error> {
        loop {
            match ready!(patience.poll(last, cx)) {
                Due::Look => {}
                Due::Over(error) => return Poll::Ready(error),
            }
        }
    }

    async fn runs_out(patience: &mut Patience, last: Option<Instant>) -> (Error, Duration) {
        let began = Instant::now();
        let error = poll_fn(|cx| poll_over(patience, last, cx)).await;
        (error, began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_time_for_a_look_again_and_again_until_something_comes() {
        let mut patience = patience(300_000, 3_600_000);
        let began = Instant::now();
        for number in 1..5 {
            let due = poll_fn(|cx| patience.poll(Some(began), cx)).await;
            assert!(matches!(due, Due::Look), "{due:?}");
            assert_eq!(began.elapsed().as_millis() / 10, number * DEAD_LOOK.as_millis() / 10);
        }
        let last = Instant::now() + DEAD_LOOK / 2;
        tokio::time::advance(DEAD_LOOK / 2).await;
        poll_fn(|cx| patience.poll(Some(last), cx)).await;
        assert_eq!(
            last.elapsed().as_millis() / 10,
            DEAD_LOOK.as_millis() / 10,
            "counted from the last piece"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_due_before_the_first_piece_but_the_whole() {
        let (error, after) = runs_out(&mut patience(10, 5_000), None).await;
        assert!(matches!(error, Error::Deadline { .. }));
        assert_eq!(after.as_millis().div_ceil(10), 500);
    }

    #[tokio::test(start_paused = true)]
    async fn who_takes_a_stream_over_is_woken_in_time() {
        let mut patience = patience(1_000, 60_000);
        let cx = &mut Context::from_waker(std::task::Waker::noop());
        assert!(patience.poll(None, cx).is_pending());
        assert!(patience.poll(Some(Instant::now()), cx).is_pending());
        let (error, after) = runs_out(&mut patience, Some(Instant::now())).await;
        assert!(matches!(error, Error::Stalled { .. }), "{error:?}");
        assert_eq!(after.as_millis() / 10, 100);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stall_after_a_workers_first_piece_is_noticed_by_who_waited_for_it() {
        let mut patience = patience(1_000, 60_000);
        let (began, mut waited) = (Instant::now(), false);
        let error = poll_fn(|cx| {
            if !std::mem::replace(&mut waited, true) {
                assert!(patience.poll(None, cx).is_pending());
            }
            poll_over(&mut patience, Some(began), cx)
        });
        assert!(matches!(error.await, Error::Stalled { .. }));
        assert_eq!(began.elapsed().as_millis() / 10, 100);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stall_is_counted_from_the_last_piece() {
        let mut patience = patience(1_000, 60_000);
        let cx = &mut Context::from_waker(std::task::Waker::noop());
        assert!(patience.poll(None, cx).is_pending());
        for _ in 0..5 {
            let last = Some(Instant::now());
            assert!(patience.poll(last, cx).is_pending());
            tokio::time::advance(Duration::from_millis(900)).await;
            assert!(patience.poll(last, cx).is_pending(), "every piece starts the clock anew");
        }
        let (error, after) = runs_out(&mut patience, Some(Instant::now())).await;
        assert!(matches!(error, Error::Stalled { .. }), "{error:?}");
        assert_eq!(after.as_millis() / 10, 100);
    }
}
