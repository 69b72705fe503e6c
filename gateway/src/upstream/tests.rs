//! The client against a scripted worker on a real socket: what a kept connection's end means, and to whom.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use http::{Method, uri::PathAndQuery};
use prometheus::{IntCounter, IntCounterVec, Opts};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

use super::*;

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// What the worker does with a request that is not the first of its connection.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Later {
    /// It reads it, and closes.
    Close,
    /// It reads a part of it, and resets the connection.
    Reset,
    /// It says that the connection was idle for too long, and closes.
    TimedOut,
    /// It begins an answer, and closes.
    CutShort,
    /// It answers what is no HTTP.
    Garbage,
    /// It answers.
    Answer,
}

/// A worker that answers the first request of each connection if `first`, and then does that.
struct Worker {
    origin: Origin,
    races: IntCounter,
    connections: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Worker {
    async fn start(first: bool, later: Later) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (connections, requests) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let (opened, asked) = (Arc::clone(&connections), Arc::clone(&requests));
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                opened.fetch_add(1, SeqCst);
                tokio::spawn(serve(stream, first, later, Arc::clone(&asked)));
            }
        });
        let (origin, races) =
            (Origin::of(&url.parse().unwrap(), None, false), IntCounter::new("x", "x").unwrap());
        origin.count_races(races.clone());
        Self { origin, races, connections, requests, task }
    }

    /// Sends a request and reads its answer.
    async fn ask(&self, upstream: &Upstream, may_repeat: bool) -> Result<(), SendError> {
        let body = Bytes::from(vec![b'x'; 100]);
        let request =
            Outgoing::own(Method::POST, PathAndQuery::from_static("/"), body).repeatable(may_repeat);
        let answer = upstream.send(&self.origin, request).await?;
        assert_eq!(answer.status(), 200);
        http_body_util::BodyExt::collect(answer.into_body()).await.unwrap();
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut stream: TcpStream, first: bool, later: Later, asked: Arc<AtomicUsize>) -> io::Result<()> {
    let mut room = [0; 4_096];
    for number in 0.. {
        if number > 0 && later == Later::Reset {
            let _ = stream.read(&mut room[..10]).await?;
            // Closed with bytes unread, it is reset.
            return Ok(());
        }
        if stream.read(&mut room).await? == 0 {
            return Ok(());
        }
        asked.fetch_add(1, SeqCst);
        let answer = if number == 0 && first { Later::Answer } else { later };
        match answer {
            Later::Answer => stream.write_all(ANSWER).await?,
            Later::Close | Later::Reset => return Ok(()),
            Later::TimedOut => {
                let answer =
                    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
                return stream.write_all(answer).await;
            }
            Later::CutShort => return stream.write_all(&ANSWER[..20]).await,
            Later::Garbage => return stream.write_all(b"SSH-2.0-OpenSSH\r\n").await,
        }
    }
    Ok(())
}

fn upstream() -> Upstream {
    let counted = IntCounterVec::new(Opts::new("y", "y"), &["resource"]).unwrap();
    Upstream::new(Connector::new(Duration::from_secs(5)), Shortages::new(counted))
}

/// The same from now on without this.
fn lacking(upstream: &Upstream, lacks: Shortage) {
    upstream.connector.lacks.set(lacks).unwrap();
}

#[tokio::test]
async fn a_kept_connection_that_ends_under_a_request_is_nobody_s_fault() {
    for later in [Later::Close, Later::Reset, Later::TimedOut] {
        let (worker, upstream) = (Worker::start(true, later).await, upstream());
        for request in 0..6 {
            assert_eq!(worker.ask(&upstream, true).await, Ok(()), "{later:?}, request {request}");
        }
        assert_eq!((worker.races.get(), worker.connections.load(SeqCst)), (5, 6), "{later:?}");
    }
}

