//! The one body type of answers, and the guard that makes something live exactly as long as a body.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use pin_project_lite::pin_project;

/// Any error, boxed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body of every answer.
pub type ResponseBody = UnsyncBoxBody<Bytes, BoxError>;
/// Every answer.
pub type Response = http::Response<ResponseBody>;
/// Every request, as the server receives it.
pub type Request = http::Request<hyper::body::Incoming>;

/// A body known in full.
pub fn full(bytes: impl Into<Bytes>) -> ResponseBody {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

pin_project! {
    /// Holds `guard` until the body is dropped: when it was sent in full, or the client left.
    #[derive(Debug)]
    pub struct Guarded<B, G> {
        #[pin]
        inner: B,
        guard: G,
    }
}

impl<B, G> Guarded<B, G> {
    /// Ties `guard` to `inner`.
    pub fn new(inner: B, guard: G) -> Self {
        Self { inner, guard }
    }
}

impl<B: Body, G> Body for Guarded<B, G> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        self.project().inner.poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
