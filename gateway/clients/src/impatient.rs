//! A client's body that must come: without a long pause between two pieces, at some rate, and within a time;
//! a defence against clients that hold a request open by a byte now and then.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use tokio::time::{self, Instant, Sleep};

use crate::limits::BODY_BYTES_PER_SECOND_MIN;

/// What ends a body early: [`TooSlow`], or whatever error the body inside it has.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What a body must keep to.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Between two pieces; after so long the rate counts too.
    pub idle: Duration,
    /// For all of it.
    pub whole: Duration,
}

/// The client was too slow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TooSlow {
    /// Nothing came for so long.
    Paused(Duration),
    /// Fewer than [`BODY_BYTES_PER_SECOND_MIN`] bytes a second came, [`Pace::idle`] of grace left out.
    Crawled,
    /// It did not come whole in this time.
    Unfinished(Duration),
}

impl fmt::Display for TooSlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Paused(limit) => {
                write!(f, "no more of the request body came for {} s", limit.as_secs_f64())
            }
            Self::Crawled => {
                write!(f, "the request body came at less than {BODY_BYTES_PER_SECOND_MIN} bytes a second")
            }
            Self::Unfinished(limit) => {
                let limit = limit.as_secs_f64();
                write!(f, "the request body did not come whole within {limit} s")
            }
        }
    }
}

impl std::error::Error for TooSlow {}

/// A body with a clock.
#[derive(Debug)]
pub struct Impatient<B> {
    body: B,
    pace: Pace,
    /// None while every piece is there when it is asked for.
    waits: Option<Waits>,
    came_bytes: u64,
}

#[derive(Debug)]
struct Waits {
    /// When the first piece was waited for.
    began: Instant,
    alarm: Pin<Box<Sleep>>,
    /// What the alarm means, if it is set for the next piece.
    meaning: Option<TooSlow>,
}

impl<B> Impatient<B> {
    /// A body that must keep to this.
    pub fn new(body: B, pace: Pace) -> Self {
        Self { body, pace, waits: None, came_bytes: 0 }
    }
}

impl Pace {
    /// Until when the next piece is waited for, and what it means if none has come then.
    fn due(self, began: Instant, now: Instant, came_bytes: u64) -> (Instant, TooSlow) {
        let enough_for = self.idle + Duration::from_secs(came_bytes / BODY_BYTES_PER_SECOND_MIN);
        let paused = (now + self.idle, TooSlow::Paused(self.idle));
        let others =
            [(began + enough_for, TooSlow::Crawled), (began + self.whole, TooSlow::Unfinished(self.whole))];
        // Of those at one time the first.
        others.into_iter().fold(paused, |first, due| if due.0 < first.0 { due } else { first })
    }
}

impl<B> Body for Impatient<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            // No clock is read for pieces that come one after the other, however small they are.
            if let Some(waits) = &mut this.waits {
                waits.meaning = None;
            }
            let frame = frame.map(|frame| frame.map_err(Into::into));
            if let Some(Ok(frame)) = &frame {
                this.came_bytes += frame.data_ref().map_or(0, Bytes::len) as u64;
            }
            return Poll::Ready(frame);
        }
        let waits = this.waits.get_or_insert_with(|| {
            let began = Instant::now();
            Waits { began, alarm: Box::pin(time::sleep(this.pace.idle)), meaning: None }
        });
        let alarm = &mut waits.alarm;
        let meaning = *waits.meaning.get_or_insert_with(|| {
            let (due, meaning) = this.pace.due(waits.began, Instant::now(), this.came_bytes);
            alarm.as_mut().reset(due);
            meaning
        });
        waits.alarm.as_mut().poll(cx).map(|()| Some(Err(meaning.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    /// Pieces of so many bytes, each so many milliseconds after the one before.
    fn trickle(pieces: Vec<(u64, usize)>) -> impl Body<Data = Bytes, Error = BoxError> + Unpin {
        let pieces = futures_util::stream::unfold(pieces.into_iter(), |mut pieces| async move {
            let (pause, bytes) = pieces.next()?;
            time::sleep(Duration::from_millis(pause)).await;
            Some((Ok(Frame::data(Bytes::from(vec![b'x'; bytes]))), pieces))
        });
        StreamBody::new(Box::pin(pieces))
    }

    const PACE: Pace = Pace { idle: Duration::from_secs(10), whole: Duration::from_secs(60) };

    /// How many bytes came in how many seconds, and why no more.
    async fn came(pieces: Vec<(u64, usize)>) -> (usize, u64, Option<TooSlow>) {
        let began = Instant::now();
        let mut body = Impatient::new(trickle(pieces), PACE);
        let mut bytes = 0;
        let why = loop {
            match body.frame().await {
                Some(Ok(frame)) => bytes += frame.into_data().unwrap().len(),
                Some(Err(error)) => break Some(*error.downcast_ref().unwrap()),
                None => break None,
            }
        };
        (bytes, began.elapsed().as_secs(), why)
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_comes_is_waited_for() {
        // At the least rate from the first byte on, in pieces; most of it early.
        assert_eq!(came(vec![(9_000, 9 << 10); 5]).await, (45 << 10, 45, None));
        assert_eq!(came(vec![(0, 1), (9_000, 100), (900, 7)]).await, (108, 9, None));
        assert_eq!(came(vec![(1, 40 << 10), (9_000, 1), (9_000, 1), (9_000, 1)]).await, (40_963, 27, None));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_pauses_crawls_or_never_ends_is_given_up() {
        let paused = Some(TooSlow::Paused(PACE.idle));
        assert_eq!(came(vec![(9_000, 100 << 10), (11_000, 1)]).await, (100 << 10, 19, paused));
        assert_eq!(came(vec![(11_000, 1)]).await, (0, 10, paused));
        // A byte now and then, and a little less than is wanted.
        assert_eq!(came(vec![(3_000, 1); 100]).await, (3, 10, Some(TooSlow::Crawled)));
        assert_eq!(came(vec![(1_000, 700); 100]).await.2, Some(TooSlow::Crawled));
        let whole = Some(TooSlow::Unfinished(PACE.whole));
        assert_eq!(came(vec![(7_000, 90_000); 100]).await, (8 * 90_000, 60, whole));
    }
}
