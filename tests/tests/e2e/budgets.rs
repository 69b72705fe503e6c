//! Hazard: a tenant uses more than its budget of a month: as the gateway starts again, as it leaves its
//! streams, by another API, or by what is in flight. Or it is kept out although something is left, or is not
//! told why. Months, and not days: what comes at midnight is left to unit tests.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;

use keyway_tests::cluster::config_file;
use keyway_tests::openai::{CHAT, chat, chat_stream};
use keyway_tests::{Client, FakeWorker, Gateway, Response, eventually, ports};
use serde_json::{Value, json};
use tempfile::{NamedTempFile, TempDir};

use crate::shared_limits::Redis;
use crate::tenants::table;

/// What each answer takes here: 40 tokens of a prompt, of which 32 are cached, and 3 of an answer.
const TAKEN: u64 = 43;
const MESSAGES: &str = "/v1/messages";

/// Gateways that come one after the other, with one file of usage.
struct Place {
    worker: FakeWorker,
    tenants: NamedTempFile,
    folder: TempDir,
}

/// The budget of alice, beside bob who has none.
fn tenants(budget: &str) -> String {
    table("alice", "ka", &format!("[tenant.budget]\n{budget}")) + &table("bob", "kb", "")
}

async fn place(budget: &str) -> Place {
    let worker = FakeWorker::start().await;
    worker.set_usage(40, 32);
    let folder = tempfile::tempdir().expect("a folder");
    Place { worker, tenants: config_file(&tenants(budget)), folder }
}

impl Place {
    async fn gateway(&self) -> Gateway {
        self.gateway_of("usage.redb", "").await
    }

    async fn gateway_of(&self, file: &str, more: &str) -> Gateway {
        let config = format!(
            "worker = [\"http://{}\"]\n[auth]\ntenants_file = {:?}\n[usage]\nfile = {:?}\ncurrency = \"EUR\"\n\
             [[usage.price]]\nmodel = \"fake-model\"\nprompt_per_million = 500\ncached_per_million = 100\n\
             generated_per_million = 1000\n{more}",
            self.worker.addr(),
            self.tenants.path(),
            self.folder.path().join(file),
        );
        let gateway = Gateway::builder().config(&config).start().await;
        eventually!(gateway.readyz().await == 200);
        gateway
    }
}

async fn ask(addr: SocketAddr, key: &str, path: &str, body: &[u8]) -> Response {
    let mut client = Client::connect(addr).await;
    client.request("POST", path, &[("authorization", &format!("Bearer {key}"))], body).await;
    client.response().await
}

async fn usage(gateway: &Gateway) -> Value {
    keyway_tests::get(gateway.admin, "/usage?tenant=alice").await.json()
}

/// Waits until all of so many requests are over, and what they have used is known.
async fn all_over(gateway: &Gateway, requests: u64) {
    eventually!(usage(gateway).await["rows"][0]["requests"] == requests, "{}", usage(gateway).await);
}

/// A request of alice's that is served; what its answer says is left.
async fn served(gateway: &Gateway, number: u64) -> Option<String> {
    let answer = ask(gateway.addr, "ka", CHAT, &chat("hi")).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    all_over(gateway, number).await;
    answer.header("x-keyway-budget-left").map(str::to_owned)
}

async fn end(mut gateway: Gateway) -> String {
    gateway.process.terminate();
    assert!(gateway.process.ended().await.success(), "{:?}", gateway.process.log());
    gateway.process.log().join("\n")
}

