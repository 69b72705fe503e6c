//! Hazard: requests wait for the log, whose reader has stopped or whose disk is full; what is lost of it is
//! told by nobody.

use std::fs::OpenOptions;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use keyway_tests::bins::bin;
use keyway_tests::{Client, eventually, get};
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

fn free_addr() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
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
    let page = get(admin, "/metrics").await.text();
    let line = page.lines().find_map(|line| line.strip_prefix("keyway_log_lines_lost_total "));
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
