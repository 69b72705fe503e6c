//! Hazard: a restart refuses connections, resets those that wait, or cuts what is open.

use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use keyway_tests::bins::bin;
use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::{CHAT, DONE, chat, chat_stream, delta};
use keyway_tests::ports::free_addr;
use keyway_tests::process::Process;
use keyway_tests::{Client, Exchange, FakeWorker, Gateway, eventually, get, post, tools};
use tokio::task::JoinHandle;

/// Clients that ask one question after the other; each panics when a connection is refused or an answer
/// missing.
struct Load {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<u64>>,
}

impl Load {
    fn on(addr: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let clients = (0..8).map(|i| tokio::spawn(ask(addr, i % 2 == 0, Arc::clone(&stop)))).collect();
        Self { stop, clients }
    }

    async fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let mut answers = 0;
        for client in self.clients {
            answers += client.await.expect("no client was refused or cut");
        }
        answers
    }
}

/// On one connection for as long as the gateway keeps it, or on a new one each time.
async fn ask(addr: SocketAddr, keeps: bool, stop: Arc<AtomicBool>) -> u64 {
    let (mut client, mut answers) = (Client::connect(addr).await, 0);
    while !stop.load(Ordering::Relaxed) {
        client.post(CHAT, &chat("under load")).await;
        let answer = client.response().await;
        assert_eq!(answer.status(), 200);
        answers += 1;
        if !keeps || answer.header("connection") == Some("close") {
            client = Client::connect(addr).await;
        }
    }
    answers
}

async fn gateway(worker: &FakeWorker, listen: &str, socket: &str) -> Gateway {
    let args = ["--handover-socket", socket];
    Gateway::builder().worker(worker.addr()).listen(listen).args(&args).start().await
}

#[tokio::test]
async fn restarts_under_load_refuse_nobody_and_cut_nothing() {
    let worker = FakeWorker::start().await;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("handover").display().to_string();
    let mut now = gateway(&worker, "127.0.0.1:0", &socket).await;
    now.wait_ready(1).await;
    let addr = now.addr;
    for round in 0..3 {
        worker.manual();
        let mut open = Vec::new();
        for protocol in PROTOCOLS {
            let mut exchange = Exchange::post(protocol, addr, CHAT, &chat_stream("hi")).await;
            let mut call = worker.call().await;
            call.begin_stream().await;
            call.say("one").await;
            assert_eq!(exchange.status().await, 200);
            exchange.next_event().await.event();
            open.push((exchange, call));
        }
        worker.answer();
        let load = Load::on(addr);
        // It asks for any port and gets the old one's.
        let next = gateway(&worker, "127.0.0.1:0", &socket).await;
        assert_eq!((next.addr, next.admin), (now.addr, now.admin), "round {round}");
        now.process.announced("a successor has taken over").await;
        eventually!(next.metrics().await.sum("keyway_requests_total", &[]) > 100.0, "the new one serves");
        for (mut exchange, mut call) in open {
            call.say("two").await;
            assert_eq!(exchange.next_event().await.event(), delta("two").to_string());
            call.done().await;
            assert_eq!(exchange.next_event().await.event(), DONE);
        }
        assert_eq!(now.process.ended().await.code(), Some(0));
        assert!(load.end().await > 100);
        now = next;
    }
}

#[tokio::test]
async fn operators_reach_the_successor_alone_while_the_old_one_still_streams() {
    let worker = FakeWorker::start().await;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("handover").display().to_string();
    let mut old = gateway(&worker, "127.0.0.1:0", &socket).await;
    old.wait_ready(1).await;
    let answered = async |gateway: &Gateway| gateway.metrics().await.sum("keyway_requests_total", &[]);
    assert_eq!(post(old.addr, CHAT, &chat("hi")).await.status(), 200);
    eventually!(answered(&old).await == 1.0);
    worker.manual();
    let mut open = Exchange::post(PROTOCOLS[0], old.addr, CHAT, &chat_stream("hi")).await;
    let mut call = worker.call().await;
    call.begin_stream().await;
    assert_eq!(open.status().await, 200);
    let new = gateway(&worker, "127.0.0.1:0", &socket).await;
    old.process.announced("a successor has taken over").await;
    assert_eq!(get(new.addr, "/v1/models").await.status(), 200);
    // The old one has answered a request and streams; nobody is shown that any more.
    for _ in 0..50 {
        let metrics = new.metrics().await;
        assert_eq!(metrics.sum("keyway_requests_total", &[("endpoint", "chat")]), 0.0);
        assert_eq!(metrics.sum("keyway_requests_in_flight", &[]), 0.0);
    }
    call.say("one").await;
    assert_eq!(open.next_event().await.event(), delta("one").to_string());
    call.done().await;
    assert_eq!(open.next_event().await.event(), DONE);
    assert_eq!(old.process.ended().await.code(), Some(0));
}

