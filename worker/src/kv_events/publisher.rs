//! The sockets of KV events: a PUB for live batches, a ROUTER for replays and snapshots. Frames are `keyway-wire`'s,
//! contents `log.rs`'s.
//!
//! A slow subscriber costs a queue, not time: `zeromq`'s PUB drops what does not fit its queue of 100,000 messages for
//! that peer, and a reply that does not move for [`KV_REPLY_STALL_MAX`] is given up. Payloads are shared, not copied.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use keyway_wire::kv_event::frames::{END_SEQ, ReplayRequest, seq_frame};
use tokio::net::TcpListener;
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

use super::log::{Log, Numbered};
use super::{BoundAddrs, Follower, KvEventOptions, Layout, ZmqAddr};
use crate::limits::KV_REPLY_STALL_MAX;
use crate::metrics::Metrics;

/// Bound sockets that publish nothing yet.
pub(crate) struct Publisher {
    live: PubSocket,
    replay: Option<RouterSocket>,
    topic: Bytes,
    options: KvEventOptions,
    addrs: BoundAddrs,
}

/// Binds the sockets. The error says which address, and why.
pub(crate) async fn bind(options: &KvEventOptions) -> Result<Publisher, String> {
    let mut live = PubSocket::new();
    let publish = bind_to(&mut live, &options.publish).await?;
    let (mut replay, mut replay_addr) = (None, None);
    if let Some(addr) = &options.replay {
        let mut socket = RouterSocket::new();
        replay_addr = Some(bind_to(&mut socket, addr).await?);
        replay = Some(socket);
    }
    let topic = Bytes::copy_from_slice(options.topic.as_bytes());
    let addrs = BoundAddrs { publish, replay: replay_addr };
    Ok(Publisher { live, replay, topic, options: options.clone(), addrs })
}

async fn bind_to(socket: &mut impl zeromq::Socket, addr: &ZmqAddr) -> Result<SocketAddr, String> {
    let error = |e: &dyn std::fmt::Display| format!("cannot publish KV events on {addr}: {e}");
    let listener = TcpListener::bind(addr.host_and_port()).await.map_err(|e| error(&e))?;
    let listener = listener.into_std().map_err(|e| error(&e))?;
    let bound = listener.local_addr().map_err(|e| error(&e))?;
    socket.bind_listener(listener).await.map_err(|e| error(&e))?;
    Ok(bound)
}

impl Publisher {
    /// Where the sockets are.
    pub(crate) fn addrs(&self) -> BoundAddrs {
        self.addrs
    }

    /// Publishes until the engine is gone.
    pub(crate) async fn run(self, follower: Follower, layout: Layout, metrics: Arc<Metrics>) {
        let log = Mutex::new(Log::new(layout, self.options.format));
        let topic = self.topic;
        let publish = publish(self.live, &follower, &log, &topic, &metrics);
        match self.replay {
            None => publish.await,
            Some(replay) => tokio::select! {
                () = publish => {}
                () = serve_replays(replay, &log, &topic, &metrics) => {}
            },
        }
    }
}

/// Publishes every step as a batch, in order.
async fn publish(
    mut live: PubSocket,
    follower: &Follower,
    log: &Mutex<Log>,
    topic: &Bytes,
    metrics: &Metrics,
) {
    while let Some(steps) = follower.next().await {
        for step in steps {
            let (seq, payload) = lock(log).append(&step);
            metrics.kv_event_batches.inc();
            let frames = [topic.clone(), seq_frame_bytes(seq), payload];
            if let Err(error) = live.send(message(frames)).await {
                tracing::warn!(%error, seq, "KV events could not be sent; subscribers will see a gap");
            }
        }
    }
}

/// Answers one request after the other; never returns.
async fn serve_replays(mut socket: RouterSocket, log: &Mutex<Log>, topic: &Bytes, metrics: &Metrics) {
    loop {
        let frames = match socket.recv().await {
            Ok(message) => message.into_vec(),
            Err(error) => {
                tracing::error!(%error, "the KV replay socket failed: no more replays");
                return std::future::pending().await;
            }
        };
        let Some((client, request)) = frames.split_first() else { continue };
        let Some(request) = ReplayRequest::parse(request) else {
            tracing::warn!("a KV replay request that is neither 8 bytes of sequence number nor `snapshot`");
            continue;
        };
        metrics.kv_replay_requests.inc();
        let batches = match request {
            ReplayRequest::From(seq) => lock(log).since(seq),
            ReplayRequest::Snapshot => lock(log).snapshot(now_s()),
        };
        let reply = reply(&mut socket, client, topic, batches);
        match tokio::time::timeout(KV_REPLY_STALL_MAX, reply).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "a client of the KV replay left"),
            Err(_) => tracing::warn!("a client of the KV replay does not read; given up"),
        }
    }
}

/// The batches and the end mark, in vLLM's layout from v0.26 on.
async fn reply(
    socket: &mut RouterSocket,
    client: &Bytes,
    topic: &Bytes,
    batches: Vec<Numbered>,
) -> zeromq::ZmqResult<()> {
    for (seq, payload) in batches {
        let frames = [client.clone(), Bytes::new(), topic.clone(), seq_frame_bytes(seq), payload];
        socket.send(message(frames)).await?;
    }
    let end = Bytes::from_static(&END_SEQ);
    socket.send(message([client.clone(), Bytes::new(), Bytes::new(), end, Bytes::new()])).await
}

fn lock(log: &Mutex<Log>) -> std::sync::MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

fn seq_frame_bytes(seq: u64) -> Bytes {
    Bytes::copy_from_slice(&seq_frame(seq))
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    let mut frames = frames.into_iter();
    let mut message = ZmqMessage::from(frames.next().unwrap_or_default());
    frames.for_each(|frame| message.push_back(frame));
    message
}

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
