//! Whether a process listens at a worker's port, by a connection that is closed at once. It says which step
//! failed, and whether that can be held against the worker.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use rustix::io::Errno;
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;

use super::{TcpStream, lookup_host};
use crate::{clock, net::tls};

/// Why there is no connection.
#[derive(Debug)]
pub enum Unreached {
    /// The name has no address, by what the resolver says.
    Name(io::Error),
    /// No address took it.
    Connect(io::Error),
    /// Nothing came back in time.
    TimedOut,
}

impl Unreached {
    /// Whether a connection was refused, or no host is at the address: then no process listens.
    pub fn is_refusal(&self) -> bool {
        use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable};
        let refuses = [ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable];
        matches!(self, Self::Connect(error) if refuses.contains(&error.kind()))
    }

    /// Whether the trouble is the gateway's own: no descriptor, no port, no memory for a connection, or no
    /// right to make one.
    pub fn is_own(&self) -> bool {
        match self {
            Self::Name(error) | Self::Connect(error) => is_own(error),
            Self::TimedOut => false,
        }
    }
}

fn is_own(error: &io::Error) -> bool {
    let own = [
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOBUFS,
        Errno::NOMEM,
        Errno::ADDRNOTAVAIL,
        Errno::ADDRINUSE,
        Errno::PERM,
        Errno::ACCESS,
    ];
    Errno::from_io_error(error).is_some_and(|errno| own.contains(&errno))
}

/// Looks at one worker's port again and again.
#[derive(Debug, Default)]
pub struct Port {
    /// The address that took the last connection: the name is looked up again only when it takes no more.
    last: Option<SocketAddr>,
    looks_up: bool,
}

impl Port {
    /// Opens a connection and closes it.
    pub async fn look(&mut self, host: &str, port: u16, patience: Duration) -> Result<(), Unreached> {
        self.looks_up = false;
        match clock::timeout(patience, self.connect(host, port)).await {
            Ok(seen) => seen,
            Err(_) if self.looks_up => Err(Unreached::Name(io::Error::new(
                io::ErrorKind::TimedOut,
                "no name server answered in time",
            ))),
            Err(_) => Err(Unreached::TimedOut),
        }
    }

    async fn connect(&mut self, host: &str, port: u16) -> Result<(), Unreached> {
        let last = self.last.take();
        let mut failed = None;
        if let Some(address) = last {
            match TcpStream::connect(address).await {
                Ok(_) => {
                    self.last = last;
                    return Ok(());
                }
                Err(error) => failed = Some(error),
            }
        }
        // An address that refuses says more than a resolver that fails.
        self.looks_up = true;
        let found = lookup_host((host, port)).await;
        self.looks_up = false;
        let found = match found {
            Ok(found) => found,
            Err(error) => return Err(failed.map_or_else(|| Unreached::Name(error), Unreached::Connect)),
        };
        for address in found.filter(|address| last != Some(*address)) {
            match TcpStream::connect(address).await {
                Ok(_) => {
                    self.last = Some(address);
                    return Ok(());
                }
                Err(error) => failed = Some(error),
            }
        }
        let nowhere = || io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        Err(failed.map_or_else(|| Unreached::Name(nowhere()), Unreached::Connect))
    }
}

/// Whether a server speaks TLS, by its answer to a greeting. No certificate is believed, as none is needed to
/// know.
pub async fn speaks_tls(host: &str, port: u16, patience: Duration) -> bool {
    let Some(config) = tls::believes_nobody() else { return false };
    let name =
        ServerName::try_from(host.to_owned()).unwrap_or(ServerName::IpAddress(Ipv4Addr::LOCALHOST.into()));
    let greeting = async {
        let stream = TcpStream::connect((host, port)).await?;
        TlsConnector::from(config).connect(name, stream).await
    };
    match clock::timeout(patience, greeting).await {
        Ok(Ok(_)) => true,
        Ok(Err(error)) => match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(rustls::Error::InvalidMessage(_)) | None => false,
            Some(_) => true,
        },
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::listen;

    const PATIENCE: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn a_port_is_open_while_somebody_listens_and_refuses_when_not() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = listener.local_addr().unwrap().port();
        let mut port = Port::default();
        for host in ["127.0.0.1", "localhost", "127.0.0.1"] {
            port.look(host, at, PATIENCE).await.unwrap();
        }
        drop(listener);
        for _ in 0..2 {
            let error = port.look("localhost", at, PATIENCE).await.unwrap_err();
            assert!(error.is_refusal() && !error.is_own(), "{error:?}");
        }
    }

    #[tokio::test]
    async fn a_name_that_nobody_has_is_told_from_a_port_that_nobody_has() {
        let error = Port::default().look("no-such-host.invalid", 1, PATIENCE).await.unwrap_err();
        assert!(matches!(error, Unreached::Name(_)) && !error.is_refusal(), "{error:?}");
    }

    #[test]
    fn trouble_of_the_gateway_s_own_is_no_refusal() {
        for errno in [Errno::MFILE, Errno::NFILE, Errno::ADDRNOTAVAIL, Errno::NOBUFS, Errno::ACCESS] {
            let error = Unreached::Connect(errno.into());
            assert!(error.is_own() && !error.is_refusal(), "{error:?}");
        }
        for errno in [Errno::CONNREFUSED, Errno::CONNRESET, Errno::HOSTUNREACH] {
            let error = Unreached::Connect(errno.into());
            assert!(!error.is_own() && error.is_refusal(), "{error:?}");
        }
        let nowhere = Unreached::Connect(Errno::NETUNREACH.into());
        assert!(!nowhere.is_own() && !nowhere.is_refusal());
    }
}
