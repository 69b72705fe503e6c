//! Follows the other gateways in front of the same workers: what each has at each worker, as it changes.
//! Engines' gauges tell that late, and vLLM's in requests only, of which one may wait ten times as long as
//! another. What is told is in `peers/telling.rs`, what was heard in `peers/hearsay.rs`, what it means for a
//! choice in `keyway_core::others`.

mod catch_up;
mod hearsay;
mod line;
mod placements;
mod telling;

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::BytesMut;
use http::{HeaderValue, Uri, header::AUTHORIZATION};
use http_body_util::BodyExt;
use parking_lot::Mutex;
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinHandle, JoinSet},
};

pub use self::{
    hearsay::{GatewayId, Hearsay, Voice},
    line::{Line, LoadEntry, OwnerEntry},
    placements::PlacementNews,
    telling::Telling,
};
use crate::{
    clock,
    config::PeersConfig,
    limits::{
        DISCOVERY_INTERVAL, MAX_PEER_LINE_BYTES, PEER_PAUSE, PEER_SILENCE_MAX, PEER_TWICE_PAUSE,
        PROBE_TIMEOUT,
    },
    metrics::PeerStates,
    net,
    routing::Router,
    upstream::{Answer, Origin, Outgoing, Upstream},
};

/// The other gateways, as far as this one listens to them.
#[derive(Debug)]
pub struct Peers {
    /// Id of this gateway, drawn at its start, so that it does not listen to itself.
    pub own: GatewayId,
    hearsay: Arc<Hearsay>,
    upstream: Upstream,
    admin_token: watch::Receiver<Option<HeaderValue>>,
    states: PeerStates,
    following: Mutex<Option<JoinHandle<()>>>,
    /// Whether it was said whom to listen to.
    named: AtomicBool,
}

/// What every follower needs.
#[derive(Debug, Clone)]
struct Follower {
    config: Arc<PeersConfig>,
    hearsay: Arc<Hearsay>,
    upstream: Upstream,
    /// Shown to those that have no token of their own.
    admin_token: watch::Receiver<Option<HeaderValue>>,
    states: PeerStates,
}

/// Why one gateway is followed no more.
#[derive(Debug, thiserror::Error)]
enum Lost {
    /// It is this one, or is heard at another address.
    #[error("it is heard already")]
    Heard,
    #[error("no connection")]
    Connect,
    #[error("it answered {0}")]
    Status(http::StatusCode),
    #[error("it said nothing for {} s", PEER_SILENCE_MAX.as_secs())]
    Silent,
    #[error("it ended")]
    Ended,
    #[error("it said what is no line of a gateway's: {0}")]
    Nonsense(String),
}

/// Why the addresses behind a name are not known.
#[derive(Debug, thiserror::Error)]
#[error("{host}: {source}")]
struct LookupError {
    host: String,
    source: io::Error,
}

impl Peers {
    /// No gateway is listened to yet. `admin_token` is shown to gateways that have none of their own.
    pub fn new(
        router: &Arc<Router>,
        upstream: &Upstream,
        admin_token: watch::Receiver<Option<HeaderValue>>,
    ) -> Self {
        let own = GatewayId::draw();
        Self {
            own,
            hearsay: Hearsay::new(own, Arc::clone(router)),
            upstream: upstream.clone(),
            admin_token,
            states: router.metrics().peers.clone(),
            following: Mutex::default(),
            named: AtomicBool::new(false),
        }
    }

    /// Listens to these gateways from now on, and to no other.
    pub fn follow(&self, config: Option<&PeersConfig>) {
        self.named.store(true, Ordering::Release);
        self.stop();
        *self.following.lock() = config.map(|config| {
            let follower = Follower {
                config: Arc::new(config.clone()),
                hearsay: Arc::clone(&self.hearsay),
                upstream: self.upstream.clone(),
                admin_token: self.admin_token.clone(),
                states: self.states.clone(),
            };
            tokio::spawn(follower.run())
        });
    }

    /// Listens to these gateways, unless a reload has said to whom meanwhile.
    pub fn follow_first(&self, config: &PeersConfig) {
        if !self.named.load(Ordering::Acquire) {
            self.follow(Some(config));
        }
    }

    /// Listens to no gateway, until [`Peers::follow`] names some.
    pub fn stop(&self) {
        if let Some(following) = self.following.lock().take() {
            following.abort();
        }
    }
}

