//! Hazard: a tenant reads what another has asked, by a path that nobody thought of, or steers the engine past
//! the others.

use std::fmt::Write as _;

use keyway_tests::cluster::config_file;
use keyway_tests::{Client, FakeWorker, Gateway, Response, eventually};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::tenants::sha256;

struct Setup {
    gateway: Gateway,
    worker: FakeWorker,
    _tenants: NamedTempFile,
}

async fn setup(more: &str) -> Setup {
    let table = |name: &str| format!("[[tenant]]\nname = {name:?}\nkey_sha256 = [\"{}\"]\n", sha256(name));
    let tenants = config_file(&(table("alice") + &table("bob")));
    let worker = FakeWorker::start().await;
    let toml = format!(
        "worker = [\"http://{}\"]\n[auth]\ntenants_file = {:?}\n{more}",
        worker.addr(),
        tenants.path()
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    eventually!(gateway.readyz().await == 200);
    Setup { gateway, worker, _tenants: tenants }
}

impl Setup {
    /// Asks as a tenant; the target goes out as it is written here.
    async fn ask(&self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        let mut head = format!("{method} {target} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice\r\n");
        for (name, value) in headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        let _ = write!(head, "content-length: {}\r\n\r\n", body.len());
        let mut client = Client::connect(self.gateway.addr).await;
        client.send(&[head.as_bytes(), body].concat()).await;
        client.response().await
    }

    async fn json(&self, method: &str, target: &str, body: &Value) -> Response {
        let kind = [("content-type", "application/json")];
        self.ask(method, target, &kind, body.to_string().as_bytes()).await
    }

    /// What the worker was asked last.
    fn asked(&self) -> Value {
        serde_json::from_slice(&self.worker.requests().last().unwrap().body).unwrap()
    }
}

const PATHS: [&str; 16] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/generate",
    "/v1/chat/completions/batch",
    "/v1/embeddings",
    "/pooling",
    "/v1/rerank",
    "/score",
    "/v1/classify",
    "/v1/systemone",
    "/v1/batches",
    "/v1/conversations/c/items",
    "/v1/whatever/comes/next",
    "/v1/responses/r/cancel",
];

/// The same path as somebody would write it who wants it not to be known.
fn spellings(path: &str) -> Vec<String> {
    let last = path.rfind('/').unwrap() + 1;
    let escaped = |at: usize| format!("{}%{:02x}{}", &path[..at], path.as_bytes()[at], &path[at + 1..]);
    let digits = |at: usize| format!("{:02x}", path.as_bytes()[at]);
    let nested = |first: &str, second: &str| format!("{}{first}{second}{}", &path[..last], &path[last + 1..]);
    let hidden = |digit: &str| format!("%{:02x}", digit.as_bytes()[0]);
    let mut all = String::new();
    for byte in path[1..].bytes() {
        let _ = write!(all, "%{byte:02X}");
    }
    vec![
        path.to_owned(),
        escaped(last),
        escaped(1),
        escaped(path.len() - 1),
        format!("/{}", all.replace("%2F", "/")),
        format!("/{all}"),
        format!("{path}/"),
        format!("{path}?x=%2F"),
        format!("/{path}"),
        path.replacen("/v1", "/v1/", 1),
        path.replacen("/v1", "/v1/.", 1),
        path.replacen("/v1", "/v1/%2e%2e/v1", 1),
        path.replacen("/v1/", "/v1%2f", 1),
        path.replacen("/v1/", "/v1/%2f", 1),
        format!("http://other.example{}", escaped(last)),
        escaped(last).replace('%', "%25"),
        // Undone twice, these would be the path.
        nested(&format!("%{}", hidden(&digits(last)[..1])), &digits(last)[1..]),
        nested(&format!("%{}", &digits(last)[..1]), &hidden(&digits(last)[1..])),
    ]
}

#[tokio::test]
async fn every_body_bears_the_salt_whatever_the_path_and_however_it_is_spelled() {
    let setup = setup("").await;
    let body =
        json!({"model": "fake-model", "cache_salt": "bob's", "messages": [], "input": "x", "prompt": "x"});
    setup.json("POST", PATHS[0], &body).await;
    let salt = setup.asked()["cache_salt"].clone();
    assert_ne!(salt, "bob's");
    let mut known = 0;
    for path in PATHS {
        for (i, target) in spellings(path).into_iter().enumerate() {
            for method in ["POST", ["PUT", "PATCH", "DELETE", "GET"][i % 4]] {
                setup.worker.forget_requests();
                let answer = setup.json(method, &target, &body).await;
                let requests = setup.worker.requests();
                if requests.is_empty() {
                    assert!(matches!(answer.status(), 400 | 404), "{method} {target}: {}", answer.status());
                }
                for request in requests.iter().filter(|request| !request.body.is_empty()) {
                    known += 1;
                    let asked: Value = serde_json::from_slice(&request.body).unwrap();
                    assert_eq!(asked["cache_salt"], salt, "{method} {target}");
                    let path = request.target().1.split('?').next().unwrap();
                    assert!(!path.contains('%') || path.contains("%25"), "{path}");
                }
            }
        }
    }
    assert!(known > PATHS.len() * 2 * 6, "{known}");
}

