//! The body of a worker's answer together with the connection that it comes over, which it drives.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::origin::{Link, Origin};

/// A body that reads its connection as it is polled. Dropped before its end it closes the connection.
#[derive(Debug)]
pub struct Answer {
    body: Incoming,
    /// Until the body's end.
    link: Option<Link>,
    origin: Origin,
}

impl Answer {
    pub(super) fn new(body: Incoming, link: Link, origin: Origin) -> Self {
        let mut answer = Self { body, link: Some(link), origin };
        if answer.body.is_end_stream() {
            answer.hand_back();
        }
        answer
    }

    fn hand_back(&mut self) {
        if let Some(link) = self.link.take() {
            self.origin.keep(link);
        }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        if let Some(link) = &mut this.link {
            link.connection.drive(cx);
        }
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        match &frame {
            Poll::Ready(None) => this.hand_back(),
            Poll::Ready(Some(Ok(_))) if this.body.is_end_stream() => this.hand_back(),
            _ => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
