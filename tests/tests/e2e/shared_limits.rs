//! Hazard: several gateways admit a tenant as often as there are gateways, or none of them does while the
//! store by which they count is away. A real Redis.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use keyway_tests::cluster::config_file;
use keyway_tests::openai::{CHAT, chat};
use keyway_tests::process::Process;
use keyway_tests::tools::tool;
use keyway_tests::{Client, FakeWorker, Gateway, Response, eventually, ports};
use tempfile::{NamedTempFile, TempDir};

use crate::tenants::table;

/// Longer than any request may take: a request waits 25 ms for the store, and the rest is the machine's.
const HANG: Duration = Duration::from_secs(10);

pub(crate) struct Redis {
    pub(crate) process: Process,
    pub(crate) port: u16,
    _dir: TempDir,
}

impl Redis {
    /// `None` where it is not installed.
    pub(crate) async fn start(port: u16, more: &[&str]) -> Option<Self> {
        let mut command = Command::new(tool("redis-server")?);
        command.args([
            "--port",
            &port.to_string(),
            // Where a cluster's own nodes talk; by default 10,000 further, among the system's own choices.
            "--cluster-port",
            &ports::free_addr().port().to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]);
        let dir = TempDir::new().expect("a folder");
        command.arg("--dir").arg(dir.path()).args(more);
        let process = Process::spawn("redis-server", &mut command);
        let listens = || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
        eventually!(listens(), "Redis listens");
        Some(Self { process, port, _dir: dir })
    }
}

struct Setup {
    gateways: Vec<Gateway>,
    worker: FakeWorker,
    redis: Redis,
    _tenants: NamedTempFile,
}

/// Two gateways with one store; `None` where there is no Redis.
async fn setup(limits: &str, more: &[&str], user: &str) -> Option<Setup> {
    let redis = Redis::start(ports::free_addr().port(), more).await?;
    let worker = FakeWorker::start().await;
    let tenants = config_file(&(table("alice", "ka", limits) + &table("bob", "kb", limits)));
    let toml = format!(
        "worker = [\"http://{}\"]\n[auth]\ntenants_file = {:?}\n[store]\nurl = \"redis://{user}127.0.0.1:{}\"\ngateways = 2",
        worker.addr(),
        tenants.path(),
        redis.port,
    );
    let mut gateways = Vec::new();
    for _ in 0..2 {
        gateways.push(Gateway::builder().config(&toml).start().await);
    }
    for gateway in &gateways {
        eventually!(gateway.readyz().await == 200);
    }
    Some(Setup { gateways, worker, redis, _tenants: tenants })
}

async fn ask(addr: SocketAddr, key: &str) -> Response {
    let mut client = Client::connect(addr).await;
    client.request("POST", CHAT, &[("authorization", &format!("Bearer {key}"))], &chat("hi")).await;
    client.response().await
}

impl Setup {
    async fn wait_for(&self, up: f64) {
        for gateway in &self.gateways {
            eventually!(gateway.metrics().await.sum("keyway_store_up", &[]) == up, "the store is {up}");
        }
    }

    /// How many of so many requests, by each gateway in turn, are let in; none hangs.
    async fn let_in(&self, key: &str, requests: usize) -> usize {
        let mut let_in = 0;
        for number in 0..requests {
            let begun = Instant::now();
            let status = ask(self.gateways[number % 2].addr, key).await.status();
            assert!(begun.elapsed() < HANG && [200, 429].contains(&status), "{status}");
            let_in += usize::from(status == 200);
        }
        let_in
    }
}

#[tokio::test]
async fn two_gateways_let_in_as_many_as_one_and_go_by_halves_without_the_store() {
    // Ten may come at once. Nothing to speak of comes in a test's time.
    let Some(mut setup) = setup("requests_per_minute = 60.0", &[], "").await else { return };
    setup.wait_for(1.0).await;
    eventually!(setup.gateways[0].metrics().await.sum("keyway_store_gateways", &[]) == 2.0);
    let begun = Instant::now();
    let let_in = setup.let_in("ka", 30).await;
    let may_come = 10 + begun.elapsed().as_secs() as usize + 1;
    assert!((10..=may_come).contains(&let_in), "{let_in} of {may_come}");
    let refused = ask(setup.gateways[0].addr, "ka").await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.header("x-ratelimit-limit-requests"), Some("60"), "of the whole limit");

    setup.redis.process.kill();
    setup.wait_for(0.0).await;
    let begun = Instant::now();
    let let_in = setup.let_in("kb", 30).await;
    let may_come = 2 * (10 + begun.elapsed().as_secs() as usize + 1);
    assert!((8..=may_come).contains(&let_in), "{let_in} of {may_come}");
    let refused = |metrics: keyway_tests::Metrics| metrics.sum("keyway_store_refusals_total", &[]);
    eventually!(refused(setup.gateways[0].metrics().await) > 0.0);
    setup.gateways[0].process.announced("is away").await;
    let log = setup.gateways[0].process.log();
    assert_eq!(log.iter().filter(|line| line.contains("is away")).count(), 1, "said once: {log:?}");

    let port = setup.redis.port;
    setup.redis = Redis::start(port, &[]).await.expect("as before");
    setup.wait_for(1.0).await;
    assert!(ask(setup.gateways[1].addr, "kb").await.status() != 503);
}

#[tokio::test]
async fn slots_are_shared_and_those_of_a_dead_gateway_come_back() {
    let Some(mut setup) = setup("max_in_flight = 3", &[], "").await else { return };
    setup.wait_for(1.0).await;
    setup.worker.hang();
    let mut held = Vec::new();
    let addrs: Vec<SocketAddr> = setup.gateways.iter().map(|gateway| gateway.addr).collect();
    for number in 0..3 {
        let addr = addrs[number % 2];
        held.push(tokio::spawn(async move { ask(addr, "ka").await }));
        eventually!(setup.worker.request_count() == number + 1);
    }
    for gateway in &setup.gateways {
        let refused = ask(gateway.addr, "ka").await;
        assert_eq!((refused.status(), refused.header("retry-after")), (429, Some("1")));
    }
    setup.gateways[0].process.kill();
    setup.worker.answer();
    let survivor = setup.gateways[1].addr;
    eventually!(ask(survivor, "ka").await.status() == 200, "slots of the dead come back");
    for request in &held {
        request.abort();
    }
}

#[tokio::test]
async fn what_cannot_keep_limits_is_named_with_what_to_do() {
    for (more, user, word) in [
        (["--requirepass", "right"].as_slice(), ":canary@", "refuses the user or password"),
        (["--cluster-enabled", "yes"].as_slice(), "", "it is a cluster"),
    ] {
        let Some(setup) = setup("requests_per_minute = 60.0", more, user).await else { return };
        setup.wait_for(0.0).await;
        let log = || setup.gateways[0].process.log().join("\n");
        eventually!(log().contains(word), "{}", log());
        assert!(!log().contains("canary"), "{}", log());
        assert_eq!(ask(setup.gateways[0].addr, "ka").await.status(), 200, "served by its part");
    }
}

#[tokio::test]
async fn a_store_with_a_user_a_password_and_a_database_is_used() {
    let acl = ["--user", "gate", "on", ">right", "~keyway:*", "+@all"];
    let Some(setup) =
        setup("requests_per_minute = 60.0\ntokens_per_minute = 600.0", &acl, "gate:right@").await
    else {
        return;
    };
    setup.wait_for(1.0).await;
    assert_eq!(ask(setup.gateways[0].addr, "ka").await.status(), 200);
}
