//! Answers: a stream of server-sent events as the tokens come out, or one JSON object at the end. Writes bytes; when
//! tokens come is the engine's. Dropping an answer before its end aborts the request.

use std::{
    io::{self, Write as _},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::Sleep;

use super::{
    prompt::{TOKEN_BYTES, Vocabulary},
    ticket::{Progress, Ticket},
    worker::{Admission, Worker},
};
use crate::limits::MOCK_FRAME_BYTES;

/// Pause before a cut, so that the tokens before it leave the socket buffer: hyper drops unflushed bytes when a body
/// fails.
const CUT_DELAY: Duration = Duration::from_millis(20);

/// A response's body.
#[derive(Debug)]
pub(super) enum AnswerBody {
    /// All of it.
    Whole(Option<Bytes>),
    /// Events.
    Events(Box<Events>),
}

/// What an answer says besides its tokens.
#[derive(Debug)]
pub(super) struct About {
    /// `chat.completion` or `text_completion`.
    pub chat: bool,
    /// Number that its id is made of.
    pub id: u64,
    /// Unix seconds.
    pub created: u64,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Tokens that will be generated.
    pub output_tokens: u32,
    /// First token of the answer.
    pub first: u32,
    /// Its finish reason.
    pub finish: &'static str,
    /// Whether a usage chunk follows.
    pub include_usage: bool,
    /// Tokens after which the connection breaks.
    pub cut_after: Option<u32>,
}

/// A request under way; dropping it aborts the request if it is not done.
#[derive(Debug)]
pub(super) struct Underway {
    /// Where.
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
    /// What every token's event begins with.
    head: Vec<u8>,
    sent: u32,
    ended: bool,
    /// Runs before a cut.
    cutting: Option<Pin<Box<Sleep>>>,
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

// === impl About ===

impl About {
    fn write_start(&self, object: &str, model: &str, out: &mut Vec<u8>) {
        let prefix = if self.chat { "chatcmpl" } else { "cmpl" };
        // Writing to memory cannot fail.
        let _ = write!(
            out,
            r#"{{"id":"{prefix}-{:016x}","object":"{object}","created":{},"model":{model},"choices":["#,
            self.id, self.created
        );
    }

    fn write_usage(&self, cached_tokens: u32, out: &mut Vec<u8>) {
        let (prompt, output) = (self.prompt_tokens, self.output_tokens);
        let _ = write!(
            out,
            r#""usage":{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":{output},"prompt_tokens_details":{{"cached_tokens":{cached_tokens}}}}}"#,
            prompt + output
        );
    }

    /// The whole answer as one JSON object. `model` is a JSON string.
    pub(super) fn whole(&self, model: &str, vocabulary: &Vocabulary, cached_tokens: u32) -> Vec<u8> {
        let mut out = Vec::with_capacity(512 + self.output_tokens as usize * TOKEN_BYTES);
        self.write_start(if self.chat { "chat.completion" } else { "text_completion" }, model, &mut out);
        let open: &[u8] = if self.chat {
            br#"{"index":0,"message":{"role":"assistant","content":""#
        } else {
            br#"{"index":0,"text":""#
        };
        out.extend_from_slice(open);
        (0..self.output_tokens).for_each(|i| out.extend_from_slice(vocabulary.token(self.first, i)));
        let close = if self.chat { r#""}"# } else { r#"""# };
        let _ = write!(out, r#"{close},"logprobs":null,"finish_reason":"{}"}}],"#, self.finish);
        self.write_usage(cached_tokens, &mut out);
        out.push(b'}');
        out
    }
}

// === impl Events ===

impl Events {
    /// The events of a request under way.
    pub(super) fn new(underway: Underway, about: About) -> Self {
        let mut head = b"data: ".to_vec();
        about.write_start(
            if about.chat { "chat.completion.chunk" } else { "text_completion" },
            underway.worker.model_json(),
            &mut head,
        );
        Self { underway, about, head, sent: 0, ended: false, cutting: None }
    }

    /// Appends the events of the tokens up to `ready`, as far as one frame takes them; the last token brings the end
    /// of the stream with it.
    fn write(&mut self, ready: u32, out: &mut Vec<u8>) {
        if self.sent == 0 && self.about.chat {
            out.extend_from_slice(&self.head);
            out.extend_from_slice(br#"{"index":0,"delta":{"role":"assistant","content":""},"#);
            out.extend_from_slice(b"\"logprobs\":null,\"finish_reason\":null}]}\n\n");
        }
        let (open, close): (&[u8], &[u8]) = if self.about.chat {
            (br#"{"index":0,"delta":{"content":""#, br#""},"logprobs":null,"finish_reason":"#)
        } else {
            (br#"{"index":0,"text":""#, br#"","logprobs":null,"finish_reason":"#)
        };
        let vocabulary = self.underway.worker.vocabulary();
        while self.sent < ready && out.len() < MOCK_FRAME_BYTES {
            out.extend_from_slice(&self.head);
            out.extend_from_slice(open);
            out.extend_from_slice(vocabulary.token(self.about.first, self.sent));
            out.extend_from_slice(close);
            self.sent += 1;
            if self.sent < self.about.output_tokens {
                out.extend_from_slice(b"null}]}\n\n");
            } else {
                let _ = write!(out, "\"{}\"}}]}}\n\n", self.about.finish);
            }
        }
        if self.sent == self.about.output_tokens {
            self.write_end(out);
        }
    }

    fn write_end(&mut self, out: &mut Vec<u8>) {
        self.ended = true;
        self.underway.done = true;
        if self.about.include_usage {
            out.extend_from_slice(&self.head);
            out.extend_from_slice(b"],");
            self.about.write_usage(self.underway.ticket().cached_tokens(), out);
            out.extend_from_slice(b"}\n\n");
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
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
        let ready = match ready!(events.underway.ticket().poll(events.sent, context)) {
            Progress::Tokens(ready) => ready.min(events.about.cut_after.unwrap_or(u32::MAX)),
            Progress::Broken => return Poll::Ready(Some(Err(broken()))),
        };
        let tokens = (ready - events.sent) as usize + 2;
        let mut out = Vec::with_capacity((tokens * (events.head.len() + 96)).min(MOCK_FRAME_BYTES + 512));
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
