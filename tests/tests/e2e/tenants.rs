//! Hazard: whoever reaches the gateway may use it, one tenant takes what is another's, or learns what another
//! asked. And keys that travel further than they must.

use keyway_tests::cluster::config_file;
use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::{CHAT, chat, chat_stream};
use keyway_tests::{Client, FakeWorker, Gateway, RealWorker, Response, eventually};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

/// A key that must be seen nowhere.
const ALICE: &str = "kw-canary-alice";

pub(crate) struct Setup {
    pub(crate) gateway: Gateway,
    pub(crate) workers: Vec<FakeWorker>,
    tenants: NamedTempFile,
}

pub(crate) fn table(name: &str, key: &str, limits: &str) -> String {
    format!("[[tenant]]\nname = {name:?}\nkey_sha256 = [\"{}\"]\n{limits}\n", sha256(key))
}

/// Of a key, by the tool that operators have at hand.
pub(crate) fn sha256(key: &str) -> String {
    let mut command = std::process::Command::new("sha256sum");
    let mut child = command
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("sha256sum of coreutils");
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), key.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap()[..64].to_owned()
}

pub(crate) async fn setup(n: usize, tenants: &str, more: &str) -> Setup {
    let tenants = config_file(tenants);
    let mut workers = Vec::new();
    for _ in 0..n {
        workers.push(FakeWorker::start().await);
    }
    let urls: Vec<String> = workers.iter().map(|worker| format!("\"http://{}\"", worker.addr())).collect();
    let toml = format!("worker = [{}]\n[auth]\ntenants_file = {:?}\n{more}", urls.join(", "), tenants.path());
    let gateway = Gateway::builder().config(&toml).log("info,keyway=trace").start().await;
    eventually!(gateway.readyz().await == 200);
    Setup { gateway, workers, tenants }
}

impl Setup {
    pub(crate) async fn ask(&self, key: Option<&str>, body: &[u8]) -> Response {
        let bearer = key.map(|key| format!("Bearer {key}"));
        let headers: Vec<(&str, &str)> =
            bearer.iter().map(|value| ("authorization", value.as_str())).collect();
        let mut client = Client::connect(self.gateway.addr).await;
        client.request("POST", CHAT, &headers, body).await;
        client.response().await
    }
}

fn salts(worker: &FakeWorker) -> Vec<String> {
    let salt = |body: &[u8]| {
        let body: Value = serde_json::from_slice(body).unwrap();
        body["cache_salt"].as_str().unwrap().to_owned()
    };
    worker.requests().iter().map(|request| salt(&request.body)).collect()
}

#[tokio::test]
async fn only_a_tenant_s_key_opens_and_it_goes_no_further() {
    let setup = setup(1, &table("alice", ALICE, ""), "").await;
    let hash = sha256(ALICE);
    for key in [None, Some("wrong"), Some(""), Some(hash.as_str())] {
        let refused = setup.ask(key, &chat("hi")).await;
        assert_eq!((refused.status(), refused.header("www-authenticate")), (401, Some("Bearer")), "{key:?}");
        assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
    }
    assert_eq!(setup.workers[0].request_count(), 0);
    assert_eq!(setup.ask(Some(ALICE), &chat("hi")).await.status(), 200);
    let seen = setup.workers[0].requests();
    assert_eq!(seen[0].head.header("authorization"), None);
    assert!(!String::from_utf8_lossy(&seen[0].head.raw).contains("canary"));
    setup.gateway.idle().await;
    let metrics = setup.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_tenant_requests_total", &[("tenant", "alice")]), 1.0);
    assert_eq!(metrics.sum("keyway_requests_total", &[("outcome", "invalid_api_key")]), 4.0);
    let log = || setup.gateway.process.log().join("\n");
    eventually!(log().contains("alice"));
    assert!(!log().contains("canary"), "{}", log());
}

