//! Hazard: a chain of proxies of which one takes for a request what another took for a part of one. nginx and
//! HAProxy stand before the gateway and behind it; what the last server saw is what everybody before it let
//! through.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use futures_util::StreamExt;
use keyway_tests::eventually::patient;
use keyway_tests::process::Process;
use keyway_tests::tools::tool;
use keyway_tests::{FakeWorker, Gateway, eventually};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use crate::ambiguous::{HIDDEN, ambiguous, odd};

/// Requests at once: connections between proxies carry one client's after another's.
const AT_ONCE: usize = 8;

/// A gateway that soon gives up on the rest of a request.
const IMPATIENT: &str = "[limits]\nbody_idle_ms = 500\nheader_read_ms = 2000\n";

/// Which proxy.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Nginx,
    Haproxy,
}

/// A proxy of others' making, on a socket file: it takes no port that the system has not chosen.
#[derive(Debug)]
struct Proxy {
    process: Process,
    socket: PathBuf,
    _dir: TempDir,
}

impl Proxy {
    /// Starts it before a server; `None` where it is not installed.
    async fn start(kind: Kind, server: SocketAddr) -> Option<Self> {
        let dir = TempDir::new().expect("a folder");
        let (socket, file) = (dir.path().join("socket"), dir.path().join("proxy.conf"));
        let (name, configuration, args) = match kind {
            Kind::Nginx => ("nginx", nginx(dir.path(), &socket, server), ["-e", "stderr", "-c"].as_slice()),
            Kind::Haproxy => ("haproxy", haproxy(&socket, server), ["-db", "-f"].as_slice()),
        };
        std::fs::write(&file, configuration).expect("write");
        let process = Process::spawn(name, Command::new(tool(name)?).args(args).arg(&file));
        eventually!(UnixStream::connect(&socket).await.is_ok(), "{kind:?} listens");
        Some(Self { process, socket, _dir: dir })
    }

    async fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.socket).await.expect("connect")
    }

    /// What it took for a request, apart from probes: the target, and the status of the server behind it if
    /// it asked that.
    fn took(&self) -> Vec<(String, Option<String>)> {
        let lines = self.process.log();
        let took = lines.iter().filter_map(|line| {
            let mut parts = line.strip_prefix("took ")?.split(' ');
            let (target, status, server) = (parts.next()?, parts.next()?, parts.next()?);
            let target = target.strip_prefix("http://k").unwrap_or(target);
            let asked = !["-", "<NOSRV>", ""].contains(&server);
            Some((target.to_owned(), asked.then(|| status.to_owned())))
        });
        took.filter(|(target, _)| !is_probe(target)).collect()
    }

    /// A port before its socket.
    async fn on_a_port(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let (addr, socket) = (listener.local_addr().expect("bound"), self.socket.clone());
        tokio::spawn(async move {
            while let Ok((mut front, _)) = listener.accept().await {
                let mut back = UnixStream::connect(&socket).await.expect("connect");
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut front, &mut back).await });
            }
        });
        addr
    }
}

fn is_probe(target: &str) -> bool {
    ["/health", "/v1/models", "/metrics", "/v1/loads"].iter().any(|probe| target.starts_with(probe))
}

fn nginx(dir: &Path, socket: &Path, server: SocketAddr) -> String {
    let (dir, socket) = (dir.display(), socket.display());
    let folders: Vec<String> = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|kind| format!("{kind}_temp_path {dir}/{kind};"))
        .collect();
    let folders = folders.join(" ");
    format!(
        "daemon off; master_process off; pid {dir}/pid;\nevents {{}}\nhttp {{\n{folders}
         log_format took 'took $request_uri $status $upstream_status';
         access_log /dev/stdout took;
         client_body_timeout 1s; client_header_timeout 1s; keepalive_timeout 1s;
         upstream behind {{ server {server}; keepalive 4; }}
         server {{
             listen unix:{socket};
             location / {{
                 proxy_pass http://behind; proxy_http_version 1.1; proxy_set_header Connection '';
                 proxy_request_buffering off; proxy_buffering off; proxy_next_upstream off;
             }}
         }}\n}}\n"
    )
}

fn haproxy(socket: &Path, server: SocketAddr) -> String {
    // One thread: where two have a line to write at once, it drops one (`fd_write_frag_line` in its
    // `src/fd.c`).
    format!(
        "global\n nbthread 1\n log stdout format raw local0\n
         defaults\n mode http\n log global\n log-format \"took %HU %ST %s\"\n retries 0\n option dontlognull
         timeout connect 5s\n timeout client 1s\n timeout server 20s\n timeout http-request 1s
         frontend before\n bind unix@{}\n default_backend behind
         backend behind\n http-reuse always\n server behind {server}\n",
        socket.display()
    )
}

/// All requests of the corpus, told apart by their targets, each with what hides behind it.
fn corpus() -> Vec<String> {
    let all = [odd(), ambiguous()].concat();
    let marked = |(n, request): (usize, &String)| {
        format!("{request}{HIDDEN}")
            .replace("/chat/completions", &format!("/chat/completions?n={n}"))
            .replace("/v1/smuggled", &format!("/v1/smuggled?n={n}"))
    };
    all.iter().enumerate().map(marked).collect()
}

