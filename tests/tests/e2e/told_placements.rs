//! Hazard: several gateways in front of workers that do not say what their caches hold, each of which knows
//! its own placements alone; one that starts and knows none; one whose names for prompts are others.

use std::path::Path;

use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{FakeWorker, Gateway, eventually, post};

/// Requests by which a gateway that has just started is judged.
const REQUESTS: usize = 100;

/// A configuration of these workers and peers, with the key of names in this file.
fn toml(workers: &[FakeWorker], peers: &[&Gateway], key: &Path) -> String {
    let urls: Vec<_> = workers.iter().map(|worker| format!("http://{}", worker.addr())).collect();
    let mut others: Vec<_> = peers.iter().map(|peer| format!("http://{}", peer.admin)).collect();
    if others.is_empty() {
        // Placements are told from the start on where there are peers at all.
        others.push("http://127.0.0.1:1".to_owned());
    }
    format!(
        "worker = {urls:?}\n[routing]\nload_scrape_ms = 0\nhash_key_file = {key:?}\n[peers]\nurls = {others:?}\nevery_ms = 10\n"
    )
}

/// Gateways that tell each other.
async fn together(workers: &[FakeWorker], count: usize, key: &Path) -> Vec<Gateway> {
    let mut gateways = Vec::<Gateway>::new();
    for _ in 0..count {
        let gateway = Gateway::builder().config(&toml(workers, &[], key)).start().await;
        gateway.wait_ready(workers.len()).await;
        gateways.push(gateway);
    }
    let all: Vec<&Gateway> = gateways.iter().collect();
    for gateway in &all {
        gateway.rewrite(&toml(workers, &all, key));
        gateway.process.signal("HUP");
    }
    for gateway in &all {
        eventually!(gateway.metrics().await.sum("keyway_peers", &[("state", "heard")]) == count as f64 - 1.0);
    }
    gateways
}

/// A key file of these bytes.
fn key_file(dir: &Path, bytes: &str) -> std::path::PathBuf {
    let file = dir.join(bytes);
    std::fs::write(&file, bytes).unwrap();
    file
}

/// Placements heard, of which this became.
async fn heard(gateway: &Gateway, outcome: &str) -> f64 {
    gateway.metrics().await.sum("keyway_peer_placements_heard_total", &[("outcome", outcome)])
}

/// A conversation's prompt: some kilobytes of its own, and a turn at its end.
fn prompt(conversation: usize, turn: &str) -> String {
    format!("{} {turn}", format!("Conversation {conversation} goes on. ").repeat(80))
}

/// Tokens that a gateway counts as cached of a prompt that it sends.
async fn matched(gateway: &Gateway, prompt: &str) -> f64 {
    let answer = post(gateway.addr, CHAT, &chat(prompt)).await;
    assert_eq!(answer.status(), 200);
    answer.header("x-keyway-matched-tokens").and_then(|tokens| tokens.parse().ok()).unwrap_or(0.0)
}

#[tokio::test]
async fn what_one_gateway_has_placed_the_others_find() {
    let workers = [FakeWorker::start().await, FakeWorker::start().await, FakeWorker::start().await];
    let dir = tempfile::tempdir().unwrap();
    let gateways = together(&workers, 2, &key_file(dir.path(), "one")).await;
    for conversation in 0..12 {
        let first = post(gateways[0].addr, CHAT, &chat(&prompt(conversation, "first"))).await;
        eventually!(heard(&gateways[1], "recorded").await == conversation as f64 + 1.0);
        let next = post(gateways[1].addr, CHAT, &chat(&prompt(conversation, "second"))).await;
        assert_eq!(next.header("x-keyway-worker"), first.header("x-keyway-worker"));
        let tokens: f64 = next.header("x-keyway-matched-tokens").unwrap().parse().unwrap();
        assert!(tokens > 300.0, "{tokens}");
    }
    assert_eq!(heard(&gateways[0], "unfounded").await, 0.0);
}

#[tokio::test]
async fn a_gateway_that_starts_under_load_finds_what_the_others_find_with_its_first_requests() {
    let workers = [FakeWorker::start().await, FakeWorker::start().await, FakeWorker::start().await];
    let dir = tempfile::tempdir().unwrap();
    let key = key_file(dir.path(), "one");
    let gateways = together(&workers, 2, &key).await;
    for worker in &workers {
        worker.set_usage(500, 0);
    }
    for conversation in 0..REQUESTS {
        matched(&gateways[conversation % 2], &prompt(conversation, "first")).await;
    }
    // Requests go on while it starts.
    let addr = gateways[0].addr;
    let load = tokio::spawn(async move {
        for conversation in (REQUESTS..).take(100_000) {
            let _ = post(addr, CHAT, &chat(&prompt(conversation, "first"))).await;
        }
    });
    let all: Vec<&Gateway> = gateways.iter().collect();
    let new = Gateway::builder().config(&toml(&workers, &all, &key)).start().await;
    new.wait_ready(workers.len()).await;
    // A worker's answers say that it has what it was sent, as they would.
    for worker in &workers {
        worker.set_usage(500, 480);
    }
    let (mut of_new, mut of_old) = (0.0, 0.0);
    for conversation in 0..REQUESTS {
        of_new += matched(&new, &prompt(conversation, "asked of who has just started")).await;
        of_old += matched(&gateways[1], &prompt(conversation, "asked of who was there")).await;
    }
    load.abort();
    assert!(of_old > 30_000.0 && of_new >= 0.95 * of_old, "{of_new} of {of_old}");
    new.process.announced("the index was taken from another gateway").await;
}

#[tokio::test]
async fn who_names_prompts_otherwise_is_not_believed_and_that_is_said() {
    let workers = [FakeWorker::start().await, FakeWorker::start().await];
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (key_file(dir.path(), "one"), key_file(dir.path(), "other"));
    let teller = Gateway::builder().config(&toml(&workers, &[], &one)).start().await;
    teller.wait_ready(2).await;
    matched(&teller, &prompt(0, "first")).await;
    let listener = Gateway::builder().config(&toml(&workers, &[&teller], &other)).start().await;
    listener.wait_ready(2).await;
    let said = ["another gateway names prompts otherwise", "no other gateway gives its index", "other names"];
    for said in said {
        listener.process.announced(said).await;
    }
    matched(&teller, &prompt(1, "first")).await;
    eventually!(heard(&listener, "other_names").await >= 1.0);
    assert_eq!(heard(&listener, "recorded").await, 0.0);
    assert!(matched(&listener, &prompt(1, "second")).await < 100.0);
}