#[tokio::test]
async fn tenants_share_no_prefix_and_each_finds_its_own_again() {
    let both = table("alice", "ka", "") + &table("bob", "kb", "");
    let setup = setup(1, &both, "").await;
    let prompt = chat(&"the same long prompt of both. ".repeat(40));
    // A client cannot choose another's salt.
    let forged = String::from_utf8(prompt.clone()).unwrap().replacen('{', "{\"cache_salt\":\"bob\",", 1);
    let mut matched = Vec::new();
    for (key, body) in [("ka", &prompt[..]), ("kb", &prompt), ("ka", forged.as_bytes()), ("kb", &prompt)] {
        let answer = setup.ask(Some(key), body).await;
        assert_eq!(answer.status(), 200);
        matched.push(answer.header("x-keyway-matched-tokens").unwrap().parse::<u64>().unwrap());
    }
    assert_eq!(matched[..2], [0, 0], "the second tenant finds nothing of the first");
    assert!(matched[2] > 100 && matched[3] > 100, "each finds its own: {matched:?}");
    let salts = salts(&setup.workers[0]);
    assert_eq!((&salts[0], &salts[1]), (&salts[2], &salts[3]));
    assert_ne!(salts[0], salts[1]);
    assert!(salts.iter().all(|salt| !salt.contains("alice") && !salt.contains("bob")));
}

