//! A worker as a place to connect to, which protocol is spoken there, and its connections: those that wait
//! for a request (HTTP/1.1), and those that take several (HTTP/2).

use std::{
    io,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use http::{
    HeaderValue, Uri,
    uri::{Authority, Parts, PathAndQuery, Scheme},
};
use parking_lot::Mutex;
use prometheus::IntCounter;
use rustls::pki_types::ServerName;
use tokio::runtime::Handle;

use super::{
    http1::{Connection, Transport},
    idle::{Idle, watch},
    idle_timeout::IdleTimeout,
    links::Links,
};
use crate::{
    clock::Instant,
    config::port_of,
    limits::{POOL_IDLE_MAX, POOL_IDLE_MAX_PER_CORE_MIN},
    machine::cores::{self, PerCore},
    net::{Security, Stream, tls::ClientTls},
};

/// Where a worker listens. A clone is the same place, with the same idle connections: what makes two
/// connections interchangeable is that they are of one origin.
#[derive(Debug, Clone)]
pub struct Origin(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    host: String,
    port: u16,
    host_header: HeaderValue,
    security: Option<Security>,
    /// By the core that opened them and is woken by them.
    idle: PerCore<Idle>,
    /// How many, of each core.
    idle_max: usize,
    idle_timeout: IdleTimeout,
    /// Requests that met a kept connection's end.
    races: OnceLock<IntCounter>,
    /// Whether its idle connections are among those that may be closed for want of descriptors.
    listed: AtomicBool,
    authority: Option<Authority>,
    /// Whether HTTP/2 is wanted: without TLS that settles it, with TLS it is offered.
    http2: bool,
    /// Whether HTTP/2 is spoken, as far as is known.
    is_shared: AtomicBool,
    /// By the core on which their tasks run.
    links: PerCore<Links>,
}

impl Origin {
    /// The host and port of a URL; with TLS by these rules. `http2`: whether HTTP/2 is spoken, or over TLS
    /// offered.
    pub fn of(url: &Uri, tls: Option<Arc<ClientTls>>, http2: bool) -> Self {
        let authority = url.authority().map_or("", http::uri::Authority::as_str);
        let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
        Self(Arc::new(Inner {
            port: port_of(url),
            security: tls.zip(ServerName::try_from(host.clone()).ok()),
            // An authority has no byte that a header's value must not have.
            host_header: HeaderValue::from_str(authority).unwrap_or(HeaderValue::from_static("")),
            idle: PerCore::default(),
            idle_max: (POOL_IDLE_MAX / cores::count()).max(POOL_IDLE_MAX_PER_CORE_MIN),
            idle_timeout: IdleTimeout::default(),
            races: OnceLock::new(),
            listed: AtomicBool::new(false),
            host,
            authority: url.authority().cloned(),
            http2,
            is_shared: AtomicBool::new(http2),
            links: PerCore::default(),
        }))
    }

    /// Name or address, without brackets.
    pub fn host(&self) -> &str {
        &self.0.host
    }

    /// The URL's port, or the default of its scheme: 80, or 443 with TLS.
    pub fn port(&self) -> u16 {
        self.0.port
    }

    /// Whether it is spoken to without TLS.
    pub fn is_plain(&self) -> bool {
        self.0.security.is_none()
    }

    /// TLS, if it wants that.
    pub(super) fn security(&self) -> Option<&Security> {
        self.0.security.as_ref()
    }

    /// What requests to it carry as `Host`.
    pub fn host_header(&self) -> &HeaderValue {
        &self.0.host_header
    }

    /// Whether HTTP/2 is to be offered over TLS.
    pub(super) fn offers_http2(&self) -> bool {
        self.0.http2 || self.is_shared()
    }

    /// Whether requests share connections, as far as is known.
    pub(super) fn is_shared(&self) -> bool {
        self.0.is_shared.load(Relaxed)
    }

    /// What the worker chose, over TLS.
    pub(super) fn speaks_http2(&self, http2: bool) {
        self.0.is_shared.store(http2, Relaxed);
    }

    /// Its connections of HTTP/2, of this core.
    pub(super) fn links(&self) -> &Links {
        self.0.links.here()
    }

    /// The whole URI of a target, as HTTP/2 wants it.
    pub(super) fn uri(&self, target: &PathAndQuery) -> Uri {
        let mut parts = Parts::default();
        parts.scheme = Some(if self.0.security.is_some() { Scheme::HTTPS } else { Scheme::HTTP });
        parts.authority.clone_from(&self.0.authority);
        parts.path_and_query = Some(target.clone());
        Uri::from_parts(parts).unwrap_or_else(|_| target.clone().into())
    }

    /// Counts here from now on how often a kept connection was closed under a request.
    pub fn count_races(&self, races: IntCounter) {
        let _ = self.0.races.set(races);
    }

    /// A kept connection that had been idle for so long was closed under a request.
    pub(super) fn raced(&self, idle: Duration) {
        tracing::debug!(host = self.0.host, ?idle, "a kept connection was closed as a request went out");
        self.0.races.get().inspect(|races| races.inc());
        self.0.idle_timeout.closed(idle, Instant::now());
    }

    /// A connection of this core's that waits here, still open as far as is known, the last used first; and
    /// how long it did.
    pub(super) fn take(&self) -> Option<(Link, Duration)> {
        self.0.idle.here().take(&self.0.idle_timeout)
    }

    /// Keeps a connection whose answer has come to its end, unless it is of no more use.
    pub(super) fn keep(&self, link: Link) {
        if self.0.idle.here().keep(link, self.0.idle_max)
            && let Ok(runtime) = Handle::try_current()
        {
            // On this core's thread, so that it finds this core's.
            runtime
                .spawn(watch(Arc::downgrade(&self.0), |origin| (origin.idle.here(), &origin.idle_timeout)));
        }
    }

    /// Connections that wait for a request.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        self.0.idle.all().map(Idle::len).sum()
    }

    /// Closes what has waited too long; to be called now and then.
    pub fn sweep(&self) {
        self.0.idle.all().for_each(|idle| idle.sweep(&self.0.idle_timeout));
        self.0.links.all().for_each(Links::sweep);
    }
}

