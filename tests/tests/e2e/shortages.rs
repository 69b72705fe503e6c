//! Hazard: the gateway itself has no descriptor, port or memory left for a connection, and takes that for its
//! workers' failure: it leaves them out, forgets their caches, and its operators cannot see why.

use keyway_tests::openai::{CHAT, chat, chat_stream};
use keyway_tests::{Client, Cluster, FailingConnect, FakeWorker, Response, eventually, get, post};

/// What `connect` says on Linux.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const ENOMEM: i32 = 12;
const EPERM: i32 = 1;
const EACCES: i32 = 13;
const EADDRNOTAVAIL: i32 = 99;
const ENOBUFS: i32 = 105;

async fn index_blocks(cluster: &Cluster) -> f64 {
    cluster.gateway.metrics().await.sum("keyway_index_blocks", &[])
}

/// Workers' caches are known, and no worker is left out.
async fn nobody_paid(cluster: &Cluster, blocks: f64) {
    assert_eq!(get(cluster.gateway.admin, "/livez").await.status(), 200);
    assert_eq!(cluster.gateway.ready_workers().await, cluster.fakes.len());
    assert!(index_blocks(cluster).await >= blocks, "the index is kept");
    assert_eq!(cluster.gateway.metrics().await.sum("keyway_worker_ejections_total", &[]), 0.0);
}

async fn conversations(cluster: &Cluster) -> f64 {
    for i in 0..4 {
        cluster.chat(&format!("conversation {i}: {}", "lorem ipsum ".repeat(100))).await;
    }
    let blocks = index_blocks(cluster).await;
    assert!(blocks > 0.0);
    blocks
}

/// What the first request is told that finds no kept connection. One that finds one gets it, and joins those
/// that are waiting; either worker may have one when the other has none.
async fn refusal(cluster: &Cluster, waiting: &mut Vec<Client>) -> Response {
    loop {
        assert!(waiting.len() < 64, "each found a connection");
        let mut client = Client::connect(cluster.addr()).await;
        client.post(CHAT, &chat("x")).await;
        let served = async {
            let active = || cluster.fakes.iter().map(FakeWorker::active).sum::<usize>();
            eventually!(active() > waiting.len(), "a worker has it");
        };
        tokio::select! {
            response = client.response() => return response,
            () = served => {}
        }
        waiting.push(client);
    }
}

#[tokio::test]
async fn a_process_that_has_no_connection_to_give_says_so_and_blames_no_worker() {
    let Some(connect) = FailingConnect::build() else { return };
    let cluster = Cluster::builder()
        .fakes(2)
        .config("[limits]\nmax_cores = 1")
        .gateway(|gateway| connect.put_into(gateway))
        .start()
        .await;
    let blocks = conversations(&cluster).await;
    for (errno, resource) in [
        (EMFILE, "descriptors"),
        (ENFILE, "host_descriptors"),
        (EADDRNOTAVAIL, "ports"),
        (ENOBUFS, "memory"),
        (ENOMEM, "memory"),
        (EPERM, "permission"),
        (EACCES, "permission"),
    ] {
        cluster.fakes.iter().for_each(FakeWorker::hang);
        connect.with(errno);
        let mut waiting = Vec::new();
        for _ in 0..2 {
            let response = refusal(&cluster, &mut waiting).await;
            assert_eq!((response.status(), response.header("retry-after")), (503, Some("1")), "{errno}");
            assert_eq!(response.json()["error"]["code"], "gateway_overloaded", "{errno}");
        }
        nobody_paid(&cluster, blocks).await;
        let counted =
            cluster.gateway.metrics().await.sum("keyway_shortages_total", &[("resource", resource)]);
        assert!(counted >= 2.0, "{resource}: {counted}");
        let log = || cluster.gateway.process.log();
        let said = |line: &String| line.contains("the gateway itself lacks") && line.contains(resource);
        eventually!(log().iter().any(said), "{resource}");
        assert_eq!(log().iter().find(|line| line.contains("ready=false")), None);
        connect.with(0);
        drop(waiting);
        cluster.fakes.iter().for_each(FakeWorker::answer);
        cluster.chat("after").await;
        cluster.gateway.idle().await;
    }
}

