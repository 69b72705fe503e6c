//! Hazard: several gateways in front of one fleet, each of which takes a worker for free that another keeps
//! busy.

use keyway_tests::exchange::Protocol;
use keyway_tests::openai::{CHAT, chat, chat_stream};
use keyway_tests::{Exchange, FakeWorker, Gateway, eventually, post};
use serde_json::Value;

/// What a gateway that sees no gauges believes to be at each worker: requests, and prompt tokens that wait.
async fn known(gateway: &Gateway, workers: &[FakeWorker]) -> Vec<(u64, u64)> {
    let explanation: Value = post(gateway.admin, "/explain", &chat("hello")).await.json();
    let of = |worker: &FakeWorker| {
        let name = worker.addr().to_string();
        let row = explanation["workers"].as_array()?.iter().find(|row| row["worker"] == name.as_str())?;
        Some((row["requests_in_flight"].as_u64()?, row["waiting_prefill_tokens"].as_u64()?))
    };
    workers.iter().map(|worker| of(worker).unwrap_or_default()).collect()
}

/// Addresses of others, by state.
async fn peers(gateway: &Gateway, state: &str) -> f64 {
    gateway.metrics().await.sum("keyway_peers", &[("state", state)])
}

/// A configuration without a look at gauges, of these workers and more.
fn toml(workers: &[FakeWorker], more: &str) -> String {
    let urls: Vec<_> = workers.iter().map(|worker| format!("http://{}", worker.addr())).collect();
    format!("worker = {urls:?}\n[routing]\nload_scrape_ms = 0\n{more}")
}

#[tokio::test]
async fn what_one_gateway_sends_the_others_know_and_leave_alone() {
    let workers = [FakeWorker::start().await, FakeWorker::start().await];
    // The first one sends to one worker alone, so that it is the busy one.
    let busy = Gateway::builder().config(&toml(&workers[..1], "")).start().await;
    let gateway = Gateway::builder().config(&toml(&workers, "")).start().await;
    busy.wait_ready(1).await;
    gateway.wait_ready(2).await;
    let all = format!("[peers]\nurls = [\"http://{}\", \"http://{}\"]\n", busy.admin, gateway.admin);
    busy.rewrite(&toml(&workers[..1], &all));
    gateway.rewrite(&toml(&workers, &all));
    for one in [&busy, &gateway] {
        one.process.signal("HUP");
        // Itself is neither.
        eventually!(peers(one, "heard").await == 1.0 && peers(one, "silent").await == 0.0);
    }

    workers[0].hang();
    let mut open = Vec::new();
    for number in 0..8 {
        let prompt = format!("Prompt {number}. ").repeat(60);
        open.push(Exchange::post(Protocol::Http1, busy.addr, CHAT, &chat_stream(&prompt)).await);
    }
    let seen = async || known(&gateway, &workers).await;
    eventually!(seen().await[0].0 == 8 && seen().await[0].1 > 1_000, "{:?}", seen().await);
    assert_eq!(seen().await[1], (0, 0));
    let (requests, text) = (gateway.metrics().await, gateway.workers().await.to_string());
    assert_eq!(requests.sum("keyway_requests_in_flight", &[]), 0.0, "others' are not its own");
    assert!(text.contains("\"requests_of_others\":8"), "{text}");
    for number in 0..12 {
        let answer =
            post(gateway.addr, CHAT, &chat(&format!("Prompt {number} of somebody else. {number}"))).await;
        assert_eq!(answer.header("x-keyway-worker"), Some(workers[1].addr().to_string().as_str()));
    }
    drop(open);
    eventually!(seen().await == [(0, 0), (0, 0)]);
}

#[tokio::test]
async fn who_is_gone_or_not_listened_to_any_more_has_nothing_anywhere() {
    let workers = [FakeWorker::start().await];
    workers[0].hang();
    let mut busy = Gateway::builder().config(&toml(&workers, "")).start().await;
    let heard = format!("[peers]\nurls = [\"http://{}\"]\nevery_ms = 10\n", busy.admin);
    let gateway = Gateway::builder().config(&toml(&workers, &heard)).start().await;
    busy.wait_ready(1).await;
    gateway.wait_ready(1).await;
    let _open = Exchange::post(Protocol::Http1, busy.addr, CHAT, &chat_stream("hi")).await;
    let requests = async || known(&gateway, &workers).await[0].0;
    eventually!(requests().await == 1);
    gateway.rewrite(&toml(&workers, ""));
    gateway.process.signal("HUP");
    eventually!(requests().await == 0);
    assert_eq!(peers(&gateway, "heard").await, 0.0);
    gateway.rewrite(&toml(&workers, &heard));
    gateway.process.signal("HUP");
    eventually!(requests().await == 1);
    busy.process.kill();
    eventually!(requests().await == 0 && peers(&gateway, "silent").await == 1.0);
    let unknown = "another gateway's load is not known";
    eventually!(gateway.process.log().iter().any(|line| line.contains(unknown)));
}

#[tokio::test]
async fn a_successor_is_listened_to_in_place_of_who_still_drains() {
    let workers = [FakeWorker::start().await];
    workers[0].hang();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("handover").display().to_string();
    let start = async || {
        let builder = Gateway::builder().config(&toml(&workers, "")).args(&["--handover-socket", &socket]);
        builder.start().await
    };
    let first = start().await;
    first.wait_ready(1).await;
    let gateway = Gateway::builder()
        .config(&toml(&workers, &format!("[peers]\nurls = [\"http://{}\"]\n", first.admin)));
    let gateway = gateway.start().await;
    gateway.wait_ready(1).await;
    let ask = async || Exchange::post(Protocol::Http1, first.addr, CHAT, &chat_stream("hi")).await;
    let requests = async || known(&gateway, &workers).await[0].0;
    let _drains = ask().await;
    eventually!(requests().await == 1);
    let second = start().await;
    assert_eq!(second.admin, first.admin);
    // Until then the first one still accepts: operators, and clients.
    let draining = || first.process.log().iter().filter(|line| line.contains("draining")).count();
    eventually!(draining() == 2);
    let _open = (ask().await, ask().await);
    eventually!(requests().await == 2);
    eventually!(workers[0].active() == 3, "the first one's is open still");
}

#[tokio::test]
async fn other_gateways_are_shown_the_operators_token() {
    let workers = [FakeWorker::start().await];
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "kw-operators").unwrap();
    let guarded =
        Gateway::builder().config(&toml(&workers, &format!("[auth]\nadmin_token_file = {token:?}\n")));
    let guarded = guarded.start().await;
    let asks = format!("[peers]\nurls = [\"http://{}\"]\n", guarded.admin);
    let stranger = Gateway::builder().config(&toml(&workers, &asks)).start().await;
    let refused = "another gateway's load is not known";
    eventually!(
        stranger.process.log().iter().any(|line| line.contains(refused) && line.contains("401")),
        "{:?}",
        stranger.process.log()
    );
    let friend = Gateway::builder().config(&toml(&workers, &format!("{asks}token_file = {token:?}\n")));
    let friend = friend.start().await;
    eventually!(peers(&friend, "heard").await == 1.0);
    assert_eq!(peers(&stranger, "silent").await, 1.0);
}
