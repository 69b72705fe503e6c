//! Where the listening sockets come from: a predecessor that hands them over (`handover.rs`), systemd (socket
//! activation), or the kernel. In the first two cases no client that connects in between is refused.

use std::{io, net::SocketAddr, os::fd::OwnedFd};

use listenfd::ListenFd;

use crate::{
    config::Config,
    net::{self, TcpListener},
};

/// The listening sockets of one process, bound already.
#[derive(Debug)]
pub struct Sockets {
    /// For clients: at `listen` of the configuration, or at the address of a socket that was given.
    pub clients: TcpListener,
    /// For operators: at `admin_listen`, or at the address of a socket that was given.
    pub admin: TcpListener,
    /// KEDA's, where it asks the gateway itself.
    pub scaler: Option<TcpListener>,
}

/// Further handles of the same sockets, to give to a successor.
#[derive(Debug)]
pub struct Handles {
    /// A duplicate of [`Sockets::clients`].
    pub clients: OwnedFd,
    /// A duplicate of [`Sockets::admin`].
    pub admin: OwnedFd,
    /// A duplicate of [`Sockets::scaler`]; `None` where that is.
    pub scaler: Option<OwnedFd>,
}

impl Sockets {
    /// From systemd, which passes them in the order of the `.socket` unit, clients' first; those that it has
    /// not are bound.
    pub async fn open(config: &Config) -> io::Result<Self> {
        let mut given = ListenFd::from_env();
        let mut take = |place: usize, wanted: SocketAddr| {
            let found = given.take_tcp_listener(place).ok().flatten();
            found.map(|listener| adopt(listener, wanted)).transpose()
        };
        let (clients, admin) = (take(0, config.listen)?, take(1, config.admin_listen)?);
        let scaler = config.scale.external_listen.map(|wanted| take(2, wanted)).transpose()?.flatten();
        Self::complete(clients, admin, scaler, config).await
    }

    /// From a predecessor. An address that the configuration has changed is bound anew.
    pub async fn inherit(handles: Handles, config: &Config) -> io::Result<Self> {
        let same = |handle: OwnedFd, wanted: SocketAddr| {
            let listener = std::net::TcpListener::from(handle);
            let is = listener.local_addr()?;
            // Port 0 means any: the one that the predecessor got.
            let kept = is.ip() == wanted.ip() && (is.port() == wanted.port() || wanted.port() == 0);
            if kept { adopt(listener, wanted).map(Some) } else { Ok(None) }
        };
        let clients = same(handles.clients, config.listen)?;
        let admin = same(handles.admin, config.admin_listen)?;
        let scaler = match handles.scaler.zip(config.scale.external_listen) {
            Some((handle, wanted)) => same(handle, wanted)?,
            None => None,
        };
        Self::complete(clients, admin, scaler, config).await
    }

    /// Binds the sockets that were not given.
    async fn complete(
        clients: Option<TcpListener>,
        admin: Option<TcpListener>,
        scaler: Option<TcpListener>,
        config: &Config,
    ) -> io::Result<Self> {
        Ok(Self {
            clients: or_bind(clients, config.listen).await?,
            admin: or_bind(admin, config.admin_listen).await?,
            scaler: match config.scale.external_listen {
                Some(wanted) => Some(or_bind(scaler, wanted).await?),
                None => None,
            },
        })
    }

    /// Further handles of them. As long as one is open the kernel goes on taking connections.
    pub fn handles(&self) -> io::Result<Handles> {
        let scaler = self.scaler.as_ref().map(net::share).transpose()?;
        Ok(Handles { clients: net::share(&self.clients)?, admin: net::share(&self.admin)?, scaler })
    }
}

fn adopt(listener: std::net::TcpListener, wanted: SocketAddr) -> io::Result<TcpListener> {
    let is = listener.local_addr()?;
    if is != wanted {
        tracing::info!(given = %is, configured = %wanted, "a listening socket was given; its address holds");
    }
    net::adopt(listener)
}

async fn or_bind(given: Option<TcpListener>, address: SocketAddr) -> io::Result<TcpListener> {
    match given {
        Some(listener) => Ok(listener),
        None => net::listen(address).await,
    }
}
