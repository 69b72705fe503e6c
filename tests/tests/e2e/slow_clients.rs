//! Hazard: clients that say or take as little as they can, so many that nobody else is served. `slowhttptest`
//! is the attacker: it says itself whether the gateway closed its connections or its own time ran out. One
//! such client: `timeouts.rs`.

use std::process::Command;

use keyway_tests::eventually::patient;
use keyway_tests::openai::{CHAT, chat};
use keyway_tests::process::Process;
use keyway_tests::tools::tool;
use keyway_tests::{Call, FakeWorker, Gateway, eventually, post};
use tokio::task::JoinSet;

/// Files that a gateway or an attacker may have open here; some systems begin with 1,024.
const OPEN_FILES: u32 = 4_096;

/// What the connection that asks for the gauge adds to it.
const ASKING: usize = 1;

/// A gateway with these limits before one worker.
async fn with_limits(limits: &str) -> (Gateway, FakeWorker) {
    let own = std::process::id().to_string();
    let raised = Command::new("prlimit").args(["--pid", &own, &format!("--nofile={OPEN_FILES}:")]).status();
    assert!(raised.is_ok_and(|status| status.success()), "{OPEN_FILES} open files are allowed");
    let worker = FakeWorker::start().await;
    let toml = format!("worker = [\"http://{}\"]\n[limits]\n{limits}\n", worker.addr());
    // Not a line for each byte of each connection.
    let gateway = Gateway::builder().config(&toml).log("debug").start().await;
    gateway.wait_ready(1).await;
    (gateway, worker)
}

/// An attack of this kind by so many connections at once. Unless `more` says otherwise it gives up before a
/// test's patience does.
fn attack(gateway: &Gateway, kind: &str, connections: usize, more: &[&str]) -> Option<Process> {
    let mut command = Command::new(tool("slowhttptest")?);
    let (url, connections) = (format!("http://{}{CHAT}", gateway.addr), connections.to_string());
    command.args([kind, "-c", &connections, "-r", "500", "-l", "25", "-u", &url]).args(more);
    Some(Process::spawn("slowhttptest", &mut command))
}

/// Waits for an attack's end, which is that of its last connection and not of its time.
async fn was_cut_off(mut attack: Process) {
    attack.ended().await;
    let said = attack.log().join("\n");
    assert!(said.contains("No open connections left"), "{said}");
}

async fn open(gateway: &Gateway) -> usize {
    gateway.metrics().await.sum("keyway_connections", &[]) as usize
}

/// Sends healthy requests and returns how many of them were answered while so many connections were open.
async fn answered_beside(gateway: &Gateway, connections: usize, requests: usize) -> usize {
    eventually!(open(gateway).await >= connections + ASKING, "{connections} connections are open");
    let mut beside = 0;
    for _ in 0..requests {
        assert_eq!(post(gateway.addr, CHAT, &chat("a healthy one")).await.status(), 200);
        beside += usize::from(open(gateway).await >= connections + ASKING);
    }
    beside
}

/// Wants nothing left of an attack, and that its requests reached no worker. The attacker asks by `GET` now
/// and then whether anybody is served.
async fn nothing_is_left(gateway: &Gateway, worker: &FakeWorker, healthy: usize) {
    eventually!(open(gateway).await == ASKING, "every connection is closed");
    gateway.idle().await;
    let (sent, asked): (Vec<_>, Vec<_>) =
        worker.requests().into_iter().partition(|seen| seen.target().0 == "POST");
    assert_eq!(sent.iter().filter(|seen| seen.body == chat("a healthy one")).count(), healthy);
    assert_eq!(sent.len(), healthy, "nothing of the attack");
    assert!(asked.iter().all(|seen| seen.target().0 == "GET" && seen.body.is_empty()));
}

#[tokio::test]
async fn a_thousand_slow_heads_are_cut_off_and_others_are_served_meanwhile() {
    let (gateway, worker) = with_limits("header_read_ms = 8000").await;
    // A header every two seconds, and never the last.
    let Some(attack) = attack(&gateway, "-H", 1_000, &["-t", "POST", "-i", "2"]) else { return };
    assert!(answered_beside(&gateway, 1_000, 100).await > 0);
    was_cut_off(attack).await;
    nothing_is_left(&gateway, &worker, 100).await;
}

#[tokio::test]
async fn bodies_that_stop_or_trickle_are_cut_off() {
    let (gateway, worker) = with_limits("body_idle_ms = 4000").await;
    let body = ["-t", "POST", "-s", "100000", "-f", "application/json", "-i"];
    let Some(stopped) = attack(&gateway, "-B", 200, &[&body[..], &["60"]].concat()) else { return };
    // A piece every second, which are too few bytes.
    let Some(trickling) = attack(&gateway, "-B", 200, &[&body[..], &["1"]].concat()) else { return };
    assert!(answered_beside(&gateway, 400, 50).await > 0);
    tokio::join!(was_cut_off(stopped), was_cut_off(trickling));
    nothing_is_left(&gateway, &worker, 50).await;
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_requests_total", &[("outcome", "body_too_slow")]), 400.0);
}

/// Answers without an end, until the gateway has gone away.
async fn endless(mut call: Call) {
    call.begin_stream().await;
    let event = "x".repeat(256 << 10);
    while call.try_event(&event).await {}
}

#[tokio::test]
async fn readers_of_some_bytes_a_second_are_given_up_and_their_worker_is_free() {
    let (gateway, worker) = with_limits("client_stall_ms = 2000").await;
    worker.manual();
    // Windows of some bytes, five bytes read every second, and no end of that within a test's patience.
    let windows = ["-w", "10", "-y", "20", "-n", "1", "-z", "5", "-l", "600"];
    let Some(attack) = attack(&gateway, "-X", 20, &windows) else { return };
    let mut answers = JoinSet::new();
    for _ in 0..20 {
        answers.spawn(endless(worker.call().await));
    }
    worker.answer();
    patient("the gateway to give up", answers.join_all()).await;
    drop(attack);
    assert_eq!(post(gateway.addr, CHAT, &chat("a healthy one")).await.status(), 200);
    eventually!(open(&gateway).await == ASKING, "every connection is closed");
    gateway.idle().await;
}
