//! The HTTP client that talks to workers. A connection of HTTP/1.1 (`http1.rs`) is driven by the task that
//! waits for its answer, so that an event costs one wake, and dropping a pending request or an unfinished
//! body closes its connection, which is how a worker learns that the client has left. When an answer has come
//! to its end its connection waits at its [`Origin`] for the next request. With workers that are to be spoken
//! HTTP/2 with, many requests share a connection, which has a task of its own; to leave resets the stream
//! alone.

mod answer;
mod failure;
mod http1;
mod idle;
mod idle_timeout;
mod interim;
mod links;
mod opening;
mod origin;
mod outgoing;
mod shared;
pub mod trailers;

use std::{future::poll_fn, io, pin::Pin, time::Duration};

use bytes::Bytes;
use h2::{RecvStream, client::ResponseFuture};
use http::{StatusCode, Version, header};
use tokio::io::AsyncReadExt;

pub use self::{
    answer::{Answer, AnswerError, Beside},
    failure::{FailureCause, SendError},
    http1::{Http1Error, recorded},
    origin::Origin,
    outgoing::Outgoing,
};
use self::{
    interim::Interim,
    opening::{Opened, Opening},
    origin::{Kept, Link},
    shared::{Place, not_begun},
};
use crate::{
    clock::{self, Instant},
    headers::strip_hop_by_hop,
    limits::WORKER_H2_RESENDS,
    machine::descriptors::Shortages,
    net::Connector,
    shortage::Shortage,
};

/// Time for a server's first word after its handshake: more than a round trip.
const FIRST_WORD_PATIENCE: Duration = Duration::from_millis(500);

/// Sends requests to workers.
#[derive(Debug, Clone)]
pub struct Upstream {
    connector: Connector,
    kept: Kept,
    shortages: Shortages,
}

impl Upstream {
    /// A client that opens connections this way, and tells there what the gateway lacks.
    pub fn new(connector: Connector, shortages: Shortages) -> Self {
        Self { connector, kept: Kept::default(), shortages }
    }

    /// Opens connections within this time from now on, and so do its clones.
    pub fn set_connect_timeout(&self, timeout: Duration) {
        self.connector.set_timeout(timeout);
    }

    /// Where it tells what the gateway lacks.
    pub fn shortages(&self) -> &Shortages {
        &self.shortages
    }

    /// Closes the kept connection that has been idle for longest. Whether there was one.
    pub fn shed(&self) -> bool {
        self.kept.shed()
    }

    /// Sends one request and waits for the head of the answer.
    pub async fn send(
        &self,
        origin: &Origin,
        request: Outgoing<'_>,
    ) -> Result<http::Response<Answer>, SendError> {
        self.kept.list(origin);
        if origin.is_shared() {
            return self.send_shared(origin, &request).await;
        }
        self.send_own(origin, &request).await
    }

    /// Over a connection of its own: a kept one, and where that was closed as the request went out, a new
    /// one.
    async fn send_own(
        &self,
        origin: &Origin,
        request: &Outgoing<'_>,
    ) -> Result<http::Response<Answer>, SendError> {
        // What must not be sent twice goes over none that may be about to be closed.
        let kept = if request.may_repeat() { origin.take() } else { None };
        if let Some((link, idle)) = kept {
            match exchange(origin, link, request).await {
                Err(Failure::Raced(_)) => origin.raced(idle),
                answer => return answer.map_err(Failure::into_error),
            }
        }
        // In a box: a request that finds a connection need not have room for what opening one takes.
        Box::pin(self.send_anew(origin, request)).await
    }

    /// Over a new connection of its own.
    async fn send_anew(
        &self,
        origin: &Origin,
        request: &Outgoing<'_>,
    ) -> Result<http::Response<Answer>, SendError> {
        match self.opening(origin, request).own().await? {
            Opened::Own(link) => exchange(origin, link, request).await.map_err(Failure::into_error),
            // Over TLS the worker wants HTTP/2.
            Opened::Shared(place) => {
                drop(place);
                self.send_shared(origin, request).await
            }
        }
    }

    /// Over a connection that others use too; in a box, so that it adds nothing to what requests over
    /// HTTP/1.1 take.
    fn send_shared<'a>(
        &'a self,
        origin: &'a Origin,
        request: &'a Outgoing<'_>,
    ) -> Pin<Box<dyn Future<Output = Result<http::Response<Answer>, SendError>> + Send + 'a>> {
        Box::pin(async move {
            let mut head = http::Request::new(());
            *head.method_mut() = request.method().clone();
            *head.uri_mut() = origin.uri(request.target());
            *head.version_mut() = Version::HTTP_2;
            *head.headers_mut() = request.header_map();
            // Once a kept connection has ended under it: one that was opened since.
            let mut since = None;
            for sent in 0.. {
                let Some(place) = self.opening(origin, request).place(since).await? else {
                    // Over TLS the worker wants HTTP/1.1.
                    return Box::pin(self.send_own(origin, request)).await;
                };
                match share(place, head.clone(), request.body().clone()).await {
                    Err(Failure::NotBegun) if sent < WORKER_H2_RESENDS => {}
                    Err(Failure::Raced(_)) if since.is_none() && request.may_repeat() => {
                        origin.raced(Duration::ZERO);
                        since = Some(Instant::now());
                    }
                    // What ends so soon again is its worker's fault.
                    Err(Failure::Raced(cause)) if since.is_some() => return Err(SendError::Lost(cause)),
                    answer => return answer.map_err(Failure::into_error),
                }
            }
            Err(SendError::Refused)
        })
    }

    /// Opens a connection and closes it, to learn why none can be. In TLS 1.3 a server says only after the
    /// handshake that it wants another certificate, so a word of it is waited for.
    pub async fn reach(&self, origin: &Origin) -> io::Result<()> {
        let opened = self.connector.connect(origin.host(), origin.port(), origin.security(), true);
        let mut stream = opened.await?.stream;
        match clock::timeout(FIRST_WORD_PATIENCE, stream.read(&mut [0])).await {
            Ok(Err(error)) => Err(error),
            _ => Ok(()),
        }
    }

    fn opening<'a>(&'a self, origin: &'a Origin, request: &Outgoing<'_>) -> Opening<'a> {
        let Self { connector, kept, shortages } = self;
        Opening { connector, kept, shortages, origin, is_a_client_s: request.is_a_client_s() }
    }
}

