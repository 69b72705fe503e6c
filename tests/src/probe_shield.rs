//! Stands before a scripted server that knows one conversation by heart: answers the gateway's probes itself,
//! on whatever connection they come, and passes every other byte on as it is. It frames nothing.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::openai::{FAKE_MODEL, model_list};

/// How the gateway's own requests begin, and what is answered. Each comes alone and whole.
const PROBES: [&str; 4] = ["GET /health ", "GET /v1/models ", "GET /metrics ", "GET /v1/loads"];

/// The shield; dropping it closes its connections.
#[derive(Debug)]
pub struct ProbeShield {
    addr: SocketAddr,
    server: watch::Sender<Option<SocketAddr>>,
    shared: Shared,
    task: JoinHandle<()>,
}

/// What all connections have in common.
#[derive(Debug, Clone)]
struct Shared {
    server: watch::Receiver<Option<SocketAddr>>,
    passed: Arc<Mutex<Vec<u8>>>,
    ended: watch::Sender<usize>,
}

impl ProbeShield {
    /// Starts; what is to be passed on waits until the server is known.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let (server, known) = watch::channel(None);
        let shared = Shared { server: known, passed: Arc::default(), ended: watch::Sender::default() };
        let task = tokio::spawn(accept(listener, shared.clone()));
        Self { addr, server, shared, task }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Passes on to this server from now on.
    pub fn pass_to(&self, server: SocketAddr) {
        self.server.send_replace(Some(server));
    }

    /// All that was passed on, of all connections.
    pub fn passed(&self) -> Vec<u8> {
        self.shared.passed.lock().clone()
    }

    /// How many connections to the server have ended; the gateway's side of each is closed by then.
    pub fn ended(&self) -> watch::Receiver<usize> {
        self.shared.ended.subscribe()
    }
}

impl Drop for ProbeShield {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, shared: Shared) {
    let mut connections = JoinSet::new();
    while let Ok((gateway, _)) = listener.accept().await {
        connections.spawn(pass(gateway, shared.clone()));
        while connections.try_join_next().is_some() {}
    }
}

/// One connection, until either side ends it, in whatever way: a script may wait for that.
async fn pass(gateway: TcpStream, shared: Shared) {
    let (mut server, ended) = (None, shared.ended.clone());
    relay(gateway, &mut server, shared).await;
    if server.is_some() {
        ended.send_modify(|ended| *ended += 1);
    }
}

/// Passes on until either side ends; the gateway's side is closed then. The server's connection is opened
/// when there is something for it.
async fn relay(mut gateway: TcpStream, server: &mut Option<TcpStream>, mut shared: Shared) -> Option<()> {
    let (mut asked, mut answered) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    loop {
        let from_server = async {
            match &mut *server {
                Some(server) => server.read(&mut answered).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            n = gateway.read(&mut asked) => {
                // Where the gateway has ended it: of a client that leaves with its answer it may not know
                // that this was whole.
                let bytes = some(&asked, n)?;
                if let Some(answer) = probed(bytes) {
                    gateway.write_all(answer.as_bytes()).await.ok()?;
                    continue;
                }
                shared.passed.lock().extend_from_slice(bytes);
                if server.is_none() {
                    let addr = (*shared.server.wait_for(Option::is_some).await.ok()?)?;
                    *server = Some(TcpStream::connect(addr).await.ok()?);
                }
                server.as_mut()?.write_all(bytes).await.ok()?;
            }
            n = from_server => gateway.write_all(some(&answered, n)?).await.ok()?,
        }
    }
}

/// What was read; none at the end.
fn some(buffer: &[u8], read: std::io::Result<usize>) -> Option<&[u8]> {
    read.ok().filter(|&n| n > 0).map(|n| &buffer[..n])
}

/// The answer, if this is a probe.
fn probed(bytes: &[u8]) -> Option<String> {
    let probe = PROBES.iter().find(|probe| bytes.starts_with(probe.as_bytes()))?;
    let (status, body) = match *probe {
        "GET /v1/models " => (200, model_list(&[FAKE_MODEL.to_owned()], &[]).to_string()),
        "GET /v1/loads" => (404, "{}".to_owned()),
        _ => (200, String::new()),
    };
    let length = body.len();
    Some(format!(
        "HTTP/1.1 {status} Probed\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    ))
}
