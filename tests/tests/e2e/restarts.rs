//! Hazard: one restart goes well and the tenth does not: something of the process before is still there, or
//! gone already. And what clients do on real connections, kept or fresh, meets the moment that no test has
//! thought of.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use keyway_tests::bins::bin;
use keyway_tests::process::Process;
use keyway_tests::{Gateway, eventually, get};
use serde_json::Value;
use tokio::task::JoinHandle;

const RESTARTS: usize = 20;

/// A simulated fleet, whose streams take some restarts' time or a part of one.
async fn fleet() -> (Process, Vec<String>) {
    let mut command = Command::new(bin("keyway-loadtest"));
    let mock = Process::spawn(
        "mock",
        command.args(["mock", "--workers", "2", "--base-port", "0", "--profile", "h100-8b"]),
    );
    mock.announced("ready on ").await;
    let urls = || -> Vec<String> {
        let log = mock.log().join("\n");
        let found = log.split("ready on ").skip(1);
        found.map(|rest| rest.split([' ', '\n', ',']).next().unwrap_or_default().to_owned()).collect()
    };
    eventually!(urls().len() == 2, "two workers; {:?}", mock.log());
    let urls = urls();
    (mock, urls)
}

/// The load tester, until it is told to stop.
fn load(addr: SocketAddr, out: &Path, more: &[&str]) -> Process {
    let mut command = Command::new(bin("keyway-loadtest"));
    command.args(["run", "--url", &format!("http://{addr}"), "--concurrency", "6", "--duration", "1h"]);
    command.args(["--isl", "64", "--osl", "uniform(1,60)", "-o"]).arg(out).args(more);
    Process::spawn("loadtest", &mut command)
}

/// Its report, once it has been interrupted.
async fn reported(mut load: Process, out: &Path) -> Value {
    load.signal("INT");
    assert_eq!(load.ended().await.code(), Some(130), "{:?}", load.log());
    serde_json::from_slice(&fs::read(out.join("run.json")).expect("a report")).expect("JSON")
}

/// Asks over and over whether the gateway is ready, as a balancer does; panics when it is not, or nobody
/// answers.
fn balancer(admin: SocketAddr, stop: &Arc<AtomicBool>, asked: &Arc<AtomicU64>) -> JoinHandle<()> {
    let (stop, asked) = (Arc::clone(stop), Arc::clone(asked));
    tokio::spawn(async move {
        while !stop.load(Ordering::Relaxed) {
            assert_eq!(get(admin, "/readyz").await.status(), 200, "whoever answers is ready");
            asked.fetch_add(1, Ordering::Relaxed);
        }
    })
}

async fn gateway(workers: &[String], socket: &str) -> Gateway {
    let mut args = vec!["--handover-socket", socket];
    for worker in workers {
        args.extend(["--worker", worker]);
    }
    Gateway::builder().args(&args).start().await
}

#[tokio::test]
async fn twenty_restarts_in_a_row_under_a_load_tester_refuse_nobody_and_cut_nothing() {
    let (_mock, workers) = fleet().await;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("handover").display().to_string();
    let mut now = gateway(&workers, &socket).await;
    now.wait_ready(2).await;
    let (addr, admin) = (now.addr, now.admin);
    let (kept, fresh) = (dir.path().join("kept"), dir.path().join("fresh"));
    let keeps = load(addr, &kept, &[]);
    let connects = load(addr, &fresh, &["-H", "connection: close", "--seed", "2"]);
    let (stop, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let balancer = balancer(admin, &stop, &asked);
    for restart in 0..RESTARTS {
        // Both kinds of connections have streams here, some of which are open at any moment.
        eventually!(now.metrics().await.sum("keyway_requests_total", &[("outcome", "complete")]) >= 24.0);
        let before = asked.load(Ordering::Relaxed);
        eventually!(asked.load(Ordering::Relaxed) > before);
        let next = gateway(&workers, &socket).await;
        assert_eq!((next.addr, next.admin), (addr, admin));
        assert_eq!(now.process.ended().await.code(), Some(0), "restart {restart}: {:?}", now.process.log());
        let log = now.process.log().join("\n");
        assert!(!log.contains("were cut"), "restart {restart}: {log}");
        now = next;
    }
    stop.store(true, Ordering::Relaxed);
    balancer.await.expect("the gateway is ready all the time");
    for (load, out) in [(keeps, kept), (connects, fresh)] {
        let report = reported(load, &out).await;
        assert_eq!(report["errors"], Value::Array(Vec::new()), "{}: {}", out.display(), report["requests"]);
        let count = |what: &str| report["requests"][what].as_u64().unwrap();
        assert_eq!(count("failed"), 0, "{}", report["requests"]);
        assert!(count("ok") > 10 * RESTARTS as u64, "{}", report["requests"]);
    }
    now.idle().await;
}
