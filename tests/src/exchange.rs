//! One request over either protocol, for tests that must hold on both. Dropping an exchange is the client
//! going away: a closed connection on HTTP/1.1, a reset stream on HTTP/2.

use std::net::SocketAddr;

use crate::client::Client;
use crate::h2_client::{H2Client, H2Exchange};
use crate::http1::End;
use crate::sse::Next;

/// The client's protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2 with prior knowledge.
    Http2,
}

/// Both protocols.
pub const PROTOCOLS: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];

/// One request and its response.
#[derive(Debug)]
pub enum Exchange {
    /// Over HTTP/1.1.
    Http1(Client),
    /// Over HTTP/2; the connection outlives the exchange only inside it. Declared so that the stream is
    /// dropped, and its reset queued, before the connection.
    Http2(H2Exchange, H2Client),
}

impl Exchange {
    /// Sends a JSON `POST` on a connection of its own.
    pub async fn post(protocol: Protocol, addr: SocketAddr, path: &str, body: &[u8]) -> Self {
        match protocol {
            Protocol::Http1 => {
                let mut client = Client::connect(addr).await;
                client.post(path, body).await;
                Self::Http1(client)
            }
            Protocol::Http2 => {
                let mut client = H2Client::connect(addr).await;
                let exchange = client.post(path, body).await;
                Self::Http2(exchange, client)
            }
        }
    }

    /// Reads the response's head; returns its status code.
    pub async fn status(&mut self) -> u16 {
        match self {
            Self::Http1(client) => client.head().await.status(),
            Self::Http2(exchange, _) => exchange.head().await.status.as_u16(),
        }
    }

    /// The next event, or how the body ended.
    pub async fn next_event(&mut self) -> Next {
        match self {
            Self::Http1(client) => client.next_event().await,
            Self::Http2(exchange, _) => exchange.next_event().await,
        }
    }

    /// The rest of the body and how it ended.
    pub async fn body(&mut self) -> (Vec<u8>, End) {
        match self {
            Self::Http1(client) => client.body().await,
            Self::Http2(exchange, _) => exchange.body().await,
        }
    }

    /// The client goes away. On HTTP/2 only the stream is reset; the connection is handed back and stays
    /// open, so that nothing but the reset can tell the server.
    pub fn disconnect(self) -> Option<H2Client> {
        match self {
            Self::Http1(_) => None,
            Self::Http2(exchange, client) => {
                drop(exchange);
                Some(client)
            }
        }
    }
}
