//! The HTTP client that talks to workers. A connection of HTTP/1.1 (`http1.rs`) is driven by the task that waits for its
//! answer, so that an event costs one wake, and dropping a pending request or an unfinished body closes
//! its connection, which is how a worker learns that the client has left. When an answer has come to its end its
//! connection waits at its [`Origin`] for the next request. With workers that are to be spoken HTTP/2 with, many requests
//! share a connection, which has a task of its own; to leave resets the stream alone.

mod answer;
mod http1;
mod links;
mod origin;
mod outgoing;
mod shared;

use std::{io, pin::Pin, time::Duration};

use bytes::Bytes;
use http::{Version, header};
use tokio::io::AsyncReadExt;

pub use self::{
    answer::{Answer, AnswerError},
    http1::Http1Error,
    origin::Origin,
    outgoing::Outgoing,
};
use self::{
    links::Turn,
    origin::Link,
    shared::{Place, Shared, not_begun},
};
use crate::{
    clock,
    limits::WORKER_H2_RESENDS,
    net::{Connector, speaks_another_protocol},
};

/// Time for a server's first word after its handshake: more than a round trip.
const FIRST_WORD_PATIENCE: Duration = Duration::from_millis(500);

/// Sends requests to workers.
#[derive(Debug, Clone)]
pub struct Upstream {
    connector: Connector,
}

/// Why a worker gave no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendError {
    /// No connection: nothing was sent.
    Connect,
    /// The connection broke before the head of an answer.
    Lost,
    /// The worker says that it has not begun the request, and will not (HTTP/2).
    Refused,
}

impl SendError {
    /// For logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Lost => "lost",
            Self::Refused => "refused",
        }
    }
}

impl Upstream {
    /// A client that opens connections this way.
    pub fn new(connector: Connector) -> Self {
        Self { connector }
    }

    /// Opens connections within this time from now on, and so do its clones.
    pub fn set_connect_timeout(&self, timeout: Duration) {
        self.connector.set_timeout(timeout);
    }

    /// Sends one request and waits for the head of the answer.
    pub async fn send(
        &self,
        origin: &Origin,
        request: Outgoing<'_>,
    ) -> Result<http::Response<Answer>, SendError> {
        if origin.is_shared() {
            return self.send_shared(origin, &request).await;
        }
        self.send_own(origin, &request).await
    }

    /// Over a connection of its own.
    async fn send_own(
        &self,
        origin: &Origin,
        request: &Outgoing<'_>,
    ) -> Result<http::Response<Answer>, SendError> {
        // A pooled connection may have been closed as it was taken: what it did not begin to send goes to the next.
        while let Some(link) = origin.take() {
            match exchange(origin, link, request).await {
                Err(Http1Error::NothingSent(_)) => {}
                answer => return answer.map_err(|error| lost(&error)),
            }
        }
        // In a box: a request that finds a connection need not have room for what opening one takes.
        match Box::pin(self.connect(origin)).await? {
            Opened::Own(link) => exchange(origin, link, request).await.map_err(|error| lost(&error)),
            // Over TLS the worker wants HTTP/2.
            Opened::Shared(place) => {
                drop(place);
                self.send_shared(origin, request).await
            }
        }
    }

