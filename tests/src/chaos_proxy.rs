//! A TCP proxy in front of a worker that breaks things when the test says so: cut after n bytes, stall, drip
//! byte by byte, half-close, refuse; or, of several proxies, whichever carries the stream breaks after so
//! many events. It knows nothing of HTTP. Requests pass freely; faults apply to what comes back.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// What happens to the bytes a worker sends back, per connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// All pass.
    None,
    /// So many bytes pass, then the connection breaks.
    CutAfter(usize),
    /// So many bytes pass, then only the worker's direction is closed.
    HalfCloseAfter(usize),
    /// So many bytes pass, the rest waits for another fault to be set.
    StallAfter(usize),
    /// All pass, one byte per segment.
    Drip,
    /// Connections are closed as soon as they are accepted.
    Refuse,
}

/// Events that may still pass; several proxies may share one. Counts only while it is set.
#[derive(Debug, Clone)]
pub struct Countdown(Arc<AtomicI64>);

impl Default for Countdown {
    fn default() -> Self {
        Self(Arc::new(AtomicI64::new(i64::MAX)))
    }
}

impl Countdown {
    /// How much of some bytes may pass, and whether the connection breaks behind that. One break is enough.
    fn allow(&self, bytes: &[u8]) -> (usize, bool) {
        let mut at = 0;
        while let Some(begin) = find(&bytes[at..], b"data: ").map(|begin| at + begin) {
            let set = self.0.load(SeqCst) != i64::MAX;
            if set && self.0.fetch_sub(1, SeqCst) == 0 {
                self.0.store(i64::MAX, SeqCst);
                // Some of the event passes: nobody may show it.
                return ((begin + 9).min(bytes.len()), true);
            }
            at = find(&bytes[begin..], b"\n\n").map_or(bytes.len(), |end| begin + end + 2);
        }
        (bytes.len(), false)
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

/// The proxy; dropping it breaks its connections.
#[derive(Debug)]
pub struct ChaosProxy {
    addr: SocketAddr,
    fault: watch::Sender<Fault>,
    passed: Arc<Mutex<Vec<usize>>>,
    countdown: Countdown,
    task: JoinHandle<()>,
}

impl ChaosProxy {
    /// Starts in front of `upstream` with no fault.
    pub async fn start(upstream: SocketAddr) -> Self {
        Self::sharing(upstream, Countdown::default()).await
    }

    /// Starts in front of `upstream`, with a count of events that others may have part in.
    pub async fn sharing(upstream: SocketAddr, countdown: Countdown) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let (fault, faults) = watch::channel(Fault::None);
        let passed = Arc::default();
        let shared = (Arc::clone(&passed), countdown.clone());
        let task = tokio::spawn(accept(listener, upstream, faults, shared));
        Self { addr, fault, passed, countdown, task }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Sets the fault, for open connections too. Bytes are counted per connection, from its start.
    pub fn set(&self, fault: Fault) {
        self.fault.send_replace(fault);
    }

    /// Lets so many events of streams pass at this proxy and those that share its count; then the connection
    /// that carries the next one breaks, and all is well again. Assumes that an event is written at once, as
    /// workers do.
    pub fn cut_after_events(&self, events: usize) {
        self.countdown.0.store(events as i64, SeqCst);
    }

    /// Whether a cut is still to come.
    pub fn cuts(&self) -> bool {
        self.countdown.0.swap(i64::MAX, SeqCst) != i64::MAX
    }

    /// Bytes passed back on each connection so far, in the order they were opened.
    pub fn passed(&self) -> Vec<usize> {
        self.passed.lock().clone()
    }
}

impl Drop for ChaosProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(
    listener: TcpListener,
    upstream: SocketAddr,
    faults: watch::Receiver<Fault>,
    shared: (Arc<Mutex<Vec<usize>>>, Countdown),
) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let fault = *faults.borrow();
        if fault != Fault::Refuse {
            connections.spawn(carry(client, upstream, faults.clone(), shared.clone()));
        }
        while connections.try_join_next().is_some() {}
    }
}

/// Carries one connection until either direction ends; then both are closed.
async fn carry(
    client: TcpStream,
    upstream: SocketAddr,
    faults: watch::Receiver<Fault>,
    (passed, countdown): (Arc<Mutex<Vec<usize>>>, Countdown),
) {
    let Ok(server) = TcpStream::connect(upstream).await else { return };
    if client.set_nodelay(true).is_err() || server.set_nodelay(true).is_err() {
        return;
    }
    let index = {
        let mut passed = passed.lock();
        passed.push(0);
        passed.len() - 1
    };
    let (mut from_client, to_client) = client.into_split();
    let (from_server, mut to_server) = server.into_split();
    let forth = async {
        let _ = tokio::io::copy(&mut from_client, &mut to_server).await; // an end either way
    };
    tokio::select! {
        () = forth => {}
        () = back(from_server, to_client, faults, &countdown, |n| passed.lock()[index] = n) => {}
    }
}

/// Carries the worker's bytes under the current fault.
async fn back(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut faults: watch::Receiver<Fault>,
    countdown: &Countdown,
    count: impl Fn(usize),
) {
    let mut buffer = vec![0; 64 * 1024];
    let mut passed = 0;
    loop {
        let fault = *faults.borrow_and_update();
        let most = match fault {
            Fault::None => buffer.len(),
            Fault::Drip => 1,
            Fault::Refuse => return,
            Fault::CutAfter(n) | Fault::HalfCloseAfter(n) | Fault::StallAfter(n) => n.saturating_sub(passed),
        };
        if most == 0 {
            match fault {
                Fault::CutAfter(_) => return,
                Fault::HalfCloseAfter(_) => {
                    let _ = to.shutdown().await; // the client may be gone already
                    return std::future::pending().await;
                }
                _ if faults.changed().await.is_err() => return,
                _ => continue,
            }
        }
        let most = most.min(buffer.len());
        tokio::select! {
            changed = faults.changed() => if changed.is_err() { return },
            read = from.read(&mut buffer[..most]) => match read {
                Ok(n) if n > 0 => {
                    let (n, cut) = countdown.allow(&buffer[..n]);
                    if to.write_all(&buffer[..n]).await.is_err() || cut {
                        return;
                    }
                    passed += n;
                    count(passed);
                }
                _ => return,
            },
        }
    }
}