#[tokio::test]
async fn an_answer_that_had_begun_or_is_none_is_its_worker_s_fault() {
    for (later, cause) in [(Later::CutShort, "before its answer's end"), (Later::Garbage, "not HTTP/1.1")] {
        let (worker, upstream) = (Worker::start(true, later).await, upstream());
        assert_eq!(worker.ask(&upstream, true).await, Ok(()));
        let error = worker.ask(&upstream, true).await.unwrap_err();
        assert!(matches!(error, SendError::Lost(_)), "{later:?}: {error:?}");
        assert!(error.to_string().contains(cause), "{error}");
        assert_eq!((worker.races.get(), worker.connections.load(SeqCst)), (0, 1), "{later:?}");
    }
}

#[tokio::test]
async fn a_new_connection_that_ends_without_an_answer_is_its_worker_s_fault() {
    let (worker, upstream) = (Worker::start(false, Later::Close).await, upstream());
    let error = worker.ask(&upstream, true).await.unwrap_err();
    assert!(matches!(error, SendError::Lost(_)), "{error:?}");
    assert_eq!((worker.races.get(), worker.requests.load(SeqCst)), (0, 1), "once, and on one connection");
}

#[tokio::test]
async fn what_must_not_be_sent_twice_meets_no_kept_connection() {
    for later in [Later::Close, Later::Reset] {
        let (worker, upstream) = (Worker::start(true, later).await, upstream());
        for request in 0..4 {
            assert_eq!(worker.ask(&upstream, false).await, Ok(()), "{later:?}, request {request}");
        }
        assert_eq!((worker.races.get(), worker.requests.load(SeqCst)), (0, 4), "each was sent once");
    }
}

#[tokio::test]
async fn a_connection_that_its_worker_closes_while_it_waits_is_closed_here_too() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let origin = Origin::of(&url.parse().unwrap(), None, false);
    let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (far, _) = listener.accept().await.unwrap();
    origin.keep(Box::new(http1::Connection::new(crate::net::Stream::Plain(near))));
    assert_eq!(origin.kept(), 1);
    drop(far);
    let noticed = async {
        while origin.kept() > 0 {
            tokio::task::yield_now().await;
        }
    };
    // Long before it has waited for too long, and without anybody who asks for one.
    tokio::time::timeout(crate::limits::POOL_IDLE_TIMEOUT / 2, noticed).await.expect("it is still kept");
}

#[tokio::test]
async fn what_the_gateway_lacks_is_said_and_a_kept_connection_does_without() {
    for lacks in Shortage::ALL {
        let (worker, upstream) = (Worker::start(true, Later::Answer).await, upstream());
        worker.ask(&upstream, true).await.unwrap();
        lacking(&upstream, lacks);
        assert_eq!(worker.ask(&upstream, true).await, Ok(()), "{lacks:?}");
        let held = worker.origin.take();
        assert_eq!(worker.ask(&upstream, true).await, Err(SendError::Local(lacks)));
        drop(held);
    }
}

#[tokio::test]
async fn a_client_s_request_waits_for_a_kept_connection_to_come_back() {
    let (worker, upstream) = (Worker::start(true, Later::Answer).await, upstream());
    worker.ask(&upstream, true).await.unwrap();
    lacking(&upstream, Shortage::Ports);
    let (link, _) = worker.origin.take().unwrap();
    let headers = http::HeaderMap::new();
    let request = Outgoing::new(Method::GET, PathAndQuery::from_static("/"), &headers, Bytes::new());
    let comes_back = async {
        tokio::task::yield_now().await;
        worker.origin.keep(link);
    };
    let (answer, ()) = tokio::join!(upstream.send(&worker.origin, request), comes_back);
    assert_eq!(answer.unwrap().status(), 200);
    assert_eq!(worker.connections.load(SeqCst), 1);
}

#[tokio::test]
async fn the_longest_idle_of_all_workers_makes_room() {
    let upstream = upstream();
    let workers = [Worker::start(true, Later::Answer).await, Worker::start(true, Later::Answer).await];
    for worker in &workers {
        worker.ask(&upstream, true).await.unwrap();
    }
    assert!(upstream.shed());
    assert_eq!(workers.each_ref().map(|worker| worker.origin.kept()), [0, 1]);
    assert!(upstream.shed() && !upstream.shed());
}
