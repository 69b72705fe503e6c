//! The HTTP client that talks to workers, over hyper's client connections themselves: each is driven by the task that
//! waits for its answer, so that an event costs one wake, and dropping a pending request or an unfinished body closes
//! its connection, which is how a worker learns that the client has left. When an answer has come to its end its
//! connection waits at its [`Origin`] for the next request.

mod answer;
mod origin;

use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1;

use self::origin::Link;
pub use self::{answer::Answer, origin::Origin};
use crate::{limits::ANSWER_BUFFER_BYTES, net::Connector};

/// A request for a worker: its target without scheme and authority, which are the origin's.
pub type Outgoing = http::Request<Full<Bytes>>;

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
}

impl SendError {
    /// For logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Lost => "lost",
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
        mut request: Outgoing,
    ) -> Result<http::Response<Answer>, SendError> {
        request.headers_mut().insert(http::header::HOST, origin.host_header().clone());
        // A pooled connection may have been closed as it was taken: what it did not begin to send goes to the next.
        while let Some(link) = origin.take() {
            match exchange(origin, link, request).await {
                Ok(answer) => return Ok(answer),
                Err((_, Some(unsent))) => request = unsent,
                Err((error, None)) => return Err(lost(&error)),
            }
        }
        let link = self.connect(origin).await?;
        exchange(origin, link, request).await.map_err(|(error, _)| lost(&error))
    }

    async fn connect(&self, origin: &Origin) -> Result<Link, SendError> {
        let failed = |error: &dyn std::error::Error| {
            tracing::debug!(error = %chain(error), "no connection to the worker");
            SendError::Connect
        };
        let stream = self
            .connector
            .connect(origin.host(), origin.port(), origin.security())
            .await
            .map_err(|e| failed(&e))?;
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(ANSWER_BUFFER_BYTES)
            .handshake(stream)
            .await
            .map_err(|e| failed(&e))?;
        Ok(Link::new(sender, connection))
    }
}

/// One request and the head of its answer. An error comes with the request where no byte of it was sent.
async fn exchange(
    origin: &Origin,
    mut link: Link,
    request: Outgoing,
) -> Result<http::Response<Answer>, (hyper::Error, Option<Outgoing>)> {
    let answer = {
        let mut head = pin!(link.sender.try_send_request(request));
        let connection = &mut link.connection;
        poll_fn(|cx| {
            // The connection sends the request as it is polled, and what it reads completes the head.
            connection.drive(cx);
            match head.as_mut().poll(cx) {
                Poll::Ready(answer) => Poll::Ready(answer),
                Poll::Pending => Poll::Pending,
            }
        })
        .await
    };
    match answer {
        Ok(answer) => Ok(answer.map(|body| Answer::new(body, link, origin.clone()))),
        Err(mut failed) => {
            let unsent = failed.take_message();
            Err((failed.into_error(), unsent))
        }
    }
}

fn lost(error: &hyper::Error) -> SendError {
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
