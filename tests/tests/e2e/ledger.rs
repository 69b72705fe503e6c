//! Hazard: a tenant is billed for what it has not had, or twice, or what it has had is forgotten: at a
//! restart, as its client leaves, as the file is not there. Or whoever asks reads what others use.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use keyway_tests::bins::bin;
use keyway_tests::cluster::config_file;
use keyway_tests::openai::{CHAT, chat, chat_for, chat_stream};
use keyway_tests::process::Process;
use keyway_tests::{Call, Client, FakeWorker, Gateway, Response, eventually, post};
use serde_json::Value;
use tempfile::NamedTempFile;

use crate::tenants::{sha256, table};

const OPERATOR: &str = "kw-ledger-operator";
const ALICE: &str = "kw-ledger-alice";
const BOB: &str = "kw-ledger-bob";

/// Gateways that come one after the other, with one file.
struct Place {
    worker: FakeWorker,
    folder: tempfile::TempDir,
    token: NamedTempFile,
    tenants: NamedTempFile,
    more: String,
}

async fn place(more: &str) -> Place {
    let worker = FakeWorker::start().await;
    worker.set_usage(40, 32);
    let tenants = table("alice", ALICE, "") + &table("bob", BOB, "requests_per_minute = 6.0");
    Place {
        worker,
        folder: tempfile::tempdir().expect("a folder"),
        token: config_file(OPERATOR),
        tenants: config_file(&tenants),
        more: more.to_owned(),
    }
}

impl Place {
    fn config(&self, file: &Path) -> String {
        format!(
            "worker = [\"http://{}\"]\n[auth]\ntenants_file = {:?}\nadmin_token_file = {:?}\n\
             [usage]\ninstance = \"gw-1\"\nfile = {file:?}\n{}",
            self.worker.addr(),
            self.tenants.path(),
            self.token.path(),
            self.more
        )
    }

    async fn gateway(&self) -> Gateway {
        let config = self.config(&self.folder.path().join("usage.redb"));
        let gateway = Gateway::builder().config(&config).start().await;
        eventually!(gateway.readyz().await == 200);
        gateway
    }
}

/// What somebody with this key is answered who asks for usage.
async fn usage_for(admin: SocketAddr, query: &str, fields: &[(&str, &str)]) -> Response {
    let mut client = Client::connect(admin).await;
    client.request("GET", &format!("/usage{query}"), fields, b"").await;
    client.response().await
}

async fn usage(gateway: &Gateway, query: &str) -> Response {
    let bearer = format!("Bearer {OPERATOR}");
    usage_for(gateway.admin, query, &[("authorization", &bearer)]).await
}

async fn rows(gateway: &Gateway, query: &str) -> Vec<Value> {
    usage(gateway, query).await.json()["rows"].as_array().cloned().unwrap_or_default()
}

/// These sums of all rows.
async fn sums<const N: usize>(gateway: &Gateway, query: &str, names: [&str; N]) -> [u64; N] {
    let rows = rows(gateway, query).await;
    names.map(|name| rows.iter().map(|row| row[name].as_u64().unwrap_or_default()).sum())
}

async fn ask(gateway: &Gateway, key: &str, body: &[u8]) -> Client {
    let bearer = format!("Bearer {key}");
    let mut client = Client::connect(gateway.addr).await;
    client.request("POST", CHAT, &[("authorization", &bearer)], body).await;
    client
}

async fn status(gateway: &Gateway, key: &str, body: &[u8]) -> u16 {
    ask(gateway, key, body).await.response().await.status()
}

async fn end(mut gateway: Gateway) {
    gateway.process.terminate();
    assert!(gateway.process.ended().await.success(), "{:?}", gateway.process.log());
}

/// A stream of alice's, of which one token has come, and what the worker has of it.
async fn begun(place: &Place, gateway: &Gateway) -> (Client, Call) {
    place.worker.manual();
    let mut client = ask(gateway, ALICE, &chat_stream("tell me a long story")).await;
    let mut call = place.worker.call().await;
    call.begin_stream().await;
    call.say("once").await;
    assert_eq!(client.head().await.status(), 200);
    let _ = client.next_event().await;
    place.worker.answer();
    (client, call)
}

