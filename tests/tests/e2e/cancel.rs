//! Hazard: the client leaves and the worker computes on, or the gateway goes on counting the request. At
//! whatever moment and over whichever protocol it leaves, the worker sees the abort and every in-flight gauge
//! returns to 0.

use std::net::SocketAddr;
use std::time::Duration;

use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::{CHAT, DONE, chat, chat_stream};
use keyway_tests::{Client, Cluster, Exchange, FakeWorker, Gateway, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// The moments at which a client can find its answer wanting.
#[derive(Debug, Clone, Copy)]
enum Moment {
    BeforeTheHead,
    BeforeTheFirstToken,
    MidStream,
    AtTheLastEvent,
}

#[tokio::test]
async fn leaving_at_any_moment_aborts_the_worker_s_call() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    for protocol in PROTOCOLS {
        for moment in
            [Moment::BeforeTheHead, Moment::BeforeTheFirstToken, Moment::MidStream, Moment::AtTheLastEvent]
        {
            let mut exchange = Exchange::post(protocol, cluster.addr(), CHAT, &chat_stream("hi")).await;
            let mut call = worker.call().await;
            if !matches!(moment, Moment::BeforeTheHead) {
                call.begin_stream().await;
                assert_eq!(exchange.status().await, 200, "{protocol:?} {moment:?}");
            }
            if matches!(moment, Moment::MidStream | Moment::AtTheLastEvent) {
                call.say("one").await;
                exchange.next_event().await.event();
            }
            if matches!(moment, Moment::AtTheLastEvent) {
                // All is said, but the stream has not ended.
                call.event(DONE).await;
                assert_eq!(exchange.next_event().await.event(), DONE);
            }
            let aborted = worker.aborted();
            let connection = exchange.disconnect();
            call.must_be_aborted().await;
            assert_eq!(worker.aborted(), aborted + 1);
            cluster.gateway.idle().await;
            drop(connection);
        }
    }
    // The worker is none the worse for it.
    worker.answer();
    cluster.chat("after").await;
}

#[tokio::test]
async fn leaving_an_unstreamed_request_aborts_it_too() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    for protocol in PROTOCOLS {
        // Before the head, and between the head and the body's end.
        for begun in [false, true] {
            let mut exchange = Exchange::post(protocol, cluster.addr(), CHAT, &chat("hi")).await;
            let mut call = worker.call().await;
            if begun {
                call.head(200, &[("content-type", "application/json"), ("content-length", "100")]).await;
                call.raw(b"{\"half\":").await;
                assert_eq!(exchange.status().await, 200);
            }
            let connection = exchange.disconnect();
            call.must_be_aborted().await;
            cluster.gateway.idle().await;
            drop(connection);
        }
    }
}

#[tokio::test]
async fn leaving_at_once_leaves_nothing_behind() {
    let cluster = Cluster::of_fakes(2, "prefix").await;
    cluster.fakes.iter().for_each(FakeWorker::hang);
    let active = || cluster.fakes.iter().map(FakeWorker::active).sum::<usize>();
    for protocol in PROTOCOLS {
        for i in 0..25 {
            let body = if i % 2 == 0 { chat("gone") } else { chat_stream("gone") };
            drop(Exchange::post(protocol, cluster.addr(), CHAT, &body).await);
        }
    }
    // One that stays shows that the gateway has come to the end of the others.
    let staying = Exchange::post(PROTOCOLS[0], cluster.addr(), CHAT, &chat("staying")).await;
    eventually!(active() == 1 && cluster.gateway.metrics().await.sum("keyway_in_flight", &[]) == 1.0);
    drop(staying);
    eventually!(active() == 0, "every call is aborted");
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn leaving_in_the_middle_of_the_request_reaches_no_worker() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let body = chat("never sent whole");
    for _ in 0..5 {
        let mut client = Client::connect(cluster.addr()).await;
        let head = format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\ncontent-length: {}\r\n\r\n", body.len());
        client.send(head.as_bytes()).await;
        client.send(&body[..10]).await;
    }
    cluster.chat("whole").await;
    cluster.gateway.idle().await;
    assert_eq!(cluster.fakes[0].request_count(), 1);
}