/// Sends bytes, and counts the answers of 200 until the connection's end.
async fn answers(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &str) -> usize {
    let _ = stream.write_all(request.as_bytes()).await; // it may be closed meanwhile
    let mut answer = Vec::new();
    let _ = patient("the end of the connection", stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).matches("HTTP/1.1 200 ").count()
}

/// How often each.
fn counted(targets: impl Iterator<Item = String>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for target in targets {
        *counts.entry(target).or_default() += 1;
    }
    counts
}

fn seen(worker: &FakeWorker) -> BTreeMap<String, usize> {
    counted(worker.requests().iter().map(|request| request.target().1.to_owned()))
}

/// Of each request of the corpus, how many the worker saw.
fn seen_of_each(worker: &FakeWorker, requests: usize) -> Vec<usize> {
    let all = seen(worker);
    let of = |n: usize| {
        let own = |target: &str| target.rsplit_once("?n=").is_some_and(|(_, own)| own == n.to_string());
        all.iter().filter(|(target, _)| own(target)).map(|(_, count)| count).sum()
    };
    (0..requests).map(of).collect()
}

/// What a proxy let through, as the server behind it answered: all that the corpus' requests can lead to is
/// 200 or refused.
fn let_through(proxy: &Proxy) -> BTreeMap<String, usize> {
    let took = proxy.took();
    counted(took.into_iter().filter(|(_, status)| status.as_deref() == Some("200")).map(|(target, _)| target))
}

/// Wants the worker to have seen what the proxy let through, once all of that is written down.
async fn agree(proxy: &Proxy, worker: &FakeWorker) {
    let differing = || {
        let (proxy, worker) = (let_through(proxy), seen(worker));
        let all: BTreeSet<&String> = proxy.keys().chain(worker.keys()).collect();
        let told =
            |target: &&String| ((*target).clone(), proxy.get(*target).copied(), worker.get(*target).copied());
        all.iter().map(told).filter(|(_, proxy, worker)| proxy != worker).collect::<Vec<_>>()
    };
    eventually!(differing().is_empty(), "no difference; let through, and seen: {:?}", differing());
}

/// Wants the worker to have seen the odd requests, and of the corpus no more than clients got answers.
fn seen_as_answered(worker: &FakeWorker, answered: &[usize]) {
    let of_each = seen_of_each(worker, answered.len());
    assert_eq!(of_each, answered, "what the worker saw, and what the clients were answered");
    assert_eq!(seen(worker).values().sum::<usize>(), answered.iter().sum::<usize>(), "none without a number");
    let odd = odd().len();
    let whole = of_each[..odd].iter().filter(|&&count| count > 0).count();
    assert!(whole * 2 > odd, "{whole} of {odd} odd requests came through: the chain is no wall");
}

async fn before_the_gateway(kind: Kind) {
    let worker = FakeWorker::start().await;
    let gateway = Gateway::builder().worker(worker.addr()).config(IMPATIENT).start().await;
    gateway.wait_ready(1).await;
    let Some(proxy) = Proxy::start(kind, gateway.addr).await else { return };
    let corpus = corpus();
    let answered = futures_util::stream::iter(&corpus)
        .map(async |request| answers(proxy.connect().await, request).await)
        .buffered(AT_ONCE);
    let answered: Vec<usize> = answered.collect().await;
    agree(&proxy, &worker).await;
    seen_as_answered(&worker, &answered);
    gateway.idle().await;
}

async fn behind_the_gateway(kind: Kind) {
    let worker = FakeWorker::start().await;
    let Some(proxy) = Proxy::start(kind, worker.addr()).await else { return };
    let gateway = Gateway::builder().worker(proxy.on_a_port().await).config(IMPATIENT).start().await;
    gateway.wait_ready(1).await;
    let corpus = corpus();
    let answered = futures_util::stream::iter(&corpus)
        .map(async |request| answers(TcpStream::connect(gateway.addr).await.expect("connect"), request).await)
        .buffered(AT_ONCE);
    let answered: Vec<usize> = answered.collect().await;
    gateway.idle().await;
    agree(&proxy, &worker).await;
    // What the gateway sends is clear to others: they take for a request what it sent as one, and refuse
    // none.
    let let_through = gateway.metrics().await.sum("keyway_requests_total", &[("outcome", "complete")]);
    assert_eq!(proxy.took().len() as f64, let_through, "{:?}", proxy.took());
    seen_as_answered(&worker, &answered);
}

#[tokio::test]
async fn behind_nginx_the_worker_sees_what_nginx_let_through() {
    before_the_gateway(Kind::Nginx).await;
}

#[tokio::test]
async fn behind_haproxy_the_worker_sees_what_haproxy_let_through() {
    before_the_gateway(Kind::Haproxy).await;
}

#[tokio::test]
async fn nginx_before_a_worker_sees_what_the_gateway_let_through() {
    behind_the_gateway(Kind::Nginx).await;
}

#[tokio::test]
async fn haproxy_before_a_worker_sees_what_the_gateway_let_through() {
    behind_the_gateway(Kind::Haproxy).await;
}