    /// Over a connection that others use too; in a box, so that it adds nothing to what requests over HTTP/1.1 take.
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
            for sent in 0.. {
                let Some(place) = self.enter(origin).await? else {
                    // Over TLS the worker wants HTTP/1.1.
                    return Box::pin(self.send_own(origin, request)).await;
                };
                match share(place, head.clone(), request.body().clone()).await {
                    Ok(answer) => return Ok(answer),
                    Err(Failure::NotBegun) if sent < WORKER_H2_RESENDS => {}
                    Err(Failure::NotBegun) => return Err(SendError::Refused),
                    Err(Failure::Lost) => return Err(SendError::Lost),
                }
            }
            Err(SendError::Refused)
        })
    }

    /// A place on a connection; `None` where the worker speaks HTTP/1.1 after all.
    async fn enter(&self, origin: &Origin) -> Result<Option<Place>, SendError> {
        if let Some(place) = origin.links().enter() {
            return Ok(Some(place));
        }
        let _turn = match origin.links().turn().await {
            Turn::Place(place) => return Ok(Some(place)),
            Turn::Failed => return Err(SendError::Connect),
            Turn::Open(turn) => turn,
        };
        match self.connect(origin).await {
            Ok(Opened::Shared(place)) => Ok(Some(place)),
            Ok(Opened::Own(link)) => {
                origin.keep(link);
                Ok(None)
            }
            Err(error) => {
                origin.links().failed();
                Err(error)
            }
        }
    }

    /// Opens a connection and closes it, to learn why none can be. In TLS 1.3 a server says only after the handshake that it wants
    /// another certificate, so a word of it is waited for.
    pub async fn reach(&self, origin: &Origin) -> io::Result<()> {
        let opened = self.connector.connect(origin.host(), origin.port(), origin.security(), true);
        let mut stream = opened.await?.stream;
        match clock::timeout(FIRST_WORD_PATIENCE, stream.read(&mut [0])).await {
            Ok(Err(error)) => Err(error),
            _ => Ok(()),
        }
    }

    async fn connect(&self, origin: &Origin) -> Result<Opened, SendError> {
        self.open(origin).await.map_err(|error| {
            tracing::debug!(error = %chain(&error), "no connection to the worker");
            SendError::Connect
        })
    }

    async fn open(&self, origin: &Origin) -> io::Result<Opened> {
        let connect = |offer_http2| {
            self.connector.connect(origin.host(), origin.port(), origin.security(), offer_http2)
        };
        let offered = origin.offers_http2();
        let opened = match connect(offered).await {
            Err(error) if !offered && speaks_another_protocol(&error) => connect(true).await?,
            opened => opened?,
        };
        if origin.security().is_some() {
            origin.speaks_http2(opened.http2);
        }
        if origin.is_shared() {
            let shared = self.connector.in_time(Shared::open(opened.stream)).await?;
            return Ok(Opened::Shared(origin.links().add(shared)));
        }
        Ok(Opened::Own(Link::new(opened.stream)))
    }
}

/// A new connection.
enum Opened {
    /// For one request at a time.
    Own(Link),
    /// For several: it is among those of its origin, and this is a place on it.
    Shared(Place),
}

/// Why a request that shares a connection has no answer.
enum Failure {
    /// The worker has not begun it.
    NotBegun,
    /// It may have.
    Lost,
}

/// One request over HTTP/2 and the head of its answer. Dropped before, it resets its stream.
async fn share(
    place: Place,
    request: http::Request<()>,
    body: Bytes,
) -> Result<http::Response<Answer>, Failure> {
    let refused = |error: &h2::Error| {
        tracing::debug!(error = %chain(error), "no answer from the worker");
        if not_begun(error) { Failure::NotBegun } else { Failure::Lost }
    };
    let sent = place.sender().send_request(request, body.is_empty());
    // The connection was given up since the place was taken: nothing was sent.
    let (answer, mut stream) = sent.map_err(|error| {
        tracing::debug!(error = %chain(&error), "a shared connection takes no more");
        Failure::NotBegun
    })?;
    if !body.is_empty() {
        // Waits in whole at the stream for the worker's window. What fails here fails below, with its reason.
        let _ = stream.send_data(body, true);
    }
    let (mut parts, body) = answer.await.map_err(|error| refused(&error))?.into_parts();
    parts.version = Version::HTTP_11;
    let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    Ok(http::Response::from_parts(parts, Answer::shared(body, length, place)))
}

/// One request and the head of its answer.
async fn exchange(
    origin: &Origin,
    mut link: Link,
    request: &Outgoing<'_>,
) -> Result<http::Response<Answer>, Http1Error> {
    let answer = link.ask(request, origin.host_header()).await?;
    Ok(answer.map(|()| Answer::own(link, origin.clone())))
}

fn lost(error: &Http1Error) -> SendError {
    tracing::debug!(error = %chain(error), "no answer from the worker");
    SendError::Lost
}

/// An error with its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
