//! Answers: a stream of server-sent events as the tokens come out, or one JSON object at the end. Writes
//! bytes; when tokens come is the engine's. Dropping an answer before its end aborts the request.

mod words;

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::Sleep;

pub(super) use self::words::About;
use self::words::Words;
use super::{
    First,
    api::Api,
    ticket::{Progress, Ticket},
    worker::{Admission, Worker},
};
use crate::limits::MOCK_FRAME_BYTES;

/// Pause before a cut, so that the tokens before it leave the socket buffer: hyper drops unflushed bytes when
/// a body fails.
const CUT_DELAY: Duration = Duration::from_millis(20);

/// Time between two keep-alives before the first token: often enough to be seen at any prefill that is.
const KEEP_ALIVE: Duration = Duration::from_millis(250);
const KEEP_ALIVE_COMMENT: &[u8] = b": keep-alive\n\n";

/// A response's body: here from the start, or made as tokens come out.
#[derive(Debug)]
pub(super) enum AnswerBody {
    /// All bytes, in one frame; `None` once they were sent.
    Whole(Option<Bytes>),
    /// A stream of server-sent events, made as tokens come out.
    Events(Box<Events>),
}

/// A request under way; dropping it aborts the request if it is not done.
#[derive(Debug)]
pub(super) struct Underway {
    /// The worker whose engine runs the request.
    pub worker: Arc<Worker>,
    /// What is shared with its engine.
    pub admission: Admission,
    /// All tokens are out.
    pub done: bool,
}

/// A stream of events.
#[derive(Debug)]
pub(super) struct Events {
    underway: Underway,
    about: About,
    words: Words,
    sent: u32,
    ended: bool,
    /// What comes before the first token was said.
    opened: bool,
    /// Runs before a cut.
    cutting: Option<Pin<Box<Sleep>>>,
    /// Runs until the next keep-alive.
    keep_alive: Option<Pin<Box<Sleep>>>,
}

// === impl Underway ===

impl Underway {
    fn ticket(&self) -> &Ticket {
        &self.admission.ticket
    }

    /// Waits until `tokens` are out; an error if the worker breaks off.
    pub(super) async fn finished(&mut self, tokens: u32) -> Result<(), io::Error> {
        let mut seen = 0;
        while seen < tokens {
            seen = match std::future::poll_fn(|context| self.ticket().poll(seen, context)).await {
                Progress::Tokens(ready) => ready,
                Progress::Broken => return Err(broken()),
            };
        }
        self.done = true;
        Ok(())
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        if !self.done {
            self.worker.cancel(&self.admission);
        }
    }
}

// === impl Events ===

impl Events {
    /// The events of a request under way.
    pub(super) fn new(underway: Underway, about: About) -> Self {
        let words = Words::new(&about, underway.worker.model_json());
        Self { underway, about, words, sent: 0, ended: false, opened: false, cutting: None, keep_alive: None }
    }

    /// What the stream says while its first token is not there yet, if it is time to say something.
    fn before_first(&mut self, context: &mut Context<'_>) -> Option<Vec<u8>> {
        match self.underway.worker.setup.first {
            _ if self.sent > 0 => None,
            First::None => None,
            First::Role => self.opening(),
            First::Comment => self.is_time(context).then(|| KEEP_ALIVE_COMMENT.to_vec()),
        }
    }

    /// Whether a keep-alive is due: at once, and each time after [`KEEP_ALIVE`].
    fn is_time(&mut self, context: &mut Context<'_>) -> bool {
        let is_due = match &mut self.keep_alive {
            None => true,
            Some(next) => next.as_mut().poll(context).is_ready(),
        };
        if is_due {
            self.keep_alive = Some(Box::pin(tokio::time::sleep(KEEP_ALIVE)));
        }
        is_due
    }

    fn opening(&mut self) -> Option<Vec<u8>> {
        if std::mem::replace(&mut self.opened, true) {
            return None;
        }
        let mut out = Vec::new();
        self.words.write_opening(&self.about, self.underway.worker.model_json(), &mut out);
        Some(out)
    }

    /// Appends the events of the tokens up to `ready`, as far as one frame takes them; the last token brings
    /// the end of the stream with it.
    fn write(&mut self, ready: u32, out: &mut Vec<u8>) {
        if self.sent == 0
            && self.about.api != Api::Completions
            && let Some(opening) = self.opening()
        {
            out.extend_from_slice(&opening);
        }
        while self.sent < ready && out.len() < MOCK_FRAME_BYTES {
            self.words.write_token(&self.about, self.underway.worker.vocabulary(), self.sent, out);
            self.sent += 1;
        }
        if self.sent == self.about.output_tokens {
            self.write_end(out);
        }
    }

    fn write_end(&mut self, out: &mut Vec<u8>) {
        self.ended = true;
        self.underway.done = true;
        let (worker, cached) = (&self.underway.worker, self.underway.ticket().cached_tokens());
        self.words.write_end(&self.about, worker.model_json(), worker.vocabulary(), cached, out);
    }
}

// === impl AnswerBody ===

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let events = match &mut *self {
            Self::Whole(bytes) => return Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Events(events) => events,
        };
        if events.ended {
            return Poll::Ready(None);
        }
        if events.about.cut_after.is_some_and(|tokens| events.sent >= tokens) {
            let pause = events.cutting.get_or_insert_with(|| Box::pin(tokio::time::sleep(CUT_DELAY)));
            ready!(pause.as_mut().poll(context));
            return Poll::Ready(Some(Err(broken())));
        }
        if let Some(said) = events.before_first(context) {
            return Poll::Ready(Some(Ok(Frame::data(said.into()))));
        }
        let ready = match ready!(events.underway.ticket().poll(events.sent, context)) {
            Progress::Tokens(ready) => ready.min(events.about.cut_after.unwrap_or(u32::MAX)),
            Progress::Broken => return Poll::Ready(Some(Err(broken()))),
        };
        let tokens = (ready - events.sent) as usize + 2;
        let mut out = Vec::with_capacity((tokens * events.words.token_bytes()).min(MOCK_FRAME_BYTES + 512));
        events.write(ready, &mut out);
        Poll::Ready(Some(Ok(Frame::data(out.into()))))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::Events(events) => events.ended,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Events(_) => SizeHint::default(),
        }
    }
}

fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "the mock worker broke off")
}
