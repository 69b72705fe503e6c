//! The ZMQ sockets of one worker's KV events: PUB for the live batches, ROUTER for replay and snapshots,
//! framed as the engine in question frames them. They close with the worker and open with it. What is in the
//! batches is `events.rs`'s, what peers may do to the sockets is `keyway-zmq`'s.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use keyway_wire::kv_event::{
    WireFormat,
    frames::{END_SEQ, ReplayRequest, seq_frame},
};
use keyway_zmq::{PubLimits, PubSocket, Replies, RouterLimits, RouterSocket};
use tokio::{
    net::{TcpListener, ToSocketAddrs},
    sync::mpsc,
};

use super::{StartError, events::Numbered, worker::Worker};
use crate::limits::{
    MOCK_ASKERS_MAX, MOCK_EVENT_BATCHES_MAX, MOCK_EVENT_BYTES_MAX, MOCK_PEER_STALL_MAX, MOCK_SUBSCRIBERS_MAX,
};

/// Time between attempts to have the ports again.
const REBIND_EVERY: Duration = Duration::from_millis(50);

const LIVE: PubLimits = PubLimits {
    connections: MOCK_SUBSCRIBERS_MAX,
    kept_messages: MOCK_EVENT_BATCHES_MAX,
    kept_bytes: MOCK_EVENT_BYTES_MAX,
    stall: MOCK_PEER_STALL_MAX,
};
const REPLAY: RouterLimits = RouterLimits { connections: MOCK_ASKERS_MAX, stall: MOCK_PEER_STALL_MAX };

/// The two listening sockets of one worker, bound but not yet served.
#[derive(Debug)]
pub(super) struct EventSockets {
    publisher: TcpListener,
    replay: TcpListener,
    /// Where they are, and so will be in the worker's next life.
    addrs: (SocketAddr, SocketAddr),
}

// === impl EventSockets ===

impl EventSockets {
    /// Binds both; port 0 is the system's choice.
    pub(super) async fn bind(host: &str, events_port: u16, replay_port: u16) -> Result<Self, StartError> {
        let bind = async |port: u16| {
            let at = format!("{host}:{port}");
            listen(&at).await.map_err(|source| StartError::KvEvents { at, source })
        };
        let (publisher, replay) = (bind(events_port).await?, bind(replay_port).await?);
        Ok(Self { addrs: (publisher.1, replay.1), publisher: publisher.0, replay: replay.0 })
    }

    /// Where to subscribe and where to ask for a replay, such as `tcp://127.0.0.1:5557`.
    pub(super) fn urls(&self) -> (String, String) {
        (format!("tcp://{}", self.addrs.0), format!("tcp://{}", self.addrs.1))
    }

    /// Serves until the log is gone; with every life of the worker the sockets are new ones on the same
    /// ports.
    pub(super) async fn serve(
        self,
        worker: Arc<Worker>,
        format: WireFormat,
        mut live: mpsc::Receiver<Numbered>,
    ) {
        let (mut alive, addrs) = (worker.alive(), self.addrs);
        let (mut publisher, mut replay) = (self.publisher, self.replay);
        loop {
            let Some(sockets) = Life::begin(publisher, replay, &worker, format) else { return };
            tokio::select! {
                () = sockets.publish(&mut live) => return,
                changed = alive.changed() => if changed.is_err() { return },
            }
            sockets.publisher.close().await;
            sockets.replay.close().await;
            if alive.wait_for(|alive| *alive).await.is_err() {
                return;
            }
            // What the dead engine had still to say.
            while live.try_recv().is_ok() {}
            publisher = listen_again(addrs.0).await;
            replay = listen_again(addrs.1).await;
        }
    }
}

/// The sockets in one life of the worker.
struct Life {
    publisher: PubSocket,
    replay: RouterSocket,
}

impl Life {
    /// `None` where the listening sockets have no address, which bound ones have.
    fn begin(
        publisher: TcpListener,
        replay: TcpListener,
        worker: &Arc<Worker>,
        format: WireFormat,
    ) -> Option<Self> {
        // vLLM from v0.26 on names the topic in replies; older ones and SGLang do not.
        let topic_in_replies = format == WireFormat::VllmMap;
        let worker = Arc::clone(worker);
        let answer = move |request: Vec<Bytes>| answer(&worker, &request, topic_in_replies);
        Some(Self {
            publisher: PubSocket::new(publisher, LIVE).ok()?,
            replay: RouterSocket::new(replay, REPLAY, answer).ok()?,
        })
    }

    /// Sends what comes in, until the log is gone.
    async fn publish(&self, live: &mut mpsc::Receiver<Numbered>) {
        while let Some((number, payload)) = live.recv().await {
            self.publisher.send(&[Bytes::new(), seq_frame(number).to_vec().into(), payload]);
        }
    }
}

async fn listen(at: &impl ToSocketAddrs) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(at).await?;
    let addr = listener.local_addr()?;
    Ok((listener, addr))
}

/// Listens at `at` as soon as no other socket has the port.
async fn listen_again(at: SocketAddr) -> TcpListener {
    loop {
        match listen(&at).await {
            Ok((listener, _)) => return listener,
            Err(_) => tokio::time::sleep(REBIND_EVERY).await,
        }
    }
}

/// The replies to a request, each made once the one before it was sent.
fn answer(worker: &Arc<Worker>, request: &[Bytes], topic_in_replies: bool) -> Replies {
    let batches: Box<dyn Iterator<Item = Numbered> + Send> = match ReplayRequest::parse(request) {
        Some(ReplayRequest::From(start)) => Box::new(worker.batches_since(start)),
        // Proposed for vLLM; the releases of the engines answer with the end alone.
        Some(ReplayRequest::Snapshot) => Box::new(worker.snapshot().into_iter().flatten()),
        None => Box::new(std::iter::empty()),
    };
    let end = (END_SEQ, Bytes::new());
    let batches = batches.map(|(number, payload)| (seq_frame(number), payload));
    Box::new(batches.chain([end]).map(move |(number, payload)| {
        let topic = topic_in_replies.then(Bytes::new);
        [Some(Bytes::new()), topic, Some(number.to_vec().into()), Some(payload)]
            .into_iter()
            .flatten()
            .collect()
    }))
}