/// Prompt tokens that a real engine found in its cache, for the same prompt by these tenants one after the
/// other, and at last for one of the same length that nobody has asked.
async fn cached_for(asking: &[&str], more: &str) -> Vec<u64> {
    let mut worker = RealWorker::spawn(&[]);
    worker.ready().await;
    let tenants = config_file(&(table("alice", "ka", "") + &table("bob", "kb", "")));
    let toml = format!(
        "worker = [\"http://{}\"]\n[auth]\ntenants_file = {:?}\n{more}",
        worker.addr(),
        tenants.path()
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    eventually!(gateway.readyz().await == 200);
    let ask = async |key: &str, text: &str| {
        let body = json!({
            "model": "keyway-random",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": text.repeat(40)}],
        });
        let bearer = format!("Bearer {key}");
        let mut client = Client::connect(gateway.addr).await;
        client.request("POST", CHAT, &[("authorization", &bearer)], body.to_string().as_bytes()).await;
        let answer = client.response().await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
    };
    let mut cached = Vec::new();
    for key in asking {
        cached.push(ask(key, "the same long prompt of both. ").await);
    }
    cached.push(ask(asking[0], "a long prompt of nobody else. ").await);
    cached
}

#[tokio::test]
async fn an_engine_finds_nothing_of_another_tenant_s_prompt_as_of_one_never_seen() {
    let cached = cached_for(&["ka", "kb", "ka", "kb"], "").await;
    let unseen = cached[4];
    assert_eq!(cached[..2], [unseen, unseen], "{cached:?}");
    assert!(cached[2] > unseen + 100 && cached[3] > unseen + 100, "each finds its own: {cached:?}");
    let shared = cached_for(&["ka", "kb"], "isolate = false\n").await;
    assert!(shared[1] > shared[2] + 100, "who may share finds it: {shared:?}");
}

#[tokio::test]
async fn tenants_that_may_share_do_and_bodies_pass_unchanged() {
    let both = table("alice", "ka", "") + &table("bob", "kb", "");
    let setup = setup(1, &both, "isolate = false\n").await;
    let prompt = chat(&"the same long prompt of both. ".repeat(40));
    setup.ask(Some("ka"), &prompt).await;
    let answer = setup.ask(Some("kb"), &prompt).await;
    assert_ne!(answer.header("x-keyway-matched-tokens"), Some("0"));
    assert!(setup.workers[0].requests().iter().all(|request| request.body == prompt));
}

#[tokio::test]
async fn a_limit_is_one_tenant_s_own_and_its_place_free_at_the_stream_s_end() {
    let both = table("alice", "ka", "max_in_flight = 1") + &table("bob", "kb", "requests_per_minute = 1.0");
    let setup = setup(1, &both, "").await;
    let worker = &setup.workers[0];
    for protocol in PROTOCOLS {
        worker.manual();
        let mut held = Client::connect(setup.gateway.addr).await;
        held.request("POST", CHAT, &[("authorization", "Bearer ka")], &chat_stream("hold")).await;
        let mut call = worker.call().await;
        call.begin_stream().await;
        call.say("one").await;
        assert_eq!(held.head().await.status(), 200, "{protocol:?}");
        worker.answer();
        let refused = setup.ask(Some("ka"), &chat("second")).await;
        assert_eq!((refused.status(), refused.header("retry-after")), (429, Some("1")));
        assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
        call.done().await;
        held.body().await;
        eventually!(setup.ask(Some("ka"), &chat("third")).await.status() == 200);
    }
    assert_eq!(setup.ask(Some("kb"), &chat("one")).await.status(), 200);
    let refused = setup.ask(Some("kb"), &chat("two")).await;
    assert_eq!(refused.status(), 429);
    let after: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((30..=60).contains(&after), "{after}");
    setup.gateway.idle().await;
}

#[tokio::test]
async fn a_key_can_be_added_and_taken_away_while_it_runs() {
    let setup = setup(1, &table("alice", "ka", ""), "").await;
    assert_eq!(setup.ask(Some("kb"), &chat("hi")).await.status(), 401);
    std::fs::write(setup.tenants.path(), table("bob", "kb", "")).unwrap();
    eventually!(setup.ask(Some("kb"), &chat("hi")).await.status() == 200);
    assert_eq!(setup.ask(Some("ka"), &chat("hi")).await.status(), 401);
    std::fs::write(setup.tenants.path(), "[[tenant]]\nname = 3").unwrap();
    setup.gateway.process.announced("the tenants stay as they were").await;
    assert_eq!(setup.ask(Some("kb"), &chat("hi")).await.status(), 200);
}

#[tokio::test]
async fn operators_show_a_token_where_one_is_set() {
    let (worker, token) = (FakeWorker::start().await, config_file("canary-token\n"));
    let toml =
        format!("worker = [\"http://{}\"]\n[auth]\nadmin_token_file = {:?}\n", worker.addr(), token.path());
    let gateway = Gateway::builder().config(&toml).start().await;
    eventually!(gateway.readyz().await == 200);
    for (path, bearer, status) in [
        ("/livez", "", 200),
        ("/readyz", "", 200),
        ("/", "", 200),
        ("/metrics", "", 401),
        ("/workers", "Bearer wrong", 401),
        ("/nothing", "", 401),
        ("/metrics", "Bearer canary-token", 200),
        ("/workers", "Bearer canary-token", 200),
        ("/nothing", "Bearer canary-token", 404),
    ] {
        let mut client = Client::connect(gateway.admin).await;
        client.request("GET", path, &[("authorization", bearer)], b"").await;
        assert_eq!(client.response().await.status(), status, "{path} with {bearer:?}");
    }
    // It opens nothing on the clients' side, where no key is wanted.
    assert!(!gateway.process.log().join("\n").contains("canary"));
}

#[tokio::test]
async fn other_paths_of_engines_pass_and_unknown_ones_do_not() {
    let worker = FakeWorker::start().await;
    let gateway = Gateway::builder().worker(worker.addr()).start().await;
    gateway.wait_ready(1).await;
    for (path, passes) in [
        ("/v1/responses", true),
        ("/v1/messages", true),
        ("/v1/rerank", true),
        ("/v1/anything/else", true),
        ("/tokenize", true),
        ("/rerank", true),
        ("/metrics", false),
        ("/tokenize/../metrics", false),
        ("/shutdown", false),
    ] {
        let before = worker.request_count();
        let status = keyway_tests::post(gateway.addr, path, &chat("hi")).await.status();
        assert_eq!(
            (status, worker.request_count() - before),
            if passes { (200, 1) } else { (404, 0) },
            "{path}"
        );
    }
}
