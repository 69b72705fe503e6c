//! Hazard: a route is open to whom it must not be, because nobody thought of it when it was added. And a
//! worker that operators add lets the gateway reach what they may not.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::FutureExt as _;
use keyway_tests::bins::workspace_root;
use keyway_tests::cluster::config_file;
use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{Client, FakeWorker, Gateway, eventually, post};
use keyway_wire::headers;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

const TENANT: &str = "kw-access-tenant";
const OPERATOR: &str = "kw-access-operator";

/// Who asks, in the order of the tables' columns.
const WHO: [Option<&str>; 4] = [None, Some("kw-access-nobody"), Some(TENANT), Some(OPERATOR)];

/// What each gets, on the listener that the table is of.
type Row = (&'static str, &'static str, [u16; 4]);

/// A tenant's key opens what goes to workers; nothing else does.
const OF_TENANTS: [u16; 4] = [401, 401, 200, 401];

const CLIENTS: [Row; 28] = [
    ("GET", "/health", [200; 4]),
    ("GET", "/v1/models", OF_TENANTS),
    ("GET", "/v1/models/fake-model", OF_TENANTS),
    ("POST", "/v1/chat/completions", OF_TENANTS),
    ("POST", "/v1/messages", OF_TENANTS),
    ("POST", "/v1/", OF_TENANTS),
    ("PUT", "/v1/anything", OF_TENANTS),
    ("POST", "/tokenize", OF_TENANTS),
    ("POST", "/detokenize", OF_TENANTS),
    ("POST", "/rerank", OF_TENANTS),
    ("POST", "/v2/rerank", OF_TENANTS),
    ("POST", "/score", OF_TENANTS),
    ("POST", "/classify", OF_TENANTS),
    ("POST", "/pooling", OF_TENANTS),
    ("POST", "/generate", OF_TENANTS),
    ("POST", "/inference/v1/generate", OF_TENANTS),
    // Beyond the gateway's own answer, nothing says that it is there.
    ("POST", "/health", [404; 4]),
    ("GET", "/", [401, 401, 404, 401]),
    ("GET", "/nothing", [401, 401, 404, 401]),
    ("GET", "/metrics", [401, 401, 404, 401]),
    ("GET", "/workers", [401, 401, 404, 401]),
    ("POST", "/workers", [401, 401, 404, 401]),
    ("POST", "/drain", [401, 401, 404, 401]),
    ("POST", "/reload", [401, 401, 404, 401]),
    ("GET", "/v1/../metrics", [401, 401, 404, 401]),
    ("POST", "/v1/%2e%2e/metrics", [401, 401, 404, 401]),
    ("GET", "/V1/models", [401, 401, 404, 401]),
    ("GET", "//v1/models", [401, 401, 404, 401]),
];

/// The operators' token opens what is theirs; nothing else does.
const fn of_operators(status: u16) -> [u16; 4] {
    [401, 401, 401, status]
}

const OPERATORS: [Row; 30] = [
    ("GET", "/", [200; 4]),
    ("GET", "/livez", [200; 4]),
    ("GET", "/readyz", [200; 4]),
    ("HEAD", "/readyz", [200; 4]),
    ("POST", "/livez", [404; 4]),
    ("GET", "/help", of_operators(200)),
    ("GET", "/metrics", of_operators(200)),
    ("GET", "/workers", of_operators(200)),
    ("GET", "/scale", of_operators(200)),
    ("GET", "/history", of_operators(200)),
    ("GET", "/mishaps", of_operators(200)),
    ("GET", "/load", of_operators(200)),
    ("GET", "/usage", of_operators(200)),
    ("POST", "/usage", of_operators(404)),
    ("GET", "/index", of_operators(200)),
    ("POST", "/explain", of_operators(200)),
    ("GET", "/explain", of_operators(404)),
    ("POST", "/workers", of_operators(400)),
    ("DELETE", "/workers/127.0.0.1:1", of_operators(404)),
    ("POST", "/workers/127.0.0.1:1/drain", of_operators(404)),
    ("POST", "/workers/127.0.0.1:1/undrain", of_operators(404)),
    ("PUT", "/workers", of_operators(404)),
    ("POST", "/reload", of_operators(200)),
    ("GET", "/reload", of_operators(404)),
    ("GET", "/drain", of_operators(404)),
    ("POST", "/metrics", of_operators(404)),
    ("GET", "/livez/", of_operators(404)),
    ("GET", "/nothing", of_operators(404)),
    ("POST", "/v1/chat/completions", of_operators(404)),
    // The last one, as it ends the gateway.
    ("POST", "/drain", of_operators(202)),
];