impl Follower {
    /// Looks the names up again and again, and follows each address while a name has it; for ever.
    async fn run(self) {
        let mut followers = JoinSet::new();
        let mut known = HashMap::new();
        let mut told = None;
        loop {
            match addresses(&self.config).await {
                Ok(found) => {
                    known.retain(|address, follower: &mut AbortHandle| {
                        let stays = found.contains(address);
                        if !stays {
                            follower.abort();
                        }
                        stays
                    });
                    for address in found {
                        known.entry(address).or_insert_with(|| followers.spawn(self.clone().follow(address)));
                    }
                    told = None;
                }
                // Those known stay: a silent name server says nothing of them.
                Err(error) => {
                    let error = error.to_string();
                    if told.as_ref() != Some(&error) {
                        tracing::warn!(error, "other gateways cannot be looked up; those known stay");
                        told = Some(error);
                    }
                }
            }
            while followers.try_join_next().is_some() {}
            clock::sleep(DISCOVERY_INTERVAL).await;
        }
    }

    /// Follows the gateway that listens at an address, for ever.
    async fn follow(self, address: SocketAddr) {
        let mut state = self.states.follow();
        let mut pause = PEER_PAUSE.0;
        let mut told = false;
        loop {
            let lost = match self.connect(address).await {
                Ok((voice, lines, first)) => {
                    tracing::info!(peer = %address, "another gateway tells what it has at each worker");
                    (pause, told) = (PEER_PAUSE.0, false);
                    state.heard();
                    listen(&voice, lines, first).await
                }
                Err(lost) => lost,
            };
            if matches!(lost, Lost::Heard) {
                state.elsewhere();
                clock::sleep(PEER_TWICE_PAUSE).await;
                continue;
            }
            state.silent();
            // One that restarts, or has gone for good, is back or out of its name's addresses by then.
            if !told && pause == PEER_PAUSE.1 {
                tracing::warn!(peer = %address, error = %lost, "another gateway's load is not known");
                told = true;
            }
            clock::sleep(pause).await;
            pause = (2 * pause).min(PEER_PAUSE.1);
        }
    }

    /// Asks a gateway to speak; with its first line, which says who it is.
    async fn connect(&self, address: SocketAddr) -> Result<(Voice, Lines, Line), Lost> {
        let url = Uri::builder().scheme("http").authority(address.to_string()).path_and_query("/").build();
        let origin = Origin::of(&url.map_err(|_| Lost::Connect)?, None, false);
        let target = format!("/load?every_ms={}&placements=1", self.config.every.as_millis());
        let mut request = Outgoing::get(target.parse().map_err(|_| Lost::Connect)?);
        if let Some(token) = self.token() {
            request.set(AUTHORIZATION, token);
        }
        let answer = clock::timeout(PROBE_TIMEOUT, self.upstream.send(&origin, request));
        let answer = answer.await.ok().and_then(Result::ok).ok_or(Lost::Connect)?;
        if !answer.status().is_success() {
            return Err(Lost::Status(answer.status()));
        }
        let mut lines = Lines { answer: answer.into_body(), read: BytesMut::new() };
        let first = lines.next().await?;
        let id = first.gateway.ok_or_else(|| Lost::Nonsense("it does not say who it is".to_owned()))?;
        let voice = self.hearsay.hear(id).ok_or(Lost::Heard)?;
        Ok((voice.speaking(self.config.every), lines, first))
    }

    fn token(&self) -> Option<HeaderValue> {
        self.config.token.clone().or_else(|| self.admin_token.borrow().clone())
    }
}

/// Where other gateways may be.
async fn addresses(config: &PeersConfig) -> Result<Vec<SocketAddr>, LookupError> {
    let mut addresses = Vec::new();
    for (host, port) in &config.places {
        let failed = |source| LookupError { host: host.clone(), source };
        let found = net::resolve(host, *port).await.map_err(failed)?;
        addresses.extend(found.into_iter().map(|address: IpAddr| SocketAddr::new(address, *port)));
    }
    Ok(addresses)
}

/// Takes what a gateway says until it says no more.
async fn listen(voice: &Voice, mut lines: Lines, first: Line) -> Lost {
    let mut next = Ok(first);
    loop {
        match next {
            Ok(line) => {
                if let Err(error) = voice.says(&line) {
                    return Lost::Nonsense(error.to_string());
                }
            }
            Err(lost) => return lost,
        }
        next = lines.next().await;
    }
}

/// Lines of JSON as they come.
struct Lines {
    answer: Answer,
    read: BytesMut,
}

impl Lines {
    async fn next(&mut self) -> Result<Line, Lost> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.read) {
                let line = self.read.split_to(end + 1);
                return serde_json::from_slice(&line).map_err(|error| Lost::Nonsense(error.to_string()));
            }
            if self.read.len() > MAX_PEER_LINE_BYTES {
                return Err(Lost::Nonsense(format!("more than {MAX_PEER_LINE_BYTES} bytes in a line")));
            }
            let frame =
                clock::timeout(PEER_SILENCE_MAX, self.answer.frame()).await.map_err(|_| Lost::Silent)?;
            let frame = frame.and_then(Result::ok).ok_or(Lost::Ended)?;
            if let Ok(data) = frame.into_data() {
                self.read.extend_from_slice(&data);
            }
        }
    }
}

#[cfg(test)]
mod tests;