#[tokio::test]
async fn who_has_used_its_tokens_is_refused_until_more_are_allowed() {
    let place = place("tokens_per_month = 100\nwarn_at = 0.5").await;
    let gateway = place.gateway().await;
    let left = [served(&gateway, 1).await, served(&gateway, 2).await, served(&gateway, 3).await];
    assert_eq!(left, [None, None, Some("tokens_per_month=14".to_owned())], "43 of 100 are below the mark");

    let refused = ask(gateway.addr, "ka", CHAT, &chat("hi")).await;
    assert_eq!((refused.status(), refused.header("x-keyway-budget-left")), (429, Some("tokens_per_month=0")));
    let error = &refused.json()["error"];
    assert_eq!(
        (&error["type"], &error["code"]),
        (&"insufficient_quota".into(), &"insufficient_quota".into())
    );
    let said = error["message"].as_str().unwrap();
    assert!(said.contains("budget.tokens_per_month") && said.contains("129 of 100 are used"), "{said}");
    assert!(said.contains("-01T00:00:00Z"), "{said}");
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=31 * 86_400).contains(&wait), "{wait}");
    // In the API's own words; and nothing else of hers, and nobody else, is kept out.
    let message =
        json!({"model": "fake-model", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]});
    let refused = ask(gateway.addr, "ka", MESSAGES, message.to_string().as_bytes()).await;
    let answer = refused.json();
    assert_eq!((refused.status(), &answer["type"]), (429, &"error".into()), "{answer}");
    assert_eq!(answer["error"]["type"], "rate_limit_error", "{answer}");
    assert_eq!(place.worker.request_count(), 3, "no worker was asked");
    let mut client = Client::connect(gateway.addr).await;
    client.request("GET", "/v1/models", &[("authorization", "Bearer ka")], b"").await;
    assert_eq!(client.response().await.status(), 200);
    assert_eq!(ask(gateway.addr, "kb", CHAT, &chat("hi")).await.status(), 200);
    let row = usage(&gateway).await["rows"][0].clone();
    assert_eq!((&row["refused_limit"], &row["prompt_tokens"]), (&2.into(), &120.into()), "{row}");
    let shown = async |metrics: &str| gateway.metrics().await.sum(metrics, &[("tenant", "alice")]);
    eventually!(shown("keyway_tenant_budget_used").await == 3.0 * TAKEN as f64);
    assert_eq!(shown("keyway_tenant_budget_allowed").await, 100.0);
    assert_eq!(shown("keyway_tenant_budget_crossings_total").await, 2.0);
    let refusals = [("tenant", "alice"), ("outcome", "insufficient_quota")];
    assert_eq!(gateway.metrics().await.sum("keyway_tenant_requests_total", &refusals), 2.0);
    let log = end(gateway).await;
    assert_eq!(log.matches("budget is nearly used up").count(), 1, "{log}");
    assert_eq!(log.matches("budget is used up").count(), 1, "{log}");

    let gateway = place.gateway().await;
    let refused = ask(gateway.addr, "ka", CHAT, &chat("hi")).await;
    assert!(refused.status() == 429 && refused.text().contains("129 of 100"), "{}", refused.text());
    std::fs::write(place.tenants.path(), tenants("tokens_per_month = 140\ntokens_per_day = 100000")).unwrap();
    eventually!(ask(gateway.addr, "ka", CHAT, &chat("hi")).await.status() == 200, "more is allowed");
    eventually!(ask(gateway.addr, "ka", CHAT, &chat("hi")).await.text().contains("172 of 140"));
    // The budget that came with it knows what was used before it.
    let of_day = [("budget", "tokens_per_day")];
    eventually!(gateway.metrics().await.sum("keyway_tenant_budget_used", &of_day) == 172.0);
    end(gateway).await;
}

#[tokio::test]
async fn who_has_spent_its_money_is_refused_and_costs_are_exact() {
    let place = place("cost_per_month = 0.02").await;
    let gateway = place.gateway().await;
    assert_eq!([served(&gateway, 1).await, served(&gateway, 2).await], [None, None]);
    let refused = ask(gateway.addr, "ka", CHAT, &chat("hi")).await;
    let said = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    // Each: 8 computed tokens, 32 cached and 3 generated ones, at 500, 100 and 1,000 for a million.
    assert!(refused.status() == 429 && said.contains("0.0204 of 0.02 are used"), "{said}");
    let answer = usage(&gateway).await;
    assert_eq!(
        (&answer["currency"], &answer["rows"][0]["cost"]),
        (&"EUR".into(), &"0.0204".into()),
        "{answer}"
    );
    assert_eq!(answer["rows"][0]["unpriced_tokens"], 0);
    end(gateway).await;
    let gateway = place.gateway().await;
    assert_eq!(ask(gateway.addr, "ka", CHAT, &chat("hi")).await.status(), 429, "after a restart, too");
    end(gateway).await;
}