const TOKENS: [&str; 5] = ["requests", "completed", "prompt_tokens", "cached_tokens", "generated_tokens"];

#[tokio::test]
async fn sums_outlive_restarts_and_say_what_was_estimated() {
    let place = place("").await;
    for run in 1..=3 {
        let gateway = place.gateway().await;
        assert_eq!(status(&gateway, ALICE, &chat("hi")).await, 200);
        // All of it is there at once, and after each restart.
        let whole = async || sums(&gateway, "?tenant=alice", TOKENS).await;
        eventually!(whole().await == [run, run, 40 * run, 32 * run, 3 * run], "{:?}", whole().await);
        end(gateway).await;
    }
    let gateway = place.gateway().await;
    let key = &sha256(ALICE)[..12];
    let (client, call) = begun(&place, &gateway).await;
    drop(client);
    call.must_be_aborted().await;
    eventually!(sums(&gateway, "?tenant=alice", ["cancelled"]).await == [1]);
    let query = format!("?key={key}&group=tenant,key,model");
    let row = rows(&gateway, &query).await.remove(0);
    assert_eq!(
        (&row["tenant"], &row["model"], &row["instance"]),
        (&"alice".into(), &"fake-model".into(), &"gw-1".into())
    );
    assert_eq!((row["requests"].as_u64(), row["estimated_requests"].as_u64()), (Some(4), Some(1)));
    assert_eq!(
        (row["estimated_generated_tokens"].as_u64(), row["generated_tokens"].as_u64()),
        (Some(1), Some(10))
    );
    let prompt = row["estimated_prompt_tokens"].as_u64().unwrap();
    assert!((1..40).contains(&prompt) && row["prompt_tokens"] == 120 + prompt, "{row}");
    assert_eq!((row["ttft_count"].as_u64(), row["failed"].as_u64()), (Some(1), Some(0)));

    // What was refused was asked for, and took nothing. Nobody's requests are in no row.
    assert_eq!(status(&gateway, BOB, &chat("hi")).await, 200);
    assert_eq!(status(&gateway, BOB, &chat("hi")).await, 429);
    assert_eq!(status(&gateway, ALICE, &chat_for("nobody-serves-this", "hi", false)).await, 404);
    assert_eq!(status(&gateway, "wrong", &chat("hi")).await, 401);
    let ends = ["requests", "completed", "cancelled", "failed", "refused_limit", "refused_invalid"];
    eventually!(sums(&gateway, "", ends).await == [7, 4, 1, 0, 1, 1], "{:?}", sums(&gateway, "", ends).await);
    let bearer = format!("Bearer {OPERATOR}");
    let metrics = {
        let mut client = Client::connect(gateway.admin).await;
        client.request("GET", "/metrics", &[("authorization", &bearer)], b"").await;
        keyway_tests::Metrics::parse(&client.response().await.text())
    };
    let generated =
        |tenant| metrics.sum("keyway_tenant_tokens_total", &[("tenant", tenant), ("kind", "generated")]);
    assert_eq!((generated("alice"), generated("bob")), (1.0, 3.0), "of this process");
    end(gateway).await;
}

#[tokio::test]
async fn a_stream_that_the_end_cuts_counts_with_what_had_passed() {
    let place = place("[limits]\ndrain_seconds = 1\n").await;
    let gateway = place.gateway().await;
    let cut = begun(&place, &gateway).await;
    end(gateway).await;
    drop(cut);
    let gateway = place.gateway().await;
    let names = ["requests", "cancelled", "generated_tokens", "estimated_generated_tokens"];
    assert_eq!(sums(&gateway, "?by=hour", names).await, [1, 1, 1, 1]);
    end(gateway).await;
}

