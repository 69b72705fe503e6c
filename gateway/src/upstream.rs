//! The pooled HTTP client that talks to workers. Dropping a pending request or an unfinished body closes its
//! connection, which is how a worker learns that the client has left.

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, Error},
    rt::{TokioExecutor, TokioTimer},
};

use crate::{limits::POOL_IDLE_TIMEOUT, net::Connector};

/// Sends requests to workers.
#[derive(Debug, Clone)]
pub struct Upstream {
    client: Client<Connector, Full<Bytes>>,
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
    /// A client with an empty pool.
    pub fn new(connector: Connector) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .build(connector);
        Self { client }
    }

    /// Sends one request and waits for the head of the answer.
    pub async fn send(
        &self,
        request: http::Request<Full<Bytes>>,
    ) -> Result<http::Response<Incoming>, SendError> {
        self.client.request(request).await.map_err(|error| {
            tracing::debug!(error = %chain(&error), "no answer from the worker");
            if error.is_connect() { SendError::Connect } else { SendError::Lost }
        })
    }
}

/// An error with its causes, in one line.
fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