#[tokio::test]
async fn an_abort_is_nobody_s_failure() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].hang();
    for i in 1..=10 {
        let exchange = Exchange::post(PROTOCOLS[i % 2], cluster.addr(), CHAT, &chat("hi")).await;
        eventually!(cluster.fakes[0].active() == 1);
        drop(exchange);
        eventually!(cluster.fakes[0].active() == 0);
        assert_eq!(cluster.gateway.ready_workers().await, 1, "after {i} aborts");
    }
    cluster.fakes[0].answer();
    cluster.chat("after").await;
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn leaving_while_waiting_for_a_place_reaches_no_worker() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    let waiting = || async { cluster.gateway.metrics().await.sum("keyway_requests_waiting", &[]) };
    // Minutes of prefill by the speed that is assumed of an unknown worker.
    let long = "all work and no play ".repeat(200_000);
    let first = Exchange::post(PROTOCOLS[0], cluster.addr(), CHAT, &chat_stream(&long)).await;
    let call = worker.call().await;
    for protocol in PROTOCOLS {
        for body in [chat(&format!("second {long}")), chat_stream(&format!("second {long}"))] {
            let exchange = Exchange::post(protocol, cluster.addr(), CHAT, &body).await;
            eventually!(waiting().await == 1.0, "it waits");
            let connection = exchange.disconnect();
            eventually!(waiting().await == 0.0, "it has left");
            drop(connection);
        }
    }
    drop(first);
    call.must_be_aborted().await;
    cluster.gateway.idle().await;
    assert_eq!(worker.request_count(), 1);
}

/// A worker that is well until its connections are no longer accepted: then one that is begun hangs.
pub(crate) struct Clogged {
    pub(crate) addr: SocketAddr,
    accepting: tokio::task::JoinHandle<TcpListener>,
    stop: tokio::sync::oneshot::Sender<()>,
}

impl Clogged {
    pub(crate) fn start() -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
        let listener = socket.listen(1).expect("it listens");
        let addr = listener.local_addr().expect("bound");
        let (stop, mut stopped) = tokio::sync::oneshot::channel();
        let accepting = tokio::spawn(async move {
            loop {
                let mut stream = tokio::select! {
                    accepted = listener.accept() => accepted.expect("a connection").0,
                    _ = &mut stopped => return listener,
                };
                // Connections are not kept, so that each request needs a new one.
                let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}";
                let mut buffer = [0; 4096];
                let _ = stream.read(&mut buffer).await;
                let _ = stream.write_all(head.as_bytes()).await;
            }
        });
        Self { addr, accepting, stop }
    }

    /// Lets nobody in any more; what is returned keeps it so.
    pub(crate) async fn clog(self) -> (TcpListener, Vec<TcpStream>) {
        let _ = self.stop.send(());
        let listener = self.accepting.await.expect("it accepted until now");
        let mut waiting = Vec::new();
        while let Ok(Ok(stream)) =
            tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(self.addr)).await
        {
            waiting.push(stream);
        }
        (listener, waiting)
    }
}

#[tokio::test]
async fn leaving_while_the_gateway_connects_leaves_nothing_behind() {
    let worker = Clogged::start();
    // Patient enough that the connection is still being made when the client leaves.
    let toml = format!("worker = [\"http://{}\"]\n[limits]\nconnect_timeout_ms = 60000\n", worker.addr);
    let gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(1).await;
    let clogged = worker.clog().await;
    for protocol in PROTOCOLS {
        for body in [chat("hi"), chat_stream("hi")] {
            let exchange = Exchange::post(protocol, gateway.addr, CHAT, &body).await;
            eventually!(
                gateway.metrics().await.sum("keyway_requests_in_flight", &[]) == 1.0,
                "it is on its way"
            );
            let connection = exchange.disconnect();
            gateway.idle().await;
            drop(connection);
        }
    }
    drop(clogged);
}
