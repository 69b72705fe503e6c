//! The seam for sockets: listening, accepting and connecting, always with `TCP_NODELAY` (a stream's events
//! are small, and Nagle's algorithm with delayed ACKs would hold each back 40 ms). No HTTP here; ZMQ is in
//! `net/zmq.rs`. With the feature `simulation` the connections are a simulated network's
//! (`net/simulated.rs`).

pub mod port;
#[cfg(feature = "simulation")]
mod simulated;
mod stream;
pub mod tls;
pub mod zmq;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rustls::pki_types::ServerName;
#[cfg(not(feature = "simulation"))]
use tokio::net::lookup_host;
#[cfg(not(feature = "simulation"))]
pub use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;

#[cfg(feature = "simulation")]
use self::simulated::lookup_host;
#[cfg(feature = "simulation")]
pub use self::simulated::{TcpListener, TcpStream, adopt, share};
pub use self::stream::Stream;
use crate::{
    clock,
    net::tls::ClientTls,
    shortage::{self, Shortage},
};

/// Binds a listener; the error names the address.
pub async fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(addr).await.map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::AddrInUse => {
                ": another program has this port; choose one by --listen or --admin-listen"
            }
            _ => "",
        };
        io::Error::new(error.kind(), format!("cannot listen on {addr}: {error}{hint}"))
    })
}

/// Takes a socket that listens already.
#[cfg(not(feature = "simulation"))]
pub fn adopt(listener: std::net::TcpListener) -> io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Another handle of a listening socket.
#[cfg(not(feature = "simulation"))]
pub fn share(listener: &TcpListener) -> io::Result<std::os::fd::OwnedFd> {
    std::os::fd::AsFd::as_fd(listener).try_clone_to_owned()
}

/// The addresses of a name, sorted, each once. An error, not an empty list, where there are none.
pub async fn resolve(host: &str, port: u16) -> io::Result<Vec<IpAddr>> {
    let mut found: Vec<IpAddr> = look_up(host, port).await?.iter().map(SocketAddr::ip).collect();
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// The addresses of a name as the resolver orders them. Where it failed for want of descriptors the error
/// says so.
async fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let found = lookup_host((host, port)).await;
    found
        .map(Iterator::collect)
        .map_err(|error| shortage::of_lookup(&error).map_or(error, Shortage::into_error))
}

/// Connects to the first address of a name that answers.
async fn dial(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut failed = None;
    for address in look_up(host, port).await? {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the name has no address")))
}

/// Gives up on clients that have not taken what was sent to them for so long: by TCP's own clock, so that
/// neither a task nor a timer waits, and on every kind of connection. Connections accepted here have it from
/// their listener. Linux alone has that clock; elsewhere, and in a simulated network, such a client is held
/// for as long as its connection lives.
pub fn give_up_on_readers_after(listener: &TcpListener, stall: Duration) -> io::Result<()> {
    #[cfg(all(target_os = "linux", not(feature = "simulation")))]
    socket2::SockRef::from(listener).set_tcp_user_timeout(Some(stall))?;
    #[cfg(any(not(target_os = "linux"), feature = "simulation"))]
    let _ = (listener, stall);
    Ok(())
}

/// Accepts one connection and sets `TCP_NODELAY`.
pub async fn accept(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    let (stream, peer) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok((stream, peer))
}

/// TLS to a worker: by which rules, and whose certificate is expected.
pub type Security = (Arc<ClientTls>, ServerName<'static>);

/// A connection to a worker, and what both ends agreed to speak.
#[derive(Debug)]
pub struct Opened {
    /// The connection, plain or over TLS with its handshake done.
    pub stream: Stream,
    /// Whether the worker chose HTTP/2 (TLS alone says).
    pub http2: bool,
}

/// Opens connections to workers, within a deadline.
#[derive(Debug, Clone)]
pub struct Connector {
    timeout_ms: Arc<AtomicU64>,
    /// What a test lets it lack.
    #[cfg(test)]
    pub(crate) lacks: Arc<std::sync::OnceLock<Shortage>>,
}

impl Connector {
    /// A connector that gives up after `timeout`, name lookup included.
    pub fn new(timeout: Duration) -> Self {
        let connector = Self {
            timeout_ms: Arc::default(),
            #[cfg(test)]
            lacks: Arc::default(),
        };
        connector.set_timeout(timeout);
        connector
    }

    /// Gives up after this time from now on, and so do its clones.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout_ms.store(timeout.as_millis() as u64, Ordering::Relaxed);
    }

    /// Connects to the first address of the name that answers. Over TLS the worker may choose HTTP/2 if that
    /// is offered.
    pub async fn connect(
        &self,
        host: &str,
        port: u16,
        security: Option<&Security>,
        offer_http2: bool,
    ) -> io::Result<Opened> {
        #[cfg(test)]
        if let Some(lacks) = self.lacks.get() {
            return Err(lacks.into_error());
        }
        self.in_time(async {
            let stream = dial(host, port).await?;
            stream.set_nodelay(true)?;
            let Some((tls, name)) = security else {
                return Ok(Opened { stream: Stream::Plain(stream), http2: false });
            };
            let connector = TlsConnector::from(tls.config(offer_http2));
            let stream = connector.connect(name.clone(), stream).await?;
            let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
            Ok(Opened { stream: Stream::Tls(Box::new(stream)), http2 })
        })
        .await
    }

    /// Gives a step of connecting the time that there is for one.
    pub async fn in_time<T>(&self, step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let timeout = Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed));
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {timeout:?}"));
        clock::timeout(timeout, step).await.map_err(late)?
    }
}

/// Whether a worker refused a connection because it speaks none of the protocols that were offered (RFC 7301,
/// section 3.2).
pub fn speaks_another_protocol(error: &io::Error) -> bool {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(tls, Some(rustls::Error::AlertReceived(rustls::AlertDescription::NoApplicationProtocol)))
}
