//! The ZMQ sockets of one worker's KV events: PUB for the live batches, ROUTER for replay and snapshots, framed as the
//! engine in question frames them. They close with the worker and open with it. What is in the batches is `events.rs`'s.

use std::{sync::Arc, time::Duration};

use keyway_wire::kv_event::{
    WireFormat,
    frames::{END_SEQ, ReplayRequest, seq_frame},
};
use tokio::sync::mpsc;
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

use super::{events::Numbered, worker::Worker};

/// Time between attempts to have the ports again.
const REBIND_EVERY: Duration = Duration::from_millis(50);

/// The sockets, bound.
pub(super) struct EventSockets {
    publisher: PubSocket,
    replay: RouterSocket,
    /// Where to subscribe, such as `tcp://127.0.0.1:5557`.
    pub events_url: String,
    /// Where to ask for a replay.
    pub replay_url: String,
}

// === impl EventSockets ===

impl EventSockets {
    /// Binds both; port 0 is the system's choice.
    pub(super) async fn bind(host: &str, events_port: u16, replay_port: u16) -> Result<Self, String> {
        let name = |port: u16| format!("tcp://{host}:{port}");
        Self::bind_urls(&name(events_port), &name(replay_port)).await
    }

    async fn bind_urls(events_url: &str, replay_url: &str) -> Result<Self, String> {
        let (mut publisher, mut replay) = (PubSocket::new(), RouterSocket::new());
        let failed = |url: &str, error| format!("cannot bind {url}: {error}");
        let events = publisher.bind(events_url).await.map_err(|error| failed(events_url, error))?;
        let asked = replay.bind(replay_url).await.map_err(|error| failed(replay_url, error))?;
        Ok(Self { publisher, replay, events_url: events.to_string(), replay_url: asked.to_string() })
    }

    /// Serves until the log is gone; with every life of the worker the sockets are new ones on the same ports.
    pub(super) async fn serve(
        self,
        worker: Arc<Worker>,
        format: WireFormat,
        mut live: mpsc::Receiver<Numbered>,
    ) {
        let (mut alive, mut sockets) = (worker.alive(), self);
        loop {
            let (events_url, replay_url) = (sockets.events_url.clone(), sockets.replay_url.clone());
            tokio::select! {
                () = sockets.serve_life(&worker, format, &mut live) => return,
                changed = alive.changed() => if changed.is_err() { return },
            }
            let Self { publisher, replay, .. } = sockets;
            // What cannot be closed in order is closed by being dropped.
            let _ = (publisher.close().await, replay.close().await);
            if alive.wait_for(|alive| *alive).await.is_err() {
                return;
            }
            // What the dead engine had still to say.
            while live.try_recv().is_ok() {}
            sockets = loop {
                match Self::bind_urls(&events_url, &replay_url).await {
                    Ok(sockets) => break sockets,
                    Err(_) => tokio::time::sleep(REBIND_EVERY).await,
                }
            };
        }
    }

    /// Sends what comes in and answers requests for replay, until the log is gone.
    async fn serve_life(&mut self, worker: &Worker, format: WireFormat, live: &mut mpsc::Receiver<Numbered>) {
        let Self { publisher, replay, .. } = self;
        // vLLM from v0.26 on names the topic in replies; older ones and SGLang do not.
        let topic_in_replies = format == WireFormat::VllmMap;
        loop {
            tokio::select! {
                batch = live.recv() => {
                    let Some((number, payload)) = batch else { return };
                    let frames = [Vec::new().into(), seq_frame(number).to_vec().into(), payload];
                    // Nobody there, or one that is too slow, is no reason to stop.
                    if let Ok(message) = ZmqMessage::try_from(frames.to_vec()) {
                        let _ = publisher.send(message).await;
                    }
                }
                request = replay.recv() => {
                    if let Ok(request) = request {
                        answer(replay, worker, request, topic_in_replies).await;
                    }
                }
            }
        }
    }
}

impl std::fmt::Debug for EventSockets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventSockets").field("events_url", &self.events_url).finish_non_exhaustive()
    }
}

async fn answer(replay: &mut RouterSocket, worker: &Worker, request: ZmqMessage, topic_in_replies: bool) {
    let frames = request.into_vec();
    let Some(client) = frames.first().cloned() else { return };
    let batches = match ReplayRequest::parse(&frames[1..]) {
        Some(ReplayRequest::From(start)) => worker.batches_since(start),
        // Proposed for vLLM; the releases of the engines answer with the end alone.
        Some(ReplayRequest::Snapshot) => worker.snapshot(),
        None => Vec::new(),
    };
    let end = (END_SEQ, bytes::Bytes::new());
    let batches = batches.into_iter().map(|(number, payload)| (seq_frame(number), payload));
    for (number, payload) in batches.chain([end]) {
        let mut reply = vec![client.clone(), bytes::Bytes::new()];
        if topic_in_replies {
            reply.push(bytes::Bytes::new());
        }
        reply.extend([number.to_vec().into(), payload]);
        let Ok(reply) = ZmqMessage::try_from(reply) else { return };
        // A client that is gone needs no more of it.
        if replay.send(reply).await.is_err() {
            return;
        }
    }
}