/// Paths that stand in the code of these files, their tests left out.
fn routes(files: &[&str]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for file in files {
        let text = fs::read_to_string(workspace_root().join("gateway/src").join(file)).expect(file);
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        for quoted in lines.flat_map(|line| line.split('"').skip(1).step_by(2)) {
            if quoted.starts_with('/') {
                found.insert(quoted.to_owned());
            }
        }
    }
    assert!(found.len() > 5, "{found:?}");
    found
}

struct Guarded {
    gateway: Gateway,
    _files: [tempfile::NamedTempFile; 2],
    _folder: tempfile::TempDir,
    _worker: FakeWorker,
}

async fn guarded() -> Guarded {
    // Of `kw-access-tenant`.
    let sha256 = "48f8332c1eb2dce248e8fd558e4a139b9109121803aa8ea4bbd0d7cbc507be7c";
    let tenants = config_file(&format!("[[tenant]]\nname = \"alice\"\nkey_sha256 = [\"{sha256}\"]\n"));
    let (token, worker) = (config_file(OPERATOR), FakeWorker::start().await);
    let folder = tempfile::tempdir().expect("a folder");
    let toml = format!(
        "worker = [\"http://{}\"]\n[auth]\ntenants_file = {:?}\nadmin_token_file = {:?}\n[usage]\nfile = {:?}\n",
        worker.addr(),
        tenants.path(),
        token.path(),
        folder.path().join("usage")
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    eventually!(gateway.readyz().await == 200);
    Guarded { gateway, _files: [tenants, token], _folder: folder, _worker: worker }
}

/// The status that somebody gets who shows a key so, or none.
async fn asked(addr: SocketAddr, (method, path): (&str, &str), key: Option<(&str, String)>) -> u16 {
    let mut fields = vec![("content-type", "application/json")];
    if let Some((name, value)) = &key {
        fields.push((name, value));
    }
    let body = match (method, path) {
        ("GET" | "HEAD", _) => Vec::new(),
        (_, "/workers") => b"{}".to_vec(),
        _ => chat("hi"),
    };
    let mut client = Client::connect(addr).await;
    client.request(method, path, &fields, &body).await;
    client.head().await.status()
}

async fn check(addr: SocketAddr, table: &[Row]) {
    let mut wrong = Vec::new();
    for &(method, path, expected) in table {
        for (who, expected) in WHO.into_iter().zip(expected) {
            let key = who.map(|key| ("authorization", format!("Bearer {key}")));
            let got = asked(addr, (method, path), key).await;
            if got != expected {
                wrong.push(format!("{method} {path} with {who:?}: {got} instead of {expected}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test]
async fn every_route_opens_for_whom_it_is_meant_and_for_nobody_else() {
    let listed = |table: &[Row]| table.iter().map(|row| row.1.to_owned()).collect::<BTreeSet<_>>();
    for (files, table) in [
        (&["edge/stack.rs", "proxy/engine_paths.rs"][..], &CLIENTS[..]),
        (&["ops/admin.rs", "ops/admin/commands.rs", "edge/admin_guard.rs"], &OPERATORS),
    ] {
        let missing: Vec<_> = routes(files).difference(&listed(table)).cloned().collect();
        assert!(missing.is_empty(), "routes of {files:?} without a row in this file's tables: {missing:?}");
    }
    let guarded = guarded().await;
    let gateway = &guarded.gateway;
    check(gateway.addr, &CLIENTS).await;
    for (who, status) in [(TENANT, 200), (OPERATOR, 401)] {
        // The other header that clients put their keys in.
        let key = Some(("x-api-key", who.to_owned()));
        assert_eq!(asked(gateway.addr, ("POST", CHAT), key).await, status, "{who}");
    }
    let key = Some(("x-api-key", OPERATOR.to_owned()));
    assert_eq!(asked(gateway.admin, ("GET", "/metrics"), key).await, 401);
    check(gateway.admin, &OPERATORS).await;
}

#[tokio::test]
async fn who_is_not_allowed_cannot_be_added_however_the_address_is_written() {
    let toml =
        "[discovery]\nadmin_allow = [\"10.1.0.0/16\", \"fd00:1::/32\", \"w.example\", \"*.pods.example\"]\n";
    let gateway = Gateway::builder().config(toml).start().await;
    let add = async |worker: String| {
        let mut client = Client::connect(gateway.admin).await;
        client.request("POST", "/workers", &[("content-type", "application/json")], worker.as_bytes()).await;
        client.response().await.status()
    };
    for url in [
        // Where clouds tell a machine its secrets.
        "http://169.254.169.254:80",
        "http://[fd00:ec2::254]:80",
        "http://metadata.google.internal:80",
        "http://100.100.100.200:80",
        // The machine itself, by all its names.
        "http://127.0.0.1:80",
        "http://127.1:80",
        "http://localhost:80",
        "http://[::1]:80",
        "http://[::]:80",
        "http://0.0.0.0:80",
        "http://2130706433:80",
        "http://0x7f000001:80",
        "http://017700000001:80",
        "http://[::ffff:127.0.0.1]:80",
        "http://[fe80::1]:80",
        // What looks like an allowed one.
        "http://[::ffff:10.1.0.1]:80",
        "http://10.1.0.1@169.254.169.254:80",
        "http://10.1.0.1:x@169.254.169.254:80",
        "http://10.1.0.1.evil.example:80",
        "http://10.2.0.1:80",
        "http://w.example.evil.example:80",
        "http://w.example.:80",
        "http://evilpods.example:80",
        "http://pods.example:80",
        "http://169.254.169.254#@w.example:80",
        "http://169.254.169.254\\\\@w.example:80",
        "file:///etc/passwd",
        "unix:/run/docker.sock",
    ] {
        let status = add(format!("{{\"url\": \"{url}\"}}")).await;
        assert!(matches!(status, 400 | 403), "{url}: {status}");
    }
    // Whoever is allowed may not name another place for its events.
    for events in
        ["tcp://169.254.169.254:5557", "tcp://127.0.0.1:5557", "ipc:///run/x", "tcp://10.1.0.1.nip:5557"]
    {
        for field in ["kv_events", "kv_replay"] {
            let other = if field == "kv_replay" { ", \"kv_events\": \"tcp://10.1.0.1:5557\"" } else { "" };
            let status =
                add(format!("{{\"url\": \"http://10.1.0.1:80\", \"{field}\": \"{events}\"{other}}}")).await;
            assert!(matches!(status, 400 | 403), "{field} {events}: {status}");
        }
    }
    assert_eq!(gateway.workers().await.as_array().map(Vec::len), Some(0));
    for url in
        ["http://10.1.255.1:80", "http://[fd00:1::9]:80", "http://W.example:80", "http://a.b.pods.example:80"]
    {
        assert_eq!(add(format!("{{\"url\": \"{url}\"}}")).await, 201, "{url}");
    }
}

#[tokio::test]
async fn a_worker_that_redirects_is_not_followed() {
    let (inner, worker) = (FakeWorker::start().await, FakeWorker::start().await);
    let toml = "[discovery]\nadmin_allow = [\"127.0.0.1\"]\n";
    let gateway = Gateway::builder().config(toml).start().await;
    let mut client = Client::connect(gateway.admin).await;
    let body = format!("{{\"url\": \"http://{}\"}}", worker.addr());
    client.request("POST", "/workers", &[("content-type", "application/json")], body.as_bytes()).await;
    assert_eq!(client.response().await.status(), 201);
    gateway.wait_ready(1).await;
    worker.manual();
    let location = format!("http://{}/v1/chat/completions", inner.addr());
    let asked = tokio::spawn(async move { post(gateway.addr, CHAT, &chat("hi")).await });
    worker.call().await.respond(307, &[("location", &location)], b"").await;
    let answer = asked.await.expect("an answer");
    // The client's own business, to which the answer passes as it is.
    assert_eq!((answer.status(), answer.header("location")), (307, Some(location.as_str())));
    assert!(answer.header(headers::WORKER).is_some());
    assert_eq!(inner.request_count(), 0);
}

/// Answers all that it is asked by sending elsewhere. Returns where it is, and how often it was asked.
async fn redirects(to: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (addr, asked) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = [0; 4_096];
            if stream.read(&mut head).await.is_ok_and(|bytes| bytes > 0) {
                counted.fetch_add(1, Ordering::SeqCst);
                let answer = format!(
                    "HTTP/1.1 302 Found\r\nlocation: http://{to}/health\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                );
                // Whoever has left does not want it.
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        }
    });
    (addr, asked)
}

#[tokio::test]
async fn a_probe_that_is_sent_elsewhere_goes_nowhere() {
    let inner = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (worker, asked) = redirects(inner.local_addr().unwrap()).await;
    let gateway = Gateway::builder().worker(worker).start().await;
    eventually!(asked.load(Ordering::SeqCst) >= 3, "it is probed");
    assert_eq!(gateway.ready_workers().await, 0);
    assert!(inner.accept().now_or_never().is_none(), "nobody came");
}
