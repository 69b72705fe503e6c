//! Gives up on streams of HTTP/2 whose client does not let its answer come. Over HTTP/1.1 TCP's own clock
//! does that (`TCP_USER_TIMEOUT`); here TCP is alive and well, and the client's window of one stream is
//! closed. hyper then neither asks the body for more nor wakes it, so that no clock in the body would ever be
//! looked at.

use std::{
    cell::Cell,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;

use tokio::time::{self, Instant, Sleep};

/// What a body said when it was asked for more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// There is nothing yet: the worker is waited for.
    Wait,
    /// A piece: until the body is asked again, the client is waited for.
    Piece,
}

thread_local! {
    /// What was said last on this thread: hyper asks a stream's body within its poll.
    static SAID: Cell<Option<Said>> = const { Cell::new(None) };
}

/// Notes what a body is about to say.
pub fn say(said: Said) {
    SAID.set(Some(said));
}

pin_project! {
    /// A stream, which ends early if its client takes no piece of its answer (64 KiB at most) within the
    /// patience.
    #[derive(Debug)]
    pub struct Taken<F> {
        #[pin]
        stream: F,
        patience: Duration,
        // Whether the client is waited for.
        offered: bool,
        alarm: Option<Pin<Box<Sleep>>>,
    }
}

impl<F> Taken<F> {
    /// A stream that has just come.
    pub fn new(stream: F, patience: Duration) -> Self {
        Self { stream, patience, offered: false, alarm: None }
    }
}

impl<F: Future> Future for Taken<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        SAID.set(None);
        if this.stream.poll(cx).is_ready() {
            return Poll::Ready(());
        }
        match SAID.take() {
            None => {}
            Some(Said::Wait) => *this.offered = false,
            Some(Said::Piece) => {
                *this.offered = true;
                let due = Instant::now() + *this.patience;
                match this.alarm {
                    Some(alarm) => alarm.as_mut().reset(due),
                    None => *this.alarm = Some(Box::pin(time::sleep_until(due))),
                }
            }
        }
        if let (true, Some(alarm)) = (*this.offered, this.alarm) {
            ready!(alarm.as_mut().poll(cx));
            tracing::debug!("a client let nothing of its answer come for {:?}", this.patience);
            return Poll::Ready(());
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, future::poll_fn};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// A stream whose body says one thing after the other, each so many seconds after the last; then its end.
    /// How long it was served.
    async fn served(says: &[(u64, Said)]) -> u64 {
        let mut says: VecDeque<_> = says.iter().copied().collect();
        let mut pause: Option<Pin<Box<Sleep>>> = None;
        let stream = poll_fn(move |cx| {
            loop {
                if let Some(pause) = &mut pause {
                    ready!(pause.as_mut().poll(cx));
                }
                let Some((after, said)) = says.pop_front() else { return Poll::Ready(()) };
                say(said);
                pause = Some(Box::pin(time::sleep(Duration::from_secs(after))));
            }
        });
        let began = Instant::now();
        Taken::new(stream, PATIENCE).await;
        began.elapsed().as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn who_takes_no_piece_is_given_up() {
        assert_eq!(served(&[(0, Said::Piece), (1_000, Said::Piece)]).await, 60);
        assert_eq!(served(&[(50, Said::Piece), (50, Said::Piece), (1_000, Said::Piece)]).await, 160);
    }

    #[tokio::test(start_paused = true)]
    async fn who_takes_pieces_or_waits_for_its_worker_is_served() {
        assert_eq!(served(&[(59, Said::Piece); 10]).await, 590);
        assert_eq!(served(&[(50, Said::Piece), (1_000, Said::Wait), (50, Said::Piece)]).await, 1_100);
    }
}
