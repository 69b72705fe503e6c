//! The connections to one server: those that wait for a request, and new ones. Has no bound of its own: an
//! open loop needs as many as there are answers under way.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use http::{HeaderValue, Uri};
use hyper_util::client::legacy::connect::HttpConnector;
use tower_service::Service as _;

use super::connection::Connection;
use crate::limits::IDLE_CONNECTION_MAX;

/// What waits, the one that was used last at the end.
#[derive(Debug)]
pub(super) struct Pool {
    server: Uri,
    connector: HttpConnector,
    idle: Mutex<VecDeque<(Connection, Instant)>>,
}

/// Why there is no connection to the server.
#[derive(Debug, thiserror::Error)]
#[error("no connection")]
pub struct Unconnected(#[source] Box<dyn std::error::Error + Send + Sync>);

impl Pool {
    /// No connection yet to `server`.
    pub(super) fn new(server: Uri) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self { server, connector, idle: Mutex::default() }
    }

    /// A connection for one request: the one that waits for the shortest time, else a new one.
    pub(super) async fn connection(&self) -> Result<Connection, Unconnected> {
        while let Some(connection) = self.waiting() {
            if connection.is_quiet() {
                return Ok(connection);
            }
        }
        let stream = self.connector.clone().call(self.server.clone()).await;
        let stream = stream.map_err(|error| Unconnected(error.into()))?;
        Ok(Connection::new(stream.into_inner()))
    }

    /// What `host` says in each request; a port that every client assumes is left out.
    pub(super) fn host(&self) -> Option<HeaderValue> {
        let host = self.server.host()?;
        let port = self.server.port_u16().filter(|&port| port != 80);
        let host = port.map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        HeaderValue::try_from(host).ok()
    }

    fn waiting(&self) -> Option<Connection> {
        let (connection, since) = self.idle().pop_back()?;
        (since.elapsed() < IDLE_CONNECTION_MAX).then_some(connection)
    }

    /// Takes back a connection whose answer is over.
    pub(super) fn put(&self, connection: Connection) {
        let now = Instant::now();
        let is_old = |since: Instant| now.saturating_duration_since(since) >= IDLE_CONNECTION_MAX;
        let mut idle = self.idle();
        // One at a time: each that is put there makes room for itself.
        if idle.front().is_some_and(|(_, since)| is_old(*since)) {
            idle.pop_front();
        }
        idle.push_back((connection, now));
    }

    /// Nothing that panics is done while it is held.
    fn idle(&self) -> MutexGuard<'_, VecDeque<(Connection, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