/// Origins with kept connections, so that the longest idle of all can be closed where there is no descriptor
/// for a new one.
#[derive(Debug, Clone, Default)]
pub(super) struct Kept(Arc<Mutex<Vec<Weak<Inner>>>>);

impl Kept {
    /// Requests go there from now on.
    pub(super) fn list(&self, origin: &Origin) {
        if !origin.0.listed.load(Relaxed) && !origin.0.listed.swap(true, Relaxed) {
            let mut all = self.0.lock();
            all.retain(|origin| origin.strong_count() > 0);
            all.push(Arc::downgrade(&origin.0));
        }
    }

    /// Closes the connection that has been idle for longest. Whether there was one.
    pub(super) fn shed(&self) -> bool {
        let all: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        let idle = all.iter().flat_map(|origin| origin.idle.all());
        let longest = idle.filter_map(|idle| Some((idle.longest()?, idle))).min_by_key(|(since, _)| *since);
        longest.is_some_and(|(_, idle)| idle.shed())
    }
}

/// One connection of HTTP/1.1. In a box for as long as it lives: each request takes it from hand to hand some
/// ten times.
pub(super) type Link = Box<Connection<Stream>>;

impl Transport for Stream {
    fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(tcp) => tcp.poll_read_ready(cx),
            // What was decrypted may be there already.
            Self::Tls(_) => Poll::Ready(Ok(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{machine::cores::Cores, net};

    use super::*;

    #[tokio::test]
    async fn a_connection_waits_for_the_core_that_it_wakes() {
        let worker = net::listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = worker.local_addr().unwrap();
        let origin = Origin::of(&format!("http://{address}").parse().unwrap(), None, false);
        let cores = Cores::start(1).unwrap();
        let at_the_core = async |keeps: bool| {
            let (say, said) = tokio::sync::oneshot::channel();
            let origin = origin.clone();
            cores.run(async move {
                if keeps {
                    let stream = net::TcpStream::connect(address).await.unwrap();
                    origin.keep(Box::new(Connection::new(Stream::Plain(stream))));
                }
                say.send(if keeps { false } else { origin.take().is_some() }).unwrap();
            });
            said.await.unwrap()
        };
        at_the_core(true).await;
        assert!(origin.take().is_none(), "this thread is another");
        assert!(at_the_core(false).await);
        assert!(!at_the_core(false).await);
    }
}