#[tokio::test]
async fn a_process_with_few_descriptors_serves_what_it_can_and_its_operators_always() {
    let cluster = Cluster::builder()
        .fakes(2)
        .config("[limits]\nmax_cores = 1")
        .gateway(|gateway| gateway.open_files(64))
        .start()
        .await;
    let blocks = conversations(&cluster).await;
    let said = |line: &String| line.contains("too low for limits.max_connections");
    eventually!(cluster.gateway.process.log().iter().any(said), "a low limit is said at the start");
    cluster.fakes.iter().for_each(FakeWorker::manual);
    let mut clients = Vec::new();
    for i in 0..40 {
        let mut client = Client::connect(cluster.addr()).await;
        client.post(CHAT, &chat_stream(&format!("stream {i}"))).await;
        clients.push(client);
    }
    // As many as fit have begun; the others wait to be let in, or are told to come again.
    let mut calls = Vec::new();
    while calls.len() < 8 {
        let either = tokio::select! {
            call = cluster.fakes[0].call() => call,
            call = cluster.fakes[1].call() => call,
        };
        calls.push(either);
        nobody_paid(&cluster, blocks).await;
    }
    let answering = async {
        for mut call in calls {
            call.begin_stream().await;
            call.done().await;
        }
        loop {
            let mut call = tokio::select! {
                call = cluster.fakes[0].call() => call,
                call = cluster.fakes[1].call() => call,
            };
            call.begin_stream().await;
            call.done().await;
        }
    };
    let asking = async {
        let mut statuses = Vec::new();
        for mut client in clients {
            let response = client.response().await;
            if response.status() == 503 {
                assert!(response.text().contains("gateway_overloaded"), "{}", response.text());
            }
            statuses.push(response.status());
            // Room for another.
            drop(client);
        }
        statuses
    };
    let statuses = tokio::select! { statuses = asking => statuses, () = answering => unreachable!() };
    assert!(statuses.iter().all(|status| [200, 503].contains(status)), "{statuses:?}");
    assert!(statuses.iter().filter(|status| **status == 200).count() >= 8, "{statuses:?}");
    nobody_paid(&cluster, blocks).await;
    let log = cluster.gateway.process.log();
    assert_eq!(log.iter().find(|line| line.contains("ready=false")), None);
    cluster.fakes.iter().for_each(FakeWorker::answer);
    cluster.chat("after").await;
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn idle_connections_to_workers_make_room_for_clients() {
    let cluster = Cluster::builder()
        .fakes(2)
        .policy("round-robin")
        .config("[limits]\nmax_cores = 1")
        .gateway(|gateway| gateway.open_files(64))
        .start()
        .await;
    // Bursts that leave as many kept connections as there is room for, at one worker and then at the other.
    for burst in 0..6 {
        let asked = (0..8).map(|i| {
            let body = chat(&format!("burst {burst}, {i}"));
            let addr = cluster.addr();
            async move { post(addr, CHAT, &body).await.status() }
        });
        let statuses = futures_util::future::join_all(asked).await;
        assert_eq!(statuses, [200; 8], "burst {burst}");
        eventually!(cluster.gateway.ready_workers().await == 2);
    }
    assert_eq!(cluster.gateway.process.log().iter().find(|line| line.contains("gave no answer")), None);
}

#[tokio::test]
async fn the_soft_limit_of_open_files_is_raised_to_the_hard_one() {
    let cluster = Cluster::builder().fakes(1).start().await;
    let limits =
        std::fs::read_to_string(format!("/proc/{}/limits", cluster.gateway.process.id())).expect("it runs");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("a line");
    let [soft, hard] = [3, 4].map(|at| line.split_whitespace().nth(at).expect("a number"));
    assert_eq!(soft, hard);
}
