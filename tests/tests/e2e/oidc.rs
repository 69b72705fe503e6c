//! Hazard: a token that its issuer has not signed, or not for here, is let in; a good one is not, or reaches
//! a worker; an issuer that is away keeps everybody out or lets anybody in. Tokens that others' libraries
//! have made: `tests/python/oidc_tokens.py`.

use std::net::SocketAddr;

use keyway_tests::bins::workspace_root;
use keyway_tests::cluster::config_file;
use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{Client, FakeWorker, Gateway, Response, eventually};
use serde_json::Value;
use tempfile::NamedTempFile;

use crate::tenants::table;

fn made() -> Value {
    let path = workspace_root().join("tests/data/oidc_tokens.json");
    serde_json::from_slice(&std::fs::read(path).expect("tokens")).expect("JSON")
}

struct Setup {
    gateway: Gateway,
    worker: FakeWorker,
    _tenants: NamedTempFile,
}

/// A gateway that believes the tokens of an issuer whose keys are there.
async fn setup(keys: SocketAddr, more: &str) -> Setup {
    let worker = FakeWorker::start().await;
    let tenants = config_file(&(table("analysts", "ka", "max_in_flight = 1") + &table("guests", "kg", "")));
    let toml = format!(
        "worker = [\"http://{}\"]\n[auth]\ntenants_file = {:?}\n[auth.oidc]\nissuer = \"https://login.example.com\"\n\
         audience = [\"keyway\"]\ntenant_claim = \"team\"\njwks_url = \"http://{keys}/keys\"\n{more}",
        worker.addr(),
        tenants.path(),
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(1).await;
    Setup { gateway, worker, _tenants: tenants }
}

async fn ask(gateway: &Gateway, header: (&str, &str)) -> Response {
    let mut client = Client::connect(gateway.addr).await;
    client.request("POST", CHAT, &[header], &chat("hi")).await;
    client.response().await
}

async fn ask_with(gateway: &Gateway, token: &Value) -> Response {
    ask(gateway, ("authorization", &format!("Bearer {}", token.as_str().expect("a token")))).await
}

async fn issuer(keys: &Value) -> FakeWorker {
    let issuer = FakeWorker::start().await;
    issuer.answer_at("/keys", 200, &[("content-type", "application/json")], &keys.to_string());
    issuer
}

#[tokio::test]
async fn a_good_token_is_its_tenant_s_and_a_bad_one_nobody_s() {
    let made = made();
    let issuer = issuer(&made["jwks"]).await;
    let Setup { gateway, worker, .. } = setup(issuer.addr(), "").await;
    eventually!(gateway.metrics().await.sum("keyway_oidc_keys", &[]) == 4.0);
    for (name, token) in made["good"].as_object().unwrap() {
        assert_eq!(ask_with(&gateway, token).await.status(), 200, "{name}");
        let by_key = ask(&gateway, ("x-api-key", token.as_str().unwrap())).await;
        assert_eq!(by_key.status(), 200, "{name}, where Anthropic's clients put it");
    }
    assert_eq!(ask(&gateway, ("authorization", "Bearer ka")).await.status(), 200, "keys are good beside");
    for request in worker.requests() {
        let head = format!("{:?}", request.head);
        assert!(!head.contains("eyJ"), "a token reached a worker: {head}");
    }
    let reached = worker.request_count();
    for (name, token) in made["bad"].as_object().unwrap() {
        let refused = ask_with(&gateway, token).await;
        assert_eq!(refused.status(), 401, "{name}");
        let said = refused.json();
        let message = said["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("the token cannot be used: "), "{name}: {message}");
        assert!(!said.to_string().contains("eyJ"), "it is not repeated");
    }
    assert_eq!(worker.request_count(), reached);
    let metrics = gateway.metrics().await;
    let of =
        |tenant| metrics.sum("keyway_tenant_requests_total", &[("tenant", tenant), ("outcome", "admitted")]);
    assert_eq!((of("analysts"), of("guests")), (2.0 * 12.0 + 1.0, 0.0));
    let judged = |outcome: &[(&str, &str)]| metrics.sum("keyway_oidc_tokens_total", outcome) as usize;
    let all = worker.request_count() - 1 + made["bad"].as_object().unwrap().len();
    assert_eq!((judged(&[("outcome", "good")]), judged(&[])), (24, all), "each is counted once");
    for outcome in ["expired", "audience", "issuer", "no_tenant", "signature", "algorithm", "malformed"] {
        assert!(metrics.sum("keyway_oidc_tokens_total", &[("outcome", outcome)]) > 0.0, "{outcome}");
    }
}

#[tokio::test]
async fn a_tenant_s_limits_hold_for_its_tokens_and_others_may_have_one_tenant_together() {
    let made = made();
    let issuer = issuer(&made["jwks"]).await;
    let Setup { gateway, worker, .. } = setup(issuer.addr(), "tenant = \"guests\"").await;
    eventually!(gateway.metrics().await.sum("keyway_oidc_keys", &[]) == 4.0);
    assert_eq!(ask_with(&gateway, &made["bad"]["no_tenant"]).await.status(), 200);
    assert_eq!(gateway.metrics().await.sum("keyway_tenant_requests_total", &[("tenant", "guests")]), 1.0);
    worker.hang();
    let token = format!("Bearer {}", made["good"]["RS256"].as_str().unwrap());
    let mut held = Client::connect(gateway.addr).await;
    held.request("POST", CHAT, &[("authorization", &token)], &chat("hi")).await;
    eventually!(worker.request_count() == 2);
    assert_eq!(ask_with(&gateway, &made["good"]["ES256"]).await.status(), 429, "one in flight");
}

#[tokio::test]
async fn while_an_issuer_is_away_no_token_is_called_bad_and_keys_go_on() {
    let made = made();
    let issuer = FakeWorker::start().await;
    issuer.answer_at("/keys", 503, &[], "not yet");
    let Setup { gateway, worker: _worker, .. } = setup(issuer.addr(), "").await;
    let early = ask_with(&gateway, &made["good"]["ES256"]).await;
    assert_eq!((early.status(), early.header("retry-after")), (503, Some("1")));
    assert_eq!(ask(&gateway, ("authorization", "Bearer ka")).await.status(), 200);
    let said = || gateway.process.log().iter().filter(|line| line.contains("cannot be fetched")).count();
    eventually!(said() == 1);
    issuer.answer_at("/keys", 200, &[], &made["jwks"].to_string());
    eventually!(ask_with(&gateway, &made["good"]["ES256"]).await.status() == 200, "once it is back");
    assert_eq!(said(), 1, "said once");
    issuer.answer_at("/keys", 503, &[], "gone again");
    assert_eq!(ask_with(&gateway, &made["good"]["RS256"]).await.status(), 200, "what is known stays");
}

#[tokio::test]
async fn an_issuer_that_calls_itself_otherwise_is_not_believed() {
    let made = made();
    let issuer = issuer(&made["jwks"]).await;
    let worker = FakeWorker::start().await;
    let tenants = config_file(&table("analysts", "ka", ""));
    let at = format!("http://{}", issuer.addr());
    let said = format!("{{\"issuer\":\"https://login.example.com\",\"jwks_uri\":\"{at}/keys\"}}");
    issuer.answer_at("/.well-known/openid-configuration", 200, &[], &said);
    let toml = format!(
        "worker = [\"http://{}\"]\n[auth]\ntenants_file = {:?}\n[auth.oidc]\nissuer = \"{at}\"\naudience = [\"keyway\"]\n",
        worker.addr(),
        tenants.path(),
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    let log = || gateway.process.log().join("\n");
    eventually!(log().contains("it is the issuer \"https://login.example.com\""), "{}", log());
    let said = format!("{{\"issuer\":\"{at}\",\"jwks_uri\":\"{at}/keys\"}}");
    issuer.answer_at("/.well-known/openid-configuration", 200, &[], &said);
    eventually!(gateway.metrics().await.sum("keyway_oidc_keys", &[]) == 4.0);
}
