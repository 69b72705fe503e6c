//! Connections of a simulated network, under the names and with the methods of tokio's that this crate uses.
//! What only a kernel has (a socket of another process, another thread's) is an error here. Nothing but
//! `net.rs` names this file.

use std::{
    fs::File,
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use turmoil::net;

/// A connection; in a box, as a handle of the kernel's is small too.
#[derive(Debug)]
pub struct TcpStream(Box<net::TcpStream>);

/// Where connections come in.
pub struct TcpListener(net::TcpListener);

fn no_kernel() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "a simulated network has no sockets of the kernel")
}

impl TcpListener {
    /// Of the host that runs now.
    pub async fn bind(addr: SocketAddr) -> io::Result<Self> {
        net::TcpListener::bind(addr).await.map(Self)
    }

    /// Waits for the next connection; returns it with its peer's address.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let (stream, peer) = self.0.accept().await?;
        Ok((TcpStream(Box::new(stream)), peer))
    }

    /// The simulated address and port that it is bound to.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

impl std::fmt::Debug for TcpListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TcpListener")
    }
}

impl TcpStream {
    /// Connects to a host by its name or address.
    pub async fn connect(addr: impl turmoil::ToSocketAddrs) -> io::Result<Self> {
        Ok(Self(Box::new(net::TcpStream::connect(addr).await?)))
    }

    /// Never: there is one thread.
    pub fn from_std(_: std::net::TcpStream) -> io::Result<Self> {
        Err(no_kernel())
    }

    /// Never: there is one thread.
    pub fn into_std(self) -> io::Result<std::net::TcpStream> {
        Err(no_kernel())
    }

    /// Of no effect: nothing is held back.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.0.set_nodelay(nodelay)
    }

    /// Pending until there is something to read, or the end.
    pub fn poll_read_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut byte = [0];
        ready!(self.0.poll_peek(cx, &mut ReadBuf::new(&mut byte)))?;
        Poll::Ready(Ok(()))
    }
}

/// Never: no other process has a socket here.
pub fn adopt(_: std::net::TcpListener) -> io::Result<TcpListener> {
    Err(no_kernel())
}

/// A descriptor for a successor that never comes.
pub fn share(_: &TcpListener) -> io::Result<OwnedFd> {
    Ok(File::open("/dev/null")?.into())
}

/// The one address of a host.
pub(super) async fn lookup_host(
    (host, port): (&str, u16),
) -> io::Result<impl Iterator<Item = SocketAddr> + use<>> {
    Ok(std::iter::once(SocketAddr::new(turmoil::lookup(host), port)))
}

impl AsyncRead for TcpStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_shutdown(cx)
    }
}
