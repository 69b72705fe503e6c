//! The one body type of answers. What must live exactly as long as an answer lives in its body: the worker's
//! load and connection, the request's place in the gateway, its record.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use keyway_clients::{
    stalls::{self, Said},
    turn::Asked,
};

use crate::{
    access::admission::Permit, client::Answered, error::Error, machine::panics, proxy::relay::Relay,
    stored_state::Tap, telemetry::record::Record, translation::EventsBack,
};

/// Why a body breaks off: whatever error its source gives.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// Every answer to a client: a worker's, or the gateway's own.
pub type Response = http::Response<ResponseBody>;
/// Every request, as the server receives it.
pub type Request = http::Request<hyper::body::Incoming>;

/// The body of every answer. Dropped when it was sent in full or the client left: first what it is made from,
/// then its place, then its record, which is written last.
#[derive(Debug)]
pub struct ResponseBody {
    source: Source,
    /// Turns a chat's events into those of the API that was asked.
    back: Option<Box<EventsBack>>,
    /// Looks for ids of what is stored.
    tap: Option<Box<Tap>>,
    permit: Option<Permit>,
    record: Option<Arc<Record>>,
    asked: Asked,
}

/// Lines that come as there is something to say.
pub trait Lines: fmt::Debug + Send {
    /// The next one, with its line end; `None`: that was the last.
    fn poll_line(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>>;
}

#[derive(Debug)]
enum Source {
    /// The gateway's own answer, until it was taken.
    Own(Option<Bytes>),
    /// A worker's answer, as it comes.
    Relay(Box<Relay>),
    /// What is told as it happens.
    Lines { lines: Box<dyn Lines>, _answered: Answered },
}

impl ResponseBody {
    /// The body of a worker's answer; permit and record are tied to it later.
    pub fn relay(relay: Box<Relay>) -> Self {
        Self::of(Source::Relay(relay))
    }

    /// Lines, for as long as their client listens.
    pub fn lines(lines: impl Lines + 'static, answered: Answered) -> Self {
        Self::of(Source::Lines { lines: Box::new(lines), _answered: answered })
    }

    fn of(source: Source) -> Self {
        Self { source, back: None, tap: None, permit: None, record: None, asked: Asked::default() }
    }

    /// Tells its events in another API.
    #[must_use]
    pub fn turned_back(self, back: EventsBack) -> Self {
        Self { back: Some(Box::new(back)), ..self }
    }

    /// Lets its pieces be looked at for the ids that they hand out.
    pub fn watch(&mut self, tap: Tap) {
        self.tap = Some(Box::new(tap));
    }

    /// Ties the request's place in the gateway to it.
    pub fn hold_permit(&mut self, permit: Permit) {
        drop(self.permit.replace(permit));
    }

    /// Ties the request's record to it.
    pub fn hold_record(&mut self, record: Arc<Record>) {
        self.record = Some(record);
    }

    fn look_at(&mut self, frame: &Poll<Option<Result<Frame<Bytes>, BoxError>>>) {
        let Some(tap) = &mut self.tap else { return };
        if let Poll::Ready(Some(Ok(frame))) = frame
            && let Some(bytes) = frame.data_ref()
        {
            tap.see(bytes);
        }
        // Bodies of known length are not polled again after their last byte.
        if matches!(frame, Poll::Ready(None)) || self.is_end_stream() {
            self.tap.take().into_iter().for_each(|mut tap| tap.end());
        }
    }

    /// A bug of ours in the middle of an answer: it is aborted, and its worker's load and connection are
    /// given back.
    fn panicked(&mut self) -> BoxError {
        if let Some(record) = &self.record {
            record.panicked();
        }
        let source = std::mem::replace(&mut self.source, Source::Own(None));
        // What it was made from is in no state to rely on.
        panics::stopped(|| drop(source));
        Error::Internal.into()
    }
}

impl Error {
    /// The whole answer, in OpenAI's shape.
    pub fn to_response(&self) -> Response {
        self.to_answer().map(full)
    }
}

/// A body known in full.
pub fn full(bytes: impl Into<Bytes>) -> ResponseBody {
    let bytes = Some(bytes.into()).filter(|bytes| !bytes.is_empty());
    ResponseBody::of(Source::Own(bytes))
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            let polled = self.poll_source(cx);
            let Some(back) = &mut self.back else { return polled };
            let (told, is_end) = match polled {
                Poll::Ready(Some(Ok(frame))) => {
                    let Ok(events) = frame.into_data() else { continue };
                    (panics::stopped(|| back.push(&events)), false)
                }
                Poll::Ready(None) => (panics::stopped(|| back.end()), true),
                other => return other,
            };
            match told {
                None => return Poll::Ready(Some(Err(self.panicked()))),
                Some(told) if !told.is_empty() => return Poll::Ready(Some(Ok(Frame::data(told)))),
                Some(_) if is_end => return Poll::Ready(None),
                Some(_) => {}
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            // What is told at the end may still come.
            _ if self.back.is_some() => false,
            Source::Own(bytes) => bytes.is_none(),
            Source::Relay(relay) => relay.is_end_stream(),
            Source::Lines { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            _ if self.back.is_some() => SizeHint::default(),
            Source::Own(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Source::Relay(relay) => relay.size_hint(),
            Source::Lines { .. } => SizeHint::default(),
        }
    }
}

impl ResponseBody {
    fn poll_source(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        // Here rather than at the connection's task, which a panic would end without a word in the record.
        let Self { source, asked, .. } = self;
        let polled = panics::stopped(|| match source {
            Source::Own(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Source::Relay(relay) => asked.poll(|| Pin::new(&mut **relay).poll_frame(cx)),
            Source::Lines { lines, .. } => {
                lines.poll_line(cx).map(|line| line.map(|line| Ok(Frame::data(line))))
            }
        });
        let frame = polled.unwrap_or_else(|| Poll::Ready(Some(Err(self.panicked()))));
        if self.tap.is_some() {
            self.look_at(&frame);
        }
        stalls::say(if frame.is_ready() { Said::Piece } else { Said::Wait });
        frame
    }
}
