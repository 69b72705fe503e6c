//! Hazard: requests wait for the log, whose reader has stopped or whose disk is full; what is lost of it is
//! told by nobody.

use std::fs::OpenOptions;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use keyway_tests::bins::bin;
use keyway_tests::ports::free_addr;
use keyway_tests::{Client, eventually, get};
use keyway_wire::zmtp::{SocketType, greeting, message, ready};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const REQUESTS: usize = 4_000;
/// Such lines are more than a pipe and the queue before it have room for: 7 KB each.
const PATH_BYTES: usize = 7_000;

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A gateway that logs there, once it listens; its addresses for clients and operators.
async fn gateway(stderr: Stdio) -> (Killed, SocketAddr, SocketAddr) {
    let (addr, admin) = (free_addr(), free_addr());
    let mut command = Command::new(bin("keyway"));
    command.args(["--listen", &addr.to_string(), "--admin-listen", &admin.to_string()]);
    command
        .args(["--worker", "http://127.0.0.1:1"])
        .env("RUST_LOG", "info")
        .stdin(Stdio::null())
        .stderr(stderr);
    let process = Killed(command.spawn().unwrap());
    for addr in [addr, admin] {
        eventually!(TcpStream::connect(addr).await.is_ok(), "the gateway to listen");
    }
    (process, addr, admin)
}

async fn lost(admin: SocketAddr) -> u64 {
    counted(admin, "keyway_log_lines_lost_total ").await
}

async fn counted(addr: SocketAddr, series: &str) -> u64 {
    let page = get(addr, "/metrics").await.text();
    let line = page.lines().find_map(|line| line.strip_prefix(series));
    line.unwrap_or_else(|| panic!("no count in {page}")).parse().unwrap()
}

#[tokio::test]
async fn a_log_that_nobody_reads_or_that_has_no_room_holds_up_nobody_and_says_what_is_lost() {
    let (reader, pipe) = std::io::pipe().unwrap();
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    for (what, stderr, least) in [
        ("a pipe", Stdio::from(OwnedFd::from(pipe)), 500),
        ("a full disk", Stdio::from(OwnedFd::from(full)), REQUESTS as u64),
    ] {
        let (_process, addr, admin) = gateway(stderr).await;
        let mut client = Client::connect(addr).await;
        for _ in 0..REQUESTS {
            client.request("GET", &format!("/{}", "x".repeat(PATH_BYTES)), &[], b"").await;
            assert_eq!(client.response().await.status(), 404, "{what}");
        }
        eventually!(lost(admin).await >= least, "{what}: lines to be counted as lost");
        assert_eq!(get(admin, "/livez").await.status(), 200, "{what}");
    }
    drop(reader);
}

/// Each makes a line, and all together more than a pipe and the queue before it have room for.
const NONSENSE: usize = 60_000;

#[tokio::test]
async fn so_it_is_with_a_worker_s() {
    let (reader, pipe) = std::io::pipe().unwrap();
    let (addr, events, replay) = (free_addr(), free_addr(), free_addr());
    let (events, replay_url) = (format!("tcp://{events}"), format!("tcp://{replay}"));
    let mut command = Command::new(bin("keyway-worker"));
    command
        .args(["--listen", &addr.to_string(), "--kv-events", &events, "--kv-replay", &replay_url])
        .env("RUST_LOG", "debug")
        .stdin(Stdio::null())
        .stderr(OwnedFd::from(pipe));
    let mut process = Killed(command.spawn().unwrap());
    eventually!(TcpStream::connect(addr).await.is_ok(), "the worker to listen");
    eventually!(TcpStream::connect(replay).await.is_ok(), "its events' replays to be served");
    // Without the pipe's end in this process nobody could keep it open.
    drop(command);
    let mut asker = TcpStream::connect(replay).await.unwrap();
    asker.write_all(&greeting()).await.unwrap();
    asker.write_all(&ready(SocketType::Dealer)).await.unwrap();
    asker.write_all(&message(&["", "not a request"]).repeat(NONSENSE)).await.unwrap();
    eventually!(
        counted(addr, "keyway_worker_log_lines_lost_total ").await > 0,
        "lines to be counted as lost"
    );
    let body = serde_json::json!({"prompt": "Hello", "max_tokens": 4}).to_string();
    assert_eq!(keyway_tests::post(addr, "/v1/completions", body.as_bytes()).await.status(), 200);
    // Nor does it hold up its end.
    let pid = process.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    eventually!(process.0.try_wait().unwrap().is_some_and(|status| status.success()), "the worker to end");
    drop(reader);
}
