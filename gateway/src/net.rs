//! The seam for sockets: listening, accepting and connecting, always with `TCP_NODELAY` (a stream's events are
//! small, and Nagle's algorithm with delayed ACKs would hold each back 40 ms). No HTTP here; ZMQ is in
//! `net/zmq.rs`.

pub mod zmq;

use std::{
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::Uri;
use hyper_util::rt::TokioIo;
pub use tokio::net::{TcpListener, TcpStream};

use crate::clock;

/// Binds a listener; the error names the address.
pub async fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(addr)
        .await
        .map_err(|error| io::Error::new(error.kind(), format!("cannot listen on {addr}: {error}")))
}

/// The addresses of a name, sorted, each once. An error, not an empty list, where there are none.
pub async fn resolve(host: &str, port: u16) -> io::Result<Vec<IpAddr>> {
    let mut found: Vec<IpAddr> =
        tokio::net::lookup_host((host, port)).await?.map(|address| address.ip()).collect();
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Accepts one connection and sets `TCP_NODELAY`.
pub async fn accept(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    let (stream, peer) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok((stream, peer))
}

/// Opens connections to workers for the pooled HTTP client, within a deadline.
#[derive(Debug, Clone)]
pub struct Connector {
    timeout: Duration,
}

impl Connector {
    /// A connector that gives up after `timeout`, name lookup included.
    pub fn new(timeout: Duration) -> Self {
        Self { timeout }
    }
}

async fn connect(uri: Uri, timeout: Duration) -> io::Result<TokioIo<TcpStream>> {
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
    let port = uri.port_u16().unwrap_or(80);
    // `TcpStream::connect` tries each address that the name resolves to.
    let stream =
        clock::timeout(timeout, TcpStream::connect((host.as_str(), port))).await.map_err(|_| {
            io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {timeout:?}"))
        })??;
    stream.set_nodelay(true)?;
    Ok(TokioIo::new(stream))
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(connect(uri, self.timeout))
    }
}