/// Why a request that was sent has no answer.
enum Failure {
    /// The worker has not begun it.
    NotBegun,
    /// A kept connection was closed before a word of the answer: that close may have crossed the request.
    Raced(FailureCause),
    /// The worker may have begun it.
    Lost(FailureCause),
    /// The gateway could not send it.
    Local(Shortage),
}

impl Failure {
    fn into_error(self) -> SendError {
        match self {
            Self::NotBegun => SendError::Refused,
            Self::Raced(_) => SendError::Raced,
            Self::Lost(cause) => SendError::Lost(cause),
            Self::Local(lacks) => SendError::Local(lacks),
        }
    }
}

/// One request over HTTP/2 and the head of its answer. Dropped before, it resets its stream.
async fn share(
    place: Place,
    request: http::Request<()>,
    body: Bytes,
) -> Result<http::Response<Answer>, Failure> {
    let failed = |error: &h2::Error| {
        let cause = FailureCause::of_h2(error);
        tracing::debug!(%cause, "no answer from the worker");
        if not_begun(error) {
            Failure::NotBegun
        } else if error.is_io() && place.is_kept() {
            Failure::Raced(cause)
        } else {
            Failure::Lost(cause)
        }
    };
    let sent = place.sender().send_request(request, body.is_empty());
    // The connection was given up since the place was taken: nothing was sent.
    let (answer, mut stream) = sent.map_err(|error| {
        tracing::debug!(cause = %FailureCause::of_h2(&error), "a shared connection takes no more");
        Failure::NotBegun
    })?;
    if !body.is_empty() {
        // Waits in whole at the stream for the worker's window. What fails here fails below, with its reason.
        let _ = stream.send_data(body, true);
    }
    let answer = answered(answer).await.map_err(|fault| match fault {
        Fault::Broken(error) => failed(&error),
        Fault::TooMuch => Failure::Lost(FailureCause::of("the worker sends too many interim answers")),
    })?;
    let (mut parts, body) = answer.into_parts();
    place.answered();
    parts.version = Version::HTTP_11;
    strip_hop_by_hop(&mut parts.headers);
    let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    let bodyless = [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&parts.status);
    Ok(http::Response::from_parts(parts, Answer::shared(body, length, bodyless, place)))
}

/// Why there is no answer over HTTP/2.
enum Fault {
    Broken(h2::Error),
    /// Its interim answers have no end.
    TooMuch,
}

/// The answer behind its interim ones.
async fn answered(mut answer: ResponseFuture) -> Result<http::Response<RecvStream>, Fault> {
    let mut interim = Interim::new();
    while let Some(head) = poll_fn(|cx| answer.poll_informational(cx)).await {
        let head = head.map_err(Fault::Broken)?;
        let fields = head.headers().iter().map(|(name, value)| name.as_str().len() + value.len());
        if !interim.may_come(fields.sum()) {
            return Err(Fault::TooMuch);
        }
    }
    answer.await.map_err(Fault::Broken)
}

/// One request and the head of its answer.
async fn exchange(
    origin: &Origin,
    mut link: Link,
    request: &Outgoing<'_>,
) -> Result<http::Response<Answer>, Failure> {
    let is_kept = link.has_answered();
    match link.ask(request, origin.host_header()).await {
        // What some say with the end of an idle connection (RFC 9110, section 15.5.9): the request was not
        // read.
        Ok(answer) if is_kept && answer.status() == StatusCode::REQUEST_TIMEOUT && !link.stays_open() => {
            Err(Failure::Raced(FailureCause::of("the worker says that the connection was idle for too long")))
        }
        Ok(answer) => Ok(answer.map(|()| Answer::own(link, origin.clone()))),
        Err(error) => {
            let cause = FailureCause::of_http1(&error);
            tracing::debug!(%cause, "no answer from the worker");
            Err(match error.shortage() {
                Some(lacks) => Failure::Local(lacks),
                None if is_kept && error.is_silent_close() => Failure::Raced(cause),
                None => Failure::Lost(cause),
            })
        }
    }
}

#[cfg(test)]
mod tests;