#[tokio::test]
async fn what_can_bear_no_salt_goes_only_where_no_prompt_is() {
    let setup = setup("").await;
    let form = "multipart/form-data; boundary=b";
    let parts = b"--b\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nfake-model\r\n--b--\r\n";
    for path in ["/v1/audio/transcriptions", "/v1/files", "/v1/images/edits"] {
        assert_eq!(setup.ask("POST", path, &[("content-type", form)], parts).await.status(), 200, "{path}");
    }
    let count = setup.worker.request_count();
    for (kind, body) in [
        (form, &parts[..]),
        ("application/x-www-form-urlencoded", b"prompt=x&model=fake-model"),
        ("application/json", b"[{\"prompt\":\"x\"}]"),
        ("application/json", b"\"x\""),
        ("application/json", b"{\"prompt\":\"x\""),
        ("text/plain", b"prompt"),
        ("application/octet-stream", b"\x00\x01"),
    ] {
        for path in ["/v1/chat/completions", "/v1/embeddings", "/v1/whatever", "/generate"] {
            let answer = setup.ask("POST", path, &[("content-type", kind)], body).await;
            assert_eq!((answer.status(), setup.worker.request_count()), (400, count), "{kind} {path}");
        }
    }
    // What curl calls every body is no form where it is JSON.
    let called = [("content-type", "application/x-www-form-urlencoded")];
    for body in [&b"{\"prompt\":\"x\",\"cache_salt\":\"mine\"}"[..], b"\n {\"prompt\":\"x\"}"] {
        assert_eq!(setup.ask("POST", "/v1/completions", &called, body).await.status(), 200);
        let asked = setup.asked();
        assert!(
            asked["prompt"] == "x" && asked["cache_salt"] != "mine" && asked["cache_salt"].is_string(),
            "{asked}"
        );
    }
    // What counts tokens computes no prompt, and what has no body asks for none.
    let counted = json!({"prompt": "x", "cache_salt": "mine"});
    assert_eq!(setup.json("POST", "/tokenize", &counted).await.status(), 200);
    assert_eq!(setup.asked(), counted);
    assert_eq!(setup.ask("POST", "/v1/whatever", &[], b"").await.status(), 200);
}

const STEERING: [&str; 8] = [
    "priority",
    "kv_transfer_params",
    "bootstrap_host",
    "data_parallel_rank",
    "session_params",
    "vllm_xargs",
    "rid",
    "nvext",
];

const STEERING_HEADERS: [&str; 5] = [
    "x-vllm-priority",
    "x-data-parallel-rank",
    "x-smg-target-worker",
    "x-prefiller-host-port",
    "x_vllm_priority",
];

/// Fields and headers of [`STEERING`] that reached the worker, by every path.
async fn steered(more: &str, path: &str) -> (Vec<String>, Vec<String>) {
    let setup = setup(more).await;
    let mut body = json!({"model": "fake-model", "messages": [], "temperature": 0});
    for name in STEERING {
        body[name] = json!({"remote_host": "10.0.0.1"});
    }
    let written = body.to_string().replace("\"rid\"", "\"r\\u0069d\"");
    let headers: Vec<_> = STEERING_HEADERS.iter().map(|&name| (name, "-1000")).collect();
    assert_eq!(setup.ask("POST", path, &headers, written.as_bytes()).await.status(), 200);
    let (asked, request) = (setup.asked(), setup.worker.requests().pop().unwrap());
    assert_eq!((&asked["model"], &asked["temperature"]), (&json!("fake-model"), &json!(0)));
    let fields = STEERING.into_iter().filter(|&name| asked.get(name).is_some());
    let headers = STEERING_HEADERS.into_iter().filter(|&name| request.head.header(name).is_some());
    (fields.map(str::to_owned).collect(), headers.map(str::to_owned).collect())
}

#[tokio::test]
async fn what_steers_the_engine_passes_only_where_the_operator_says_so() {
    for path in ["/v1/chat/completions", "/v1/%63ompletions", "/v1/embeddings", "/v1/whatever"] {
        assert_eq!(steered("", path).await, (vec![], vec![]), "{path}");
        assert_eq!(steered("isolate = false\n", path).await, (vec![], vec![]), "{path}");
    }
    let some = "steering = [\"priority\", \"x-vllm-priority\"]\n";
    let (fields, headers) = steered(some, "/v1/chat/completions").await;
    assert_eq!(fields, ["priority"]);
    assert_eq!(headers, ["x-vllm-priority", "x_vllm_priority"]);
}

#[tokio::test]
async fn an_id_that_tells_an_engine_where_to_fetch_from_is_replaced() {
    let setup = setup("").await;
    let marked = "a___prefill_addr_10.9.9.9:1___decode_addr_10.9.9.9:2";
    for (given, stays) in [("mine-1", true), (marked, false)] {
        let body = json!({"model": "fake-model", "messages": []}).to_string();
        let answer =
            setup.ask("POST", "/v1/chat/completions", &[("x-request-id", given)], body.as_bytes()).await;
        let seen = setup.worker.requests().pop().unwrap().head.header("x-request-id").unwrap().to_owned();
        assert_eq!((answer.header("x-request-id"), seen == given), (Some(seen.as_str()), stays));
    }
}

/// Without tenants nothing is taken out: who may ask at all is one party.
#[tokio::test]
async fn a_gateway_without_tenants_passes_bodies_as_they_come() {
    let worker = FakeWorker::start().await;
    let gateway = Gateway::builder().worker(worker.addr()).start().await;
    gateway.wait_ready(1).await;
    let body =
        json!({"model": "fake-model", "messages": [], "priority": 3, "cache_salt": "mine"}).to_string();
    let mut client = Client::connect(gateway.addr).await;
    client.request("POST", "/v1/chat/completions", &[("x-vllm-priority", "1")], body.as_bytes()).await;
    assert_eq!(client.response().await.status(), 200);
    let request = worker.requests().pop().unwrap();
    assert_eq!((&request.body[..], request.head.header("x-vllm-priority")), (body.as_bytes(), Some("1")));
}
