//! A client's body that must not pause for long between two pieces: a defence against slow-body attacks.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::{
    body::BoxError,
    clock::{self, Instant, Sleep},
};

/// The client paused for too long.
#[derive(Debug, thiserror::Error)]
#[error("no more of the body came in time")]
pub struct TooSlow;

/// A body with a clock that starts anew with each piece.
#[derive(Debug)]
pub struct Impatient<B> {
    body: B,
    idle: Duration,
    /// None while every piece is there when it is asked for.
    alarm: Option<Pin<Box<Sleep>>>,
    /// Whether the next piece is waited for, by the alarm as it is set.
    waits: bool,
}

impl<B> Impatient<B> {
    /// At most `idle` between two pieces.
    pub fn new(body: B, idle: Duration) -> Self {
        Self { body, idle, alarm: None, waits: false }
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
            this.waits = false;
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let alarm = this.alarm.get_or_insert_with(|| Box::pin(clock::sleep(this.idle)));
        if !std::mem::replace(&mut this.waits, true) {
            alarm.as_mut().reset(Instant::now() + this.idle);
        }
        alarm.as_mut().poll(cx).map(|()| Some(Err(TooSlow.into())))
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

    /// Pieces that come so many milliseconds after each other.
    fn trickle(pauses_ms: Vec<u64>) -> impl Body<Data = Bytes, Error = BoxError> + Unpin {
        let pieces = futures_util::stream::unfold(pauses_ms.into_iter(), |mut pauses| async move {
            let pause = pauses.next()?;
            clock::sleep(Duration::from_millis(pause)).await;
            Some((Ok(Frame::data(Bytes::from_static(b"x"))), pauses))
        });
        StreamBody::new(Box::pin(pieces))
    }

    #[tokio::test(start_paused = true)]
    async fn a_trickle_passes_and_a_pause_does_not() {
        let idle = Duration::from_millis(100);
        let whole = Impatient::new(trickle(vec![90; 50]), idle).collect().await.unwrap();
        assert_eq!(whole.to_bytes().len(), 50);
        let error = Impatient::new(trickle(vec![90, 110]), idle).collect().await.unwrap_err();
        assert!(error.is::<TooSlow>());
    }
}
