//! Drives a client's connection until it ends, or has to: it is told so by `Client::leave`, says its last
//! (over HTTP/2 a GOAWAY) and serves what it has begun. Where that is nothing, or what comes is a flood, it
//! has a moment to say it and no more.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
};

use tokio::time::{self, Instant};

use crate::{client::Client, limits::LEAVE_PATIENCE, turn};

/// What the connection came to; `None` if it was closed. `say_last` lets it begin nothing new.
pub async fn until_end<C: Future>(
    connection: C,
    client: &Client,
    say_last: impl Fn(Pin<&mut C>),
) -> Option<C::Output> {
    let mut connection = pin!(connection);
    let mut turn = 0;
    let mut poll = |connection: Pin<&mut C>, cx: &mut Context<'_>| {
        turn += 1;
        turn::take(turn, || connection.poll(cx))
    };
    // Until the client is told, its waker stays where it is: to register it at each event of a stream costs.
    let mut known = None::<Waker>;
    let told = poll_fn(|cx| match poll(connection.as_mut(), cx) {
        Poll::Ready(end) => Poll::Ready(Some(end)),
        Poll::Pending
            if !client.leaves() && known.as_ref().is_some_and(|known| known.will_wake(cx.waker())) =>
        {
            Poll::Pending
        }
        Poll::Pending => {
            known = Some(cx.waker().clone());
            client.poll_leave(cx).map(|_| None)
        }
    });
    if let Some(end) = told.await {
        return Some(end);
    }
    say_last(connection.as_mut());
    let mut alarm = pin!(time::sleep(LEAVE_PATIENCE));
    poll_fn(|cx| {
        if let Poll::Ready(end) = poll(connection.as_mut(), cx) {
            return Poll::Ready(Some(end));
        }
        // It may be told again meanwhile, for a reason that waits for less.
        let how = client.poll_leave(cx);
        while alarm.as_mut().poll(cx).is_ready() {
            if matches!(how, Poll::Ready(how) if client.may_be_closed(how)) {
                return Poll::Ready(None);
            }
            alarm.as_mut().reset(Instant::now() + LEAVE_PATIENCE);
        }
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, future::pending, sync::Arc, time::Duration};

    use super::*;
    use crate::{client::Leave, party::Stage};

    /// After how many seconds a connection that ends by itself after nine is over, whether it was closed, and
    /// how often it was told to say its last. `tells` says after how many milliseconds it is told to leave,
    /// and how.
    async fn ends(client: &Arc<Client>, tells: &[(u64, Leave)]) -> (u64, bool, u32) {
        let (began, said) = (Instant::now(), Cell::new(0));
        let connection = Box::pin(time::sleep(Duration::from_secs(9)));
        let telling = async {
            for (at, how) in tells {
                time::sleep_until(began + Duration::from_millis(*at)).await;
                client.leave(*how);
            }
            pending::<()>().await;
        };
        let ending = until_end(connection, client, |_| said.set(said.get() + 1));
        let end = tokio::select! { end = ending => end, () = telling => None };
        (began.elapsed().as_secs(), end.is_none(), said.get())
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_served_is_waited_for_and_who_asks_for_nothing_is_not() {
        use Leave::{Cut, Drained, Flooding, Idle, Replaced};
        let has = |stages: &[Stage]| {
            let client = Client::alone();
            assert!(stages.iter().all(|stage| client.connection().take(*stage, 9, 1)));
            client
        };
        let (nothing, arrives, served) = (&[][..], &[Stage::Arriving][..], &[Stage::Serving][..]);
        for (stages, tells, expected) in [
            (nothing, &[][..], (9, false, 0)),
            (nothing, &[(2_000, Drained)], (9, false, 1)),
            (nothing, &[(2_000, Idle)], (3, true, 1)),
            (arrives, &[(2_000, Idle)], (9, false, 1)),
            (arrives, &[(2_000, Replaced)], (3, true, 1)),
            (served, &[(2_000, Replaced)], (9, false, 1)),
            (served, &[(2_000, Flooding)], (3, true, 1)),
            (served, &[(2_000, Cut)], (3, true, 1)),
            (served, &[(2_000, Drained), (5_500, Cut)], (6, true, 1)),
            (served, &[(2_000, Drained), (5_500, Flooding)], (6, true, 1)),
        ] {
            assert_eq!(ends(&has(stages), tells).await, expected, "{stages:?}, {tells:?}");
        }
    }
}
