//! Hazard: workers and the gateway are restarted one after the other while requests come, and some of those
//! are lost.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use keyway_tests::openai::{CHAT, DONE};
use keyway_tests::{Client, Cluster, End, Gateway, RealWorker, eventually};
use serde_json::json;

/// Requests in a row, streamed and whole in turn, until told to stop; each must be answered in full. Every
/// second client keeps its connection for as long as it may, the others open a new one each time.
async fn client(addr: SocketAddr, i: usize, stop: &AtomicBool, answered: &AtomicUsize) {
    let mut client = Client::connect(addr).await;
    for n in 0_usize.. {
        if stop.load(SeqCst) {
            return;
        }
        let stream = (i + n).is_multiple_of(2);
        let content = format!("Client {i} asks for the {n}th time what becomes of it.");
        let body = json!({
            "model": "keyway-random", "messages": [{"role": "user", "content": content}], "max_tokens": 40,
            "ignore_eos": true, "stream": stream,
        });
        client.post(CHAT, body.to_string().as_bytes()).await;
        let response = client.response().await;
        let text = response.text();
        assert_eq!((response.status(), &response.end), (200, &End::Complete), "{text}");
        assert_eq!(text.ends_with(&format!("data: {DONE}\n\n")), stream, "{text}");
        answered.fetch_add(1, SeqCst);
        if (i / 2).is_multiple_of(2) || response.header("connection") == Some("close") {
            client = Client::connect(addr).await;
        }
    }
}

/// The second one has no time to finish what it is doing.
async fn restart(i: usize, worker: &mut RealWorker) {
    let addr = worker.addr();
    if i == 1 {
        worker.process.kill();
    } else {
        worker.process.terminate();
        worker.process.ended().await;
    }
    *worker = RealWorker::spawn_at(addr, &[]);
    worker.ready().await;
}

#[tokio::test]
async fn restarting_every_worker_under_load_loses_no_request() {
    let mut cluster = Cluster::builder().workers(3).start().await;
    let mut workers = std::mem::take(&mut cluster.workers);
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let load = futures_util::future::join_all((0..6).map(|i| client(cluster.addr(), i, &stop, &answered)));
    let restarts = async {
        for (i, worker) in workers.iter_mut().enumerate() {
            let before = answered.load(SeqCst);
            eventually!(answered.load(SeqCst) > before + 12, "requests are answered");
            restart(i, worker).await;
            cluster.gateway.wait_ready(3).await;
        }
        stop.store(true, SeqCst);
    };
    tokio::join!(load, restarts);
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    let complete = metrics.sum("keyway_requests_total", &[("outcome", "complete")]);
    assert_eq!(complete, answered.load(SeqCst) as f64);
    let hits = metrics.sum("keyway_streams_resumed_total", &[]) + metrics.sum("keyway_retries_total", &[]);
    assert!(hits >= 1.0, "no request met a restart");
}

async fn gateway(workers: &[SocketAddr], socket: &str) -> Gateway {
    let gateway = workers.iter().fold(Gateway::builder(), |gateway, worker| gateway.worker(*worker));
    gateway.args(&["--handover-socket", socket]).start().await
}

/// Another process takes the gateway's place, which ends when the last of its answers has; returns the new
/// one, and how many answers of the old one met a worker that went.
async fn replace(old: &mut Gateway, workers: &[SocketAddr], socket: &str) -> (Gateway, usize) {
    let new = gateway(workers, socket).await;
    assert_eq!((new.addr, new.admin), (old.addr, old.admin));
    assert_eq!(old.process.ended().await.code(), Some(0));
    let log = old.process.log();
    let met = |line: &&String| line.contains("answer broke off") || line.contains("gave no answer");
    (new, log.iter().filter(met).count())
}

#[tokio::test]
async fn restarting_every_worker_and_the_gateway_under_load_loses_no_request() {
    let mut workers: Vec<_> = (0..3).map(|_| RealWorker::spawn(&[])).collect();
    for worker in &mut workers {
        worker.ready().await;
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("handover").display().to_string();
    let addrs: Vec<_> = workers.iter().map(RealWorker::addr).collect();
    let mut now = gateway(&addrs, &socket).await;
    now.wait_ready(3).await;
    let (addr, stop, answered) = (now.addr, AtomicBool::new(false), AtomicUsize::new(0));
    let load = futures_util::future::join_all((0..8).map(|i| client(addr, i, &stop, &answered)));
    let restarts = async {
        let mut met = 0;
        for (i, worker) in workers.iter_mut().enumerate() {
            let before = answered.load(SeqCst);
            eventually!(answered.load(SeqCst) > before + 12, "requests are answered");
            // The gateway goes while the worker is away, with answers that look for another worker.
            let replaced = replace(&mut now, &addrs, &socket);
            let ((), (next, of_it)) = tokio::join!(restart(i, worker), replaced);
            now = next;
            met += of_it;
            now.wait_ready(3).await;
        }
        stop.store(true, SeqCst);
        met
    };
    let (_, met) = tokio::join!(load, restarts);
    now.idle().await;
    assert!(met >= 1, "no request met a restart");
}
