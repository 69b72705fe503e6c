//! Hazard: requests that queue at a worker are bound to it, and to the order in which they came. Here they
//! wait in the gateway; and whoever waits can leave, is begun in time, and is forgotten by no gauge.

use keyway_tests::cluster::config_file;
use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::fake_worker::Call;
use keyway_tests::openai::{CHAT, chat_stream};
use keyway_tests::{Cluster, Exchange, FakeWorker, eventually};

/// A prompt of its own that takes minutes at the rate which is assumed of an unknown worker.
fn long(name: &str) -> Vec<u8> {
    chat_stream(&format!("{name} {}", "all work and no play ".repeat(200_000)))
}

/// One of some 20 ms.
fn short(name: &str) -> Vec<u8> {
    chat_stream(&format!("{name} {}", "all play and no work ".repeat(20)))
}

async fn waiting(cluster: &Cluster) -> f64 {
    cluster.gateway.metrics().await.sum("keyway_requests_waiting", &[])
}

async fn busy_cluster(args: &[&str]) -> (Cluster, Exchange, Call) {
    let cluster = Cluster::builder().fakes(1).args(args).start().await;
    cluster.fakes[0].manual();
    let first = Exchange::post(PROTOCOLS[0], cluster.addr(), CHAT, &long("first")).await;
    let call = cluster.fakes[0].call().await;
    (cluster, first, call)
}

async fn enter(cluster: &Cluster, body: &[u8]) -> Exchange {
    let before = waiting(cluster).await;
    let exchange = Exchange::post(PROTOCOLS[0], cluster.addr(), CHAT, body).await;
    eventually!(waiting(cluster).await > before, "it waits");
    exchange
}

/// The beginning of a call's body.
fn prompt_of(call: &Call) -> String {
    String::from_utf8_lossy(&call.request.body[..call.request.body.len().min(200)]).into_owned()
}

#[tokio::test]
async fn the_shortest_of_those_who_wait_begins_first() {
    // A backlog of 20 ms is too much, so one begins at a time.
    let config = config_file("[routing]\nhold_horizon_ms = 5\n");
    let args = ["--config", config.path().to_str().unwrap()];
    let (cluster, first, mut call) = busy_cluster(&args).await;
    let second = enter(&cluster, &long("second")).await;
    let third = enter(&cluster, &short("third")).await;
    assert_eq!(cluster.fakes[0].request_count(), 1);
    // The first token tells that the worker can begin on another.
    call.begin_stream().await;
    call.say("one").await;
    let mut next = cluster.fakes[0].call().await;
    assert!(prompt_of(&next).contains("third"), "{}", prompt_of(&next));
    next.begin_stream().await;
    next.say("one").await;
    let mut last = cluster.fakes[0].call().await;
    assert!(prompt_of(&last).contains("second"), "{}", prompt_of(&last));
    last.begin_stream().await;
    drop((first, second, third));
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn without_holding_each_is_sent_as_it_comes() {
    let config = config_file("[routing]\nhold = false\n");
    let args = ["--config", config.path().to_str().unwrap()];
    let (cluster, _first, _call) = busy_cluster(&args).await;
    let _second = Exchange::post(PROTOCOLS[0], cluster.addr(), CHAT, &long("second")).await;
    let second = cluster.fakes[0].call().await;
    assert!(prompt_of(&second).contains("second"));
    assert_eq!(waiting(&cluster).await, 0.0);
}

#[tokio::test]
async fn who_leaves_while_waiting_reaches_no_worker() {
    for protocol in PROTOCOLS {
        let (cluster, first, call) = busy_cluster(&[]).await;
        let gone = Exchange::post(protocol, cluster.addr(), CHAT, &long("gone")).await;
        eventually!(waiting(&cluster).await == 1.0);
        let connection = gone.disconnect();
        eventually!(waiting(&cluster).await == 0.0, "{protocol:?}");
        drop((first, call));
        cluster.gateway.idle().await;
        assert_eq!(cluster.fakes[0].request_count(), 1);
        drop(connection);
    }
}

#[tokio::test]
async fn a_client_that_leaves_makes_room_at_its_worker() {
    let cluster = Cluster::builder().fakes(2).start().await;
    cluster.fakes.iter().for_each(FakeWorker::manual);
    let mut busy = Vec::new();
    for name in ["first", "second"] {
        busy.push(Exchange::post(PROTOCOLS[0], cluster.addr(), CHAT, &long(name)).await);
    }
    let calls = (cluster.fakes[0].call().await, cluster.fakes[1].call().await);
    let _third = enter(&cluster, &long("third")).await;
    // One client leaves: its worker can begin.
    busy.remove(0);
    eventually!(cluster.fakes.iter().map(FakeWorker::request_count).sum::<usize>() == 3);
    eventually!(waiting(&cluster).await == 0.0);
    drop(calls);
}
