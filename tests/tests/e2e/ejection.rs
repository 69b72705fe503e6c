//! Hazard: a worker that answers badly goes on being sent requests, or the fleet is sent every failed request
//! again. And the reverse: a whole fleet is taken out because of what it is asked.

use std::time::Instant;

use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{Client, Cluster, FakeWorker, eventually, post};

async fn fails(worker: &FakeWorker) -> ! {
    loop {
        worker.call().await.respond(500, &[("content-type", "application/json")], b"{}").await;
    }
}

async fn cuts(worker: &FakeWorker) -> ! {
    loop {
        worker.call().await.cut();
    }
}

async fn ask(cluster: &Cluster, times: usize) -> Vec<u16> {
    let mut statuses = Vec::new();
    for i in 0..times {
        statuses.push(post(cluster.addr(), CHAT, &chat(&format!("request {i}"))).await.status());
    }
    statuses
}

#[tokio::test]
async fn a_worker_whose_answers_fail_is_left_out_and_tried_until_it_is_well() {
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    let sick = &cluster.fakes[0];
    sick.manual();
    let asked = async {
        let ejections = async || cluster.gateway.metrics().await.sum("keyway_worker_ejections_total", &[]);
        let out_after_four = async || {
            assert_eq!(ask(&cluster, 4).await, [200; 4], "no client sees a failure");
            ejections().await >= 1.0
        };
        eventually!(out_after_four().await, "the sick worker is out");
    };
    tokio::select! {
        never = fails(sick) => never,
        () = asked => {}
    }
    // Five single requests, after pauses that double, and no client saw one of them.
    assert!((5..10).contains(&sick.request_count()), "{}", sick.request_count());
    assert_eq!(cluster.gateway.readyz().await, 200);
    // It is well again: one request finds out, and then it has its share.
    sick.answer();
    eventually!(cluster.served_by(&cluster.chat("again").await) == 0, "the first worker is back");
    let shares = [cluster.chat("a").await, cluster.chat("b").await].map(|answer| cluster.served_by(&answer));
    assert_ne!(shares[0], shares[1]);
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn the_only_worker_is_never_left_out() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    let statuses = tokio::select! {
        never = fails(worker) => never,
        statuses = ask(&cluster, 30) => statuses,
    };
    assert_eq!(statuses, [500; 30]);
}

#[tokio::test]
async fn a_fleet_that_fails_is_not_sent_everything_twice() {
    let cluster = Cluster::of_fakes(4, "round-robin").await;
    cluster.fakes.iter().for_each(FakeWorker::manual);
    let [a, b, c, d] = &cluster.fakes[..] else { panic!("four workers") };
    let (began, requests) = (Instant::now(), 500);
    let statuses = tokio::select! {
        never = cuts(a) => never,
        never = cuts(b) => never,
        never = cuts(c) => never,
        never = cuts(d) => never,
        statuses = ask(&cluster, requests) => statuses,
    };
    assert!(statuses.iter().all(|status| [502, 503].contains(status)), "{statuses:?}");
    let attempts: usize = cluster.fakes.iter().map(FakeWorker::request_count).sum();
    // A fifth of the requests, a burst of 100, and ten a second.
    let most = requests as f64 * 1.2 + 100.0 + 10.0 * (began.elapsed().as_secs_f64() + 1.0);
    assert!(attempts as f64 <= most, "{attempts} attempts, at most {most}");
    let refused = cluster.gateway.metrics().await.sum("keyway_retries_refused_total", &[]);
    assert!(refused > 0.0, "the budget was spent");
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_client_that_leaves_says_nothing_of_the_worker() {
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    cluster.fakes.iter().for_each(FakeWorker::hang);
    for _ in 0..20 {
        let mut client = Client::connect(cluster.addr()).await;
        client.post(CHAT, &chat("gone")).await;
        eventually!(cluster.fakes.iter().map(FakeWorker::active).sum::<usize>() == 1);
        drop(client);
        eventually!(cluster.fakes.iter().map(FakeWorker::active).sum::<usize>() == 0);
    }
    assert_eq!(cluster.gateway.metrics().await.sum("keyway_worker_ejections_total", &[]), 0.0);
    assert_eq!(cluster.gateway.ready_workers().await, 2);
}