#[tokio::test]
async fn what_is_in_flight_is_set_aside_and_a_stream_that_is_left_counts() {
    // Less than is set aside for an answer.
    let place = place("tokens_per_month = 100").await;
    let gateway = place.gateway().await;
    place.worker.manual();
    let mut client = Client::connect(gateway.addr).await;
    client.request("POST", CHAT, &[("authorization", "Bearer ka")], &chat_stream("tell me a story")).await;
    let mut call = place.worker.call().await;
    call.begin_stream().await;
    for _ in 0..120 {
        call.say("once").await;
    }
    assert_eq!(client.head().await.status(), 200);
    let refused = ask(gateway.addr, "ka", CHAT, &chat("hi")).await;
    assert_eq!((refused.status(), refused.header("retry-after")), (429, Some("1")), "{}", refused.text());
    assert!(refused.text().contains("set aside for requests in flight"), "{}", refused.text());
    for _ in 0..100 {
        let _ = client.next_event().await;
    }
    drop(client);
    call.must_be_aborted().await;
    place.worker.answer();
    all_over(&gateway, 2).await;
    let refused = ask(gateway.addr, "ka", CHAT, &chat("hi")).await;
    assert!(refused.status() == 429 && !refused.text().contains("set aside"), "{}", refused.text());
    assert!(refused.header("retry-after").unwrap().parse::<u64>().unwrap() > 0);
    end(gateway).await;
}

/// What a server answers to one command, in its own words (Redis' inline commands).
fn redis_says(port: u16, command: &str) -> String {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(format!("{command}\r\nQUIT\r\n").as_bytes()).unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    said.lines().filter(|line| !line.starts_with("+OK")).collect::<Vec<_>>().join("\n")
}

/// Waits until each gateway knows that alice has used so much.
async fn all_know(gateways: &[Gateway], used: u64) {
    let known = async |gateway: &Gateway| {
        gateway.metrics().await.sum("keyway_tenant_budget_used", &[("tenant", "alice")])
    };
    for gateway in gateways {
        eventually!(known(gateway).await == used as f64, "{} of {used}", known(gateway).await);
    }
}

#[tokio::test]
async fn two_gateways_hold_a_tenant_to_one_budget_and_outlive_the_store() {
    let Some(mut redis) = Redis::start(ports::free_addr().port(), &[]).await else { return };
    let place = place("tokens_per_month = 100").await;
    let store = format!("[store]\nurl = \"redis://127.0.0.1:{}\"\ngateways = 2\n", redis.port);
    let mut gateways = Vec::new();
    for file in ["a.redb", "b.redb"] {
        gateways.push(place.gateway_of(file, &store).await);
    }
    let is_up = async |gateway: &Gateway| gateway.metrics().await.sum("keyway_store_up", &[]);
    // No gateway has used as much as half by itself.
    for (turn, at) in [0, 1, 0].into_iter().enumerate() {
        eventually!(is_up(&gateways[at]).await == 1.0);
        assert_eq!(ask(gateways[at].addr, "ka", CHAT, &chat("hi")).await.status(), 200);
        all_know(&gateways, TAKEN * (turn as u64 + 1)).await;
    }
    let must_refuse = async |gateways: &[Gateway]| {
        for gateway in gateways {
            let refused = ask(gateway.addr, "ka", CHAT, &chat("hi")).await;
            assert!(refused.status() == 429 && refused.text().contains("129 of 100"), "{}", refused.text());
        }
    };
    must_refuse(&gateways).await;
    let keys = redis_says(redis.port, "KEYS keyway:tokens_per_month:*");
    let key = keys.lines().last().unwrap().to_owned();
    assert!(key.ends_with(":alice"), "{keys}");
    let left_ms: u64 =
        redis_says(redis.port, &format!("PTTL {key}")).trim_start_matches(':').parse().unwrap();
    assert!((1..=32 * 86_400_000).contains(&left_ms), "{left_ms}: it goes after its month");

    let port = redis.port;
    redis.process.kill();
    for gateway in &gateways {
        eventually!(is_up(gateway).await == 0.0);
    }
    must_refuse(&gateways).await;
    // One that has forgotten all is told all, also by who has nothing to do.
    let _redis = Redis::start(port, &[]).await.expect("as before");
    for gateway in &gateways {
        eventually!(is_up(gateway).await == 1.0);
    }
    end(gateways.remove(1)).await;
    gateways.push(place.gateway_of("b.redb", &store).await);
    eventually!(is_up(&gateways[1]).await == 1.0);
    all_know(&gateways, 3 * TAKEN).await;
    must_refuse(&gateways).await;
    for gateway in gateways {
        end(gateway).await;
    }
}