#[tokio::test]
async fn operators_read_it_as_they_ask_and_nobody_else_does() {
    let place = place("").await;
    let gateway = place.gateway().await;
    assert_eq!(status(&gateway, ALICE, &chat("hi")).await, 200);
    let tenants_own = format!("Bearer {ALICE}");
    for fields in [&[][..], &[("authorization", tenants_own.as_str())]] {
        assert_eq!(usage_for(gateway.admin, "", fields).await.status(), 401);
    }
    let operators_own = format!("Bearer {OPERATOR}");
    let fields = [("authorization", operators_own.as_str()), ("accept", "text/csv")];
    eventually!(sums(&gateway, "", ["requests"]).await == [1]);
    for table in [
        usage_for(gateway.admin, "?group=tenant,model", &fields).await,
        usage(&gateway, "?group=tenant,model&format=csv").await,
    ] {
        assert_eq!((table.status(), table.header("content-type")), (200, Some("text/csv; charset=utf-8")));
        let text = table.text();
        let mut lines = text.lines();
        assert!(lines.next().unwrap().starts_with("start,instance,tenant,model,requests,completed,"));
        let (start, rest) = lines.next().unwrap().split_once(',').unwrap();
        assert!(
            start.ends_with("T00:00:00Z")
                && rest.starts_with("gw-1,alice,fake-model,1,1,0,0,0,0,0,40,32,3,0,")
        );
        assert_eq!(lines.next(), None);
    }
    for (query, word) in [
        ("?by=week", "hour, day or month"),
        ("?from=today", "2026-11-29"),
        ("?group=user", "tenant, key and model"),
        ("?format=xml", "json or csv"),
        ("?tenants=alice", "tenant, key, model"),
    ] {
        let refused = usage(&gateway, query).await;
        let said = refused.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(refused.status() == 400 && said.contains(word), "{query}: {said}");
    }
    end(gateway).await;
}

#[tokio::test]
async fn a_file_has_one_gateway_and_one_that_cannot_be_used_holds_nobody_up() {
    let place = place("").await;
    let gateway = place.gateway().await;
    let config = config_file(&place.config(&place.folder.path().join("usage.redb")));
    let mut command = Command::new(bin("keyway"));
    command.args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--config"]).arg(config.path());
    let mut second = Process::spawn("keyway", &mut command);
    assert!(!second.ended().await.success());
    let said = second.log().join("\n");
    assert!(said.contains("usage.file") && said.contains("another process has it open"), "{said}");
    end(gateway).await;

    let config = place.config(&place.folder.path().join("nowhere/usage.redb"));
    let gateway = Gateway::builder().config(&config).start().await;
    eventually!(gateway.readyz().await == 200);
    assert_eq!(status(&gateway, ALICE, &chat("hi")).await, 200);
    let asked = usage(&gateway, "").await;
    assert_eq!((asked.status(), &asked.json()["error"]["code"]), (503, &"usage_unreadable".into()));
    gateway.process.announced("usage cannot be written").await;
    let said = gateway.process.log();
    let lines: Vec<_> = said.iter().filter(|line| line.contains("usage cannot be written")).collect();
    assert!(lines.len() == 1 && lines[0].contains("nowhere"), "{lines:?}");
    std::fs::create_dir(place.folder.path().join("nowhere")).unwrap();
    end(gateway).await;
    // The last try at the end found the folder.
    let gateway = Gateway::builder().config(&config).start().await;
    assert_eq!(sums(&gateway, "", TOKENS).await, [1, 1, 40, 32, 3]);
    end(gateway).await;
}

#[tokio::test]
async fn without_a_file_nothing_is_kept_and_operators_are_told() {
    let worker = FakeWorker::start().await;
    let gateway = Gateway::builder().worker(worker.addr()).start().await;
    eventually!(gateway.readyz().await == 200);
    assert_eq!(post(gateway.addr, CHAT, &chat("hi")).await.status(), 200);
    let answer = usage_for(gateway.admin, "", &[]).await;
    assert_eq!((answer.status(), &answer.json()["error"]["code"]), (404, &"usage_not_kept".into()));
    gateway.idle().await;
}