#[tokio::test]
async fn tenants_find_their_caches_again_after_a_restart() {
    // Of `kw-reload`.
    let sha256 = "40245376893372379e6cc53160bf3e295e9d7a14bdad8e8ca383188084bbe79b";
    let worker = FakeWorker::start().await;
    let dir = tempfile::tempdir().unwrap();
    let (socket, tenants) = (dir.path().join("handover"), dir.path().join("tenants.toml"));
    std::fs::write(&tenants, format!("[[tenant]]\nname = \"alice\"\nkey_sha256 = [\"{sha256}\"]\n")).unwrap();
    let toml = format!(
        "worker = [\"http://{}\"]\nhandover_socket = {socket:?}\n[auth]\ntenants_file = {tenants:?}\n",
        worker.addr()
    );
    let ask = async |gateway: &Gateway| {
        let mut client = Client::connect(gateway.addr).await;
        client.request("POST", CHAT, &[("authorization", "Bearer kw-reload")], &chat("hi")).await;
        assert_eq!(client.response().await.status(), 200);
    };
    let mut old = Gateway::builder().config(&toml).start().await;
    eventually!(old.readyz().await == 200);
    ask(&old).await;
    let new = Gateway::builder().config(&toml).start().await;
    assert_eq!(old.process.ended().await.code(), Some(0));
    ask(&new).await;
    // The salt follows from the tenant's name and the secret of the hashes, which nobody wrote into a file.
    let bodies: Vec<_> = worker.requests().iter().map(|request| request.body.clone()).collect();
    assert_eq!(bodies[0], bodies[1], "the same salt in the same body");
    assert!(String::from_utf8_lossy(&bodies[0]).contains("cache_salt"));
}

#[tokio::test]
async fn a_successor_that_finds_no_worker_leaves_the_old_one_in_place() {
    let worker = FakeWorker::start().await;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("handover").display().to_string();
    let old = gateway(&worker, "127.0.0.1:0", &socket).await;
    old.wait_ready(1).await;
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = Command::new(bin("keyway"));
    command.args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--handover-socket", &socket]);
    command.args(["--worker", &format!("http://{nobody}")]);
    let mut new = Process::spawn("keyway", &mut command);
    assert_eq!(new.ended().await.code(), Some(1));
    eventually!(new.log().join("\n").contains("the one before it goes on"), "{:?}", new.log());
    old.process.announced("the successor did not take over").await;
    assert_eq!(post(old.addr, CHAT, &chat("still there")).await.status(), 200);
}

#[tokio::test]
async fn sigusr2_replaces_the_process_by_one_of_the_same_arguments() {
    let worker = FakeWorker::start().await;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("handover").display().to_string();
    let mut old = gateway(&worker, "127.0.0.1:0", &socket).await;
    old.wait_ready(1).await;
    let load = Load::on(old.addr);
    old.process.signal("USR2");
    assert_eq!(old.process.ended().await.code(), Some(0));
    assert!(load.end().await > 0);
    assert_eq!(post(old.addr, CHAT, &chat("by the new one")).await.status(), 200);
    // Nobody's child any more, so it is ended over its admin listener.
    let mut operator = Client::connect(old.admin).await;
    operator.request("POST", "/drain", &[("content-type", "application/json")], b"").await;
    assert_eq!(operator.response().await.status(), 202);
    eventually!(tokio::net::TcpStream::connect(old.addr).await.is_err());
}

#[tokio::test]
async fn sockets_of_a_service_manager_are_taken() {
    let Some(activate) = tools::tool("systemd-socket-activate") else { return };
    let worker = FakeWorker::start().await;
    let (clients, admin) = (free_addr(), free_addr());
    let mut command = Command::new(activate);
    command.args(["-l", &clients.to_string(), "-l", &admin.to_string(), "-E", "RUST_LOG=info"]);
    // It is told other addresses: those of the sockets hold.
    command.arg(bin("keyway")).args(["--listen", "127.0.0.1:1", "--admin-listen", "127.0.0.1:1"]);
    command.args(["--worker", &format!("http://{}", worker.addr())]);
    let process = Process::spawn("systemd-socket-activate", &mut command);
    process.announced("Listening on").await;
    // The process is started by this very connection, which must not be lost.
    eventually!(tokio::net::TcpStream::connect(admin).await.is_ok());
    eventually!(get(admin, "/readyz").await.status() == 200);
    assert_eq!(post(clients, CHAT, &chat("hi")).await.status(), 200);
}
