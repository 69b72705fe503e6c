//! Hazard: requests that queue at a worker are bound to it, and to the order in which they came. Here they
//! wait in the gateway; and whoever waits can leave, is begun in time, and is forgotten by no gauge.

use keyway_tests::cluster::config_file;
use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::fake_worker::Call;
use keyway_tests::openai::{CHAT, chat_stream};
use keyway_tests::{Client, Cluster, Exchange, FakeWorker, eventually};

use crate::tenants::table;

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

/// As [`enter`], with these headers.
async fn enter_as(cluster: &Cluster, body: &[u8], headers: &[(&str, &str)]) -> Client {
    let before = waiting(cluster).await;
    let mut client = Client::connect(cluster.addr()).await;
    client.request("POST", CHAT, headers, body).await;
    eventually!(waiting(cluster).await > before, "it waits");
    client
}

/// In which order the waiting requests reach the worker, by the first word of their prompts.
async fn order(cluster: &Cluster, first: Call, waiting: usize) -> Vec<String> {
    let (mut call, mut order) = (first, Vec::new());
    for _ in 0..waiting {
        call.begin_stream().await;
        call.say("one").await;
        call = cluster.fakes[0].call().await;
        let prompt = prompt_of(&call);
        let names = ["plain", "late", "patient", "bulk", "bold"];
        order.push(names.into_iter().find(|name| prompt.contains(name)).unwrap_or("none").to_owned());
    }
    call.begin_stream().await;
    order
}

const ONE_AT_A_TIME: &str = "[routing]\nhold_horizon_ms = 5\n";

#[tokio::test]
async fn a_request_says_itself_how_urgent_it_is() {
    let config = config_file(ONE_AT_A_TIME);
    let (cluster, first, call) = busy_cluster(&["--config", config.path().to_str().unwrap()]).await;
    let mut clients = Vec::new();
    for (name, header) in [
        ("bulk", Some(("x-keyway-priority", "-1"))),
        // It misses that anyway, and yields to those who miss nothing.
        ("late", Some(("x-keyway-slo-ttft-ms", "1"))),
        ("plain", None),
        ("patient", Some(("x-keyway-slo-ttft-ms", "86400000"))),
        // Nobody goes before the others by its own word.
        ("bold", Some(("x-keyway-priority", "1000"))),
    ] {
        clients.push(enter_as(&cluster, &short(name), header.as_slice()).await);
    }
    let order = order(&cluster, call, 5).await;
    assert_eq!(order[3..], ["late", "bulk"], "{order:?}");
    assert!(
        ["plain", "patient", "bold"].iter().all(|name| order[..3].iter().any(|other| other == name)),
        "{order:?}"
    );
    drop((clients, first));
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    for (outcome, requests) in [("kept", 1.0), ("missed", 1.0)] {
        assert_eq!(
            metrics.sum("keyway_ttft_objectives_total", &[("outcome", outcome)]),
            requests,
            "{outcome}"
        );
    }
}

#[tokio::test]
async fn what_a_request_says_of_its_urgency_and_cannot_mean_is_refused_in_its_api() {
    let cluster = Cluster::builder().fakes(1).start().await;
    for (name, value) in [("x-keyway-priority", "high"), ("x-keyway-slo-ttft-ms", "0")] {
        for (path, kind) in [(CHAT, "/error/param"), ("/v1/messages", "/error/message")] {
            let mut client = Client::connect(cluster.addr()).await;
            client
                .request("POST", path, &[(name, value), ("anthropic-version", "2023-06-01")], &short("odd"))
                .await;
            let response = client.response().await;
            assert_eq!(response.status(), 400);
            let said = response.json();
            assert!(said.pointer(kind).is_some_and(|said| said.to_string().contains(name)), "{said}");
        }
    }
    assert_eq!(cluster.fakes[0].request_count(), 0);
}

#[tokio::test]
async fn a_tenant_s_requests_say_so_too_and_none_goes_above_the_tenant_s() {
    let tenants = config_file(&table("alice", "ka", "priority = 2"));
    let config = format!("{ONE_AT_A_TIME}[auth]\ntenants_file = {:?}\n", tenants.path());
    let config = config_file(&config);
    let args = ["--config", config.path().to_str().unwrap()];
    let cluster = Cluster::builder().fakes(1).args(&args).start().await;
    cluster.fakes[0].manual();
    let key = ("authorization", "Bearer ka");
    let mut first = Client::connect(cluster.addr()).await;
    first.request("POST", CHAT, &[key], &long("first")).await;
    let call = cluster.fakes[0].call().await;
    let mut clients = Vec::new();
    for (name, said) in [("bulk", "-1"), ("late", "1"), ("bold", "1000")] {
        clients.push(enter_as(&cluster, &short(name), &[key, ("x-keyway-priority", said)]).await);
    }
    assert_eq!(order(&cluster, call, 3).await, ["bold", "late", "bulk"]);
    drop((clients, first));
    cluster.gateway.idle().await;
}
