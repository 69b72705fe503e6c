//! Hazard: workers are restarted one after the other while requests come, and some of those are lost.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use keyway_tests::openai::{CHAT, DONE};
use keyway_tests::{Cluster, End, RealWorker, eventually, post};
use serde_json::json;

/// Requests in a row, streamed and whole in turn, until told to stop; each must be answered in full.
async fn client(cluster: &Cluster, i: usize, stop: &AtomicBool, answered: &AtomicUsize) {
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
        let response = post(cluster.addr(), CHAT, body.to_string().as_bytes()).await;
        let text = response.text();
        assert_eq!((response.status(), &response.end), (200, &End::Complete), "{text}");
        assert_eq!(text.ends_with(&format!("data: {DONE}\n\n")), stream, "{text}");
        answered.fetch_add(1, SeqCst);
    }
}

#[tokio::test]
async fn restarting_every_worker_under_load_loses_no_request() {
    let mut cluster = Cluster::builder().workers(3).start().await;
    let mut workers = std::mem::take(&mut cluster.workers);
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let load = futures_util::future::join_all((0..6).map(|i| client(&cluster, i, &stop, &answered)));
    let restarts = async {
        for (i, worker) in workers.iter_mut().enumerate() {
            let before = answered.load(SeqCst);
            eventually!(answered.load(SeqCst) > before + 12, "requests are answered");
            let addr = worker.addr();
            // The second one has no time to finish what it is doing.
            if i == 1 {
                worker.process.kill();
            } else {
                worker.process.terminate();
                worker.process.ended().await;
            }
            *worker = RealWorker::spawn_at(addr, &[]);
            worker.ready().await;
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
